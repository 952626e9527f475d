"""Own the way from logits to tokens and log-probabilities, for `executor` and `cuda_graphs`."""
