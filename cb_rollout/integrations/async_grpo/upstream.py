"""Import the names of TRL that this folder uses; no other file of it imports trl."""

from trl.experimental.async_grpo import async_grpo_trainer as async_grpo_trainer
from trl.experimental.async_grpo import async_rollout_worker as async_rollout_worker
