"""The instruments of this repository: workloads of `scripts/bench.py` that the wheel does not have.

Every workload is a function `bench_NAME(setup)`, as in `cb_rollout.tools.bench`, whose workloads,
contenders and clocks these use. `sizes` has the sizes of each; `peers` has more contenders, vLLM
among them; `roofline` counts kernels and products; `cluster` measures and simulates several
engines.
"""

# Sets the environment that transformers, trl and wandb read when they are imported.
import cb_rollout.tools.bench  # noqa: F401
