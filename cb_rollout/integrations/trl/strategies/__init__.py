"""Strategies under a trainer: which rows of the data set its batches are made of."""

from cb_rollout.integrations.trl.strategies.trainer_strategy import TrainerStrategy, use_strategy

__all__ = ["TrainerStrategy", "use_strategy"]
