"""Run continuous batching inside the training process, on the training weights.

    trainer = GRPOTrainer(...)
    cb_rollout.attach(trainer, RolloutConfig(max_memory_percent=0.4))
    trainer.train()

Names load on first use, so that `import cb_rollout` brings in neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from cb_rollout.compat.lazy import lazy_names

if TYPE_CHECKING:
    from cb_rollout.config.arguments import RolloutArguments as RolloutArguments
    from cb_rollout.config.rollout import RolloutConfig as RolloutConfig
    from cb_rollout.config.sampling import SamplingParams as SamplingParams
    from cb_rollout.engine.memory.plan import MemoryPlan as MemoryPlan
    from cb_rollout.engine.numerics.bitwise import bitwise as bitwise
    from cb_rollout.engine.service.manager import (
        ContinuousBatchingManager as ContinuousBatchingManager,
    )
    from cb_rollout.errors import ConfigurationError as ConfigurationError
    from cb_rollout.errors import EngineDeadError as EngineDeadError
    from cb_rollout.errors import IncompleteRolloutError as IncompleteRolloutError
    from cb_rollout.errors import InvalidRequestError as InvalidRequestError
    from cb_rollout.errors import LogprobDriftError as LogprobDriftError
    from cb_rollout.errors import OutOfCacheMemoryError as OutOfCacheMemoryError
    from cb_rollout.errors import QueueFullError as QueueFullError
    from cb_rollout.errors import RolloutError as RolloutError
    from cb_rollout.errors import ToolTimeoutError as ToolTimeoutError
    from cb_rollout.errors import WeightSyncError as WeightSyncError
    from cb_rollout.integrations.audit_callback import audit_callback as audit_callback
    from cb_rollout.integrations.trl.attachment import attach as attach
    from cb_rollout.integrations.trl.attachment import detach as detach
    from cb_rollout.integrations.trl.rollout_func import agent_reward as agent_reward
    from cb_rollout.integrations.trl.rollout_func import make_agent_rollout as make_agent_rollout
    from cb_rollout.integrations.trl.rollout_func import make_rollout_func as make_rollout_func
    from cb_rollout.packing.logprobs import packed_logprobs as packed_logprobs
    from cb_rollout.rollout.audit.auditor import audit as audit
    from cb_rollout.rollout.audit.report import AuditReport as AuditReport
    from cb_rollout.rollout.generator import RolloutGenerator as RolloutGenerator
    from cb_rollout.rollout.generator import generate_batch as generate_batch
    from cb_rollout.rollout.installed import install as install
    from cb_rollout.rollout.installed import uninstall as uninstall
    from cb_rollout.rollout.saved import SavedRollouts as SavedRollouts
    from cb_rollout.types import FinishReason as FinishReason
    from cb_rollout.types import GenerationOutput as GenerationOutput
    from cb_rollout.types import RequestStatus as RequestStatus
    from cb_rollout.types import ScoredText as ScoredText
    from cb_rollout.types import SyncReport as SyncReport

__version__ = "0.3.0"

__all__, __getattr__, __dir__ = lazy_names(__name__)
