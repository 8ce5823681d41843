"""The one process that holds the private HPKE key and the package key: a program of its own, which the agent executes.

It imports nothing of Glasshouse but `errors`, `wire` and `package`. Start at `__main__`; the agent's side is
`runtime.keys.custodian`.
Source: docs/adr/0036-the-custodian-is-a-program.md.
"""

CONNECTION, PACKAGE = 3, 4
"""The descriptors that it is started with: a socket of packets to the agent, and the sealed package."""
