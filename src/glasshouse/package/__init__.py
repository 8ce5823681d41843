"""Sealed packages and sealed outputs: write, read, and hand on the keys of single assets (spec/sealed-package.md).

Laws: only one encoding of anything is valid; no byte is used before it is authentic; what fails leaves
zeros; a length is checked against its limit before anything is allocated. Bytes come and go as
streams: this room opens no file but the system's source of randomness.
"""
