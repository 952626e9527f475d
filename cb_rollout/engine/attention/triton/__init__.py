"""Attend over the pages by Triton kernels, on CUDA devices; imports Triton where it is used."""
