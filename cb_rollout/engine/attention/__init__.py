"""Compute the attention of decode steps over the paged cache.

`selector` chooses one backend for a model; `backend` is what all of them share. `triton` (CUDA) and
`cpu` (C++) read the pages directly; `gathered` works for every model. Called by `model`.
"""
