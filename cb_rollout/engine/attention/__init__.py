"""Compute attention: for decode steps over the paged cache, and for packed tokens.

`selector` chooses a model's backend of decode steps; `backend` is what all backends share.
`triton` (CUDA) and `cpu` (C++) read the pages directly; `gathered` works for every model.
`traced_forward` runs the forward around them from a list of operators, or compiled. `packed` is for
prompts, and for the loss. Called by `model` and by `packing`.
"""
