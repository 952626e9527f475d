"""Time a rollout beside its peers, for `cb-rollout bench`.

A checkout has more workloads, in `scripts/benchmarks/`, which use these contenders and sizes.
"""

import os

# These must be set before transformers, trl and wandb are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
