"""What `cb-rollout bench` times: a module a workload, and what they share.

Each workload's module has `bench(setup)`, which prints as it goes and returns its results. The
shared parts: `sizes` and `model` say what is run, `workload` what is asked, `contenders` who does
it, `turns` times them side by side, `machine` says what could be reached, `record` and `table` keep
and show what came out. Of these, `sizes` to `machine` need only what cb_rollout itself needs.
"""

import os

# Read where transformers, trl and wandb are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
