"""ChaCha20-Poly1305 for tensors on a GPU, in Triton: `cipher.Cipher` seals and opens many messages at once.

Everything but `launch_shape` needs Triton, which comes with torch for CUDA; nothing here is imported before a tensor on
a GPU is to be sealed or opened.
"""
