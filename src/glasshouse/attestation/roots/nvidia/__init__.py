"""NVIDIA's GPUs, and the switches between them."""
