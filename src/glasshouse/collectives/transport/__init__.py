"""Connections between the ranks of a group: addresses, handshakes, frames on sockets and in shared memory."""
