"""Compute attention over the paged cache. `backend` selects one implementation per model.

`gathered` works for every model. `triton` (CUDA) and `cpu` (C++) read the pages directly.
"""
