"""Attention over pages by Triton kernels, for CUDA devices."""
