"""Roll out a model that is being trained: `RolloutGenerator` and `generate_batch`.

Owns prompts, checkpoints, verification and multi-process checks. Training code calls it.
"""
