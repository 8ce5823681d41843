"""Connections between the ranks of a group: addresses, handshakes, frames on sockets and in shared memory.

Law: neither store nor network is trusted; only hellos, confirmations and sealed frames are written to a connection.
"""
