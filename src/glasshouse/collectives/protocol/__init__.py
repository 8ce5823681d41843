"""Bytes that the ranks of a group exchange: keys, headers, handshake, sealed frames, alerts; no I/O, and no torch."""
