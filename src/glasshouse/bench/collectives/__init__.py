"""What sealed collectives cost beside plaintext ones: all-reduce, training iterations and start-up."""
