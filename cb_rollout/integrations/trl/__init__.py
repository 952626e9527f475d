"""Attach a TRL trainer: its rollouts run on this package's engine.

Called by the trainer's script, and by the trainer on its thread. `upstream` alone imports trl here.
"""

from cb_rollout.integrations.trl.attachment import attach, detach
from cb_rollout.integrations.trl.backend import add_part, log_metrics
from cb_rollout.integrations.trl.parts import TrainerPart
from cb_rollout.integrations.trl.rollout_func import make_rollout_func
from cb_rollout.integrations.trl.strategies import use_strategy

__all__ = [
    "TrainerPart",
    "add_part",
    "attach",
    "detach",
    "log_metrics",
    "make_rollout_func",
    "use_strategy",
]
