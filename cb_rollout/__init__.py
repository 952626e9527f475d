"""Run continuous batching inside the training process, on the training weights.

    trainer = GRPOTrainer(...)
    cb_rollout.attach(trainer, RolloutConfig(max_memory_percent=0.4))
    trainer.train()

Names load on first use, so that `import cb_rollout` brings in neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cb_rollout.config.arguments import RolloutArguments
    from cb_rollout.config.rollout import RolloutConfig
    from cb_rollout.config.sampling import SamplingParams
    from cb_rollout.engine.memory.plan import MemoryPlan
    from cb_rollout.engine.numerics.bitwise import bitwise
    from cb_rollout.engine.service.manager import ContinuousBatchingManager
    from cb_rollout.errors import (
        ConfigurationError,
        EngineDeadError,
        IncompleteRolloutError,
        InvalidRequestError,
        LogprobDriftError,
        OutOfCacheMemoryError,
        QueueFullError,
        RolloutError,
        ToolTimeoutError,
        WeightSyncError,
    )
    from cb_rollout.integrations.trl.attachment import attach, detach
    from cb_rollout.integrations.trl.rollout_func import make_rollout_func
    from cb_rollout.packing.logprobs import packed_logprobs
    from cb_rollout.rollout.generator import RolloutGenerator, generate_batch
    from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus, SyncReport

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "ContinuousBatchingManager",
    "EngineDeadError",
    "FinishReason",
    "GenerationOutput",
    "IncompleteRolloutError",
    "InvalidRequestError",
    "LogprobDriftError",
    "MemoryPlan",
    "OutOfCacheMemoryError",
    "QueueFullError",
    "RequestStatus",
    "RolloutArguments",
    "RolloutConfig",
    "RolloutError",
    "RolloutGenerator",
    "SamplingParams",
    "SyncReport",
    "ToolTimeoutError",
    "WeightSyncError",
    "attach",
    "bitwise",
    "detach",
    "generate_batch",
    "make_rollout_func",
    "packed_logprobs",
]

_MODULES = {
    "config.arguments": ("RolloutArguments",),
    "config.rollout": ("RolloutConfig",),
    "config.sampling": ("SamplingParams",),
    "engine.memory.plan": ("MemoryPlan",),
    "engine.numerics.bitwise": ("bitwise",),
    "engine.service.manager": ("ContinuousBatchingManager",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "integrations.trl.attachment": ("attach", "detach"),
    "integrations.trl.rollout_func": ("make_rollout_func",),
    "packing.logprobs": ("packed_logprobs",),
    "rollout.generator": ("RolloutGenerator", "generate_batch"),
    "types": ("FinishReason", "GenerationOutput", "RequestStatus", "SyncReport"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cb_rollout' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cb_rollout.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
