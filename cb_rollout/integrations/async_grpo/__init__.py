"""Roll out asynchronously for TRL's `AsyncGRPOTrainer`."""

from cb_rollout.integrations.async_grpo.worker import AsyncRollouts

__all__ = ["AsyncRollouts"]
