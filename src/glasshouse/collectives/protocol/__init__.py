"""Bytes that the ranks of a group exchange: keys, headers, handshake, sealed frames; no I/O, and no torch."""
