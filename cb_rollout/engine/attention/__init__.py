"""Compute attention: of decode steps over the paged cache, and of packed tokens.

`selector` chooses one backend of decode steps for a model; `backend` is what all of them share.
`triton` (CUDA) and `cpu` (C++) read the pages directly; `gathered` works for every model.
`traced_forward` runs the forward around them from a list of operators, or compiled. `packed` is for
prompts, and for the loss. Called by `model` and by `packing`.
"""
