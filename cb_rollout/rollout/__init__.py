"""Generate rollouts from a model in training: `RolloutGenerator` and `generate_batch`.

Owns prompts, checkpoints, trajectories, verification, the recording of steps, and failures across
processes. Called by training code, the strategies, the server and the tools.
"""
