"""Store on a model the engines that `persistent_manager=True` keeps for the next call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from cb_rollout.engine.service.manager import ContinuousBatchingManager
    from cb_rollout.rollout.generator import RolloutGenerator

KEPT_ATTRIBUTE = "_cb_rollout_kept"


@dataclass
class KeptEngines:
    """Engines of a model; a copied or pickled model gets an empty holder."""

    generator: RolloutGenerator | None = None
    """Kept by `generate_batch`."""
    manager: ContinuousBatchingManager | None = None
    """Kept by `continuous_batching_context_manager`, or by a `stop` of its manager."""

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()


def kept_by(model: torch.nn.Module) -> KeptEngines:
    """Return the engines that a model keeps; nothing is written."""
    return vars(model).get(KEPT_ATTRIBUTE, KeptEngines())


def keep_generator(model: torch.nn.Module, generator: RolloutGenerator) -> None:
    """Store a generator on the model."""
    vars(model).setdefault(KEPT_ATTRIBUTE, KeptEngines()).generator = generator


def keep_manager(model: torch.nn.Module, manager: ContinuousBatchingManager) -> None:
    """Store a manager on the model."""
    vars(model).setdefault(KEPT_ATTRIBUTE, KeptEngines()).manager = manager


def free_kept(model: torch.nn.Module) -> None:
    """End the engines that a model keeps, free their memory, and leave nothing on the model."""
    kept = vars(model).pop(KEPT_ATTRIBUTE, KeptEngines())
    if kept.generator is not None:
        kept.generator.close()
    if kept.manager is not None:
        kept.manager.close()
