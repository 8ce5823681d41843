"""Connections between the ranks of a group, and the engine that carries operations out over them.

Laws: neither store nor network is trusted; only hellos, confirmations and sealed frames are written to a connection.
"""
