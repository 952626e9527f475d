"""The instruments of this repository: workloads of `scripts/bench.py`.

Every workload is a function `bench_NAME(setup)`. `sizes` has the sizes of each; the contenders that
the wheel has too run by `cb_rollout.tools.bench`; `peers` has more, vLLM among them; `roofline`
counts kernels and products; `cluster` measures and simulates several engines.
"""

import os

# These must be set before transformers, trl and wandb are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
