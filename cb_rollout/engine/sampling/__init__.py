"""Turn logits into tokens and log-probabilities.

`sampler` gives sequences their next tokens. It calls `logits_processors`, `truncation`, then
`draw`. Called by `executor` and `cuda_graphs`.
"""
