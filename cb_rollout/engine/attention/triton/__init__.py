"""Attend over the pages with Triton kernels, on CUDA devices; Triton is imported on first use."""
