"""Time cb_rollout beside its peers: the workloads of `cb-rollout bench` and what they share.

`run` starts a workload by its name. Every workload is a function `bench_NAME(setup)`, which prints
its progress and returns its results. A checkout has more workloads, in `scripts/benchmarks/`.
"""

import os

# These must be set before transformers, trl and wandb are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
