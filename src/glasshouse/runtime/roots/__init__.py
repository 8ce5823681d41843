"""The collecting half of each root of trust; `attestation.roots` has the appraising half, and the table."""
