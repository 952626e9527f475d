"""Roll out asynchronously for TRL's `AsyncGRPOTrainer`, in its own process.

Called by the trainer's script, and by the trainer through its two protocols.
"""

from cb_rollout.integrations.async_grpo.worker import AsyncRollouts

__all__ = ["AsyncRollouts"]
