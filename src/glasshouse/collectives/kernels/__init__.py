"""ChaCha20-Poly1305 for tensors on a GPU, in Triton: `aead.Cipher` seals and opens many messages at once.

`passes` holds the two kernels, `chacha20` and `poly1305` their arithmetic, `shape` how work is cut up, `inspection`
what the compiler made of them. Everything but `shape` needs Triton, which comes with torch for CUDA; nothing here is
imported before a tensor on a GPU is to be sealed or opened.
"""
