"""The rented machine's side: harden, measure, attest, open, supervise, seal outputs, wipe.

This is the code that is trusted with keys. Laws: it never imports a training framework; keys live in the
custodian's few moments and in secret memory, plaintext in the worker and in wiped buffers on its way out;
every run ends through `run.zeroize`. Start at `__main__`.
"""
