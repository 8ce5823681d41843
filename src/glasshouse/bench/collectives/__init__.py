"""What sealed collectives cost beside plaintext ones: all-reduce, training iterations, start-up, and a cost model."""
