"""The key-release protocol of spec/key-release.md, both sides, without I/O.

Laws: bytes and the clock arrive as arguments, values and bytes leave; no function here sends,
stores or waits. Secrecy and authenticity never depend on the transport.
"""
