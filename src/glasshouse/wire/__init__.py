"""Bytes <-> values: canonical JSON, records, chunked AEAD, envelopes, tokens, HPKE, the Merkle tree, the state table.

Laws: no socket, clock, file or environment is touched; times and randomness are arguments wherever a test must control
them. Only one encoding of a value is valid: decode then encode reproduces the input.
"""
