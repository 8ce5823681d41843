"""Every collective and the point-to-point messages, as values that an engine carries out.

Law: an operation names in advance, for each peer, the frames that it sends and those that it takes, in one fixed order,
so that both ends agree without negotiation; ranks that name different operations fail with what each of them does.
"""
