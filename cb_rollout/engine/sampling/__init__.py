"""Turn logits into tokens and log-probabilities."""
