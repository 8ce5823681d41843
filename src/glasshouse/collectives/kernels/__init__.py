"""ChaCha20-Poly1305 for tensors on a GPU, in Triton; imported when a tensor on a GPU is to be sealed or opened."""
