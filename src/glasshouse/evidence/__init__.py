"""What happened on the rented machine: events, the log and its signed heads, receipts, the public artifact.

Laws: bytes in, values out. No file, socket, clock or randomness is touched; the clock and the place
where lines go are arguments. A document is *genuine* here; whether its whole chain holds is composed
in `glasshouse.jobs.verify.documents`. Specification: spec/evidence.md.
"""
