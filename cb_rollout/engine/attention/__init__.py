"""Attention that reads the pages where they lie: kernels, when they are used, and how a model's own
forward comes to call them."""
