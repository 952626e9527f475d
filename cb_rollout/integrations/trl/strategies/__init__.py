"""Strategies under a trainer: they choose the data set rows of its batches."""

from cb_rollout.integrations.trl.strategies.trainer_strategy import TrainerStrategy, use_strategy

__all__ = ["TrainerStrategy", "use_strategy"]
