"""Hardware evidence at the gate: how it is read, what stands beside it in the database, and the owner's collateral."""
