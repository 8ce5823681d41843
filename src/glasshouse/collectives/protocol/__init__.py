"""What the ranks of a group send each other, bytes in and bytes out: keys, headers, handshake, sealed frames, alerts.

Laws: no socket, clock or environment, and no torch; nothing that was received is used before it is authentic.
Source: spec/sealed-collectives.md, sections 2 to 6 and 8.
"""
