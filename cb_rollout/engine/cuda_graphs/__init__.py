"""Capture decode steps as CUDA graphs and replay them."""
