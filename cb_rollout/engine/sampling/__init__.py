"""Turn logits into tokens and log-probabilities, for `executor` and `cuda_graphs`."""
