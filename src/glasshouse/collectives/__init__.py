"""The `sealed` backend of torch.distributed and its AEAD kernels: gradients that cannot be read or changed on the wire.

Laws: no collective leaves a rank in plaintext, and what is not sealed raises; store and network are not trusted: they
can stop a job, never read or change it; a failure zeroes the outputs and ends the group on every rank. This room is
given keys and cannot get them: it imports only `wire` and `errors`.
Source: spec/sealed-collectives.md.
"""
