"""What sealed collectives cost beside plaintext ones: all-reduce, training iterations, large models' buckets."""
