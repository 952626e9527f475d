"""Settings: `RolloutConfig`, `SamplingParams`, and their translation from and to other libraries.

Imports no torch. Everything else in the package may read it.
"""

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams

__all__ = ["RolloutConfig", "SamplingParams"]
