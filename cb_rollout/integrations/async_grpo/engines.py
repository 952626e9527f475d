"""Run asynchronous rollouts on an engine or a pool, and bring the trainer's weights there.

Owns the pause of an engine that is written. The trainer's thread calls `pause`, `write` and
`resume`, in this order, and `close`.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Literal

import torch

from cb_rollout.errors import WeightSyncError
from cb_rollout.integrations.ray.pool import PooledGenerator, RolloutPool
from cb_rollout.rollout.generator import RolloutGenerator

InFlightName = Literal["keep", "recompute"]


class LocalEngine:
    """An engine of this process, whose own module the trainer's weights are written to."""

    def __init__(self, generator: RolloutGenerator, in_flight: InFlightName) -> None:
        self.generator = generator
        self._in_flight: InFlightName = in_flight
        self._pause = ExitStack()

    def pause(self) -> None:
        """Pause between two forwards."""
        self._pause.enter_context(self.generator.manager.pause(self._in_flight))

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the trainer's weights over the engine's.

        Raises:
            WeightSyncError: the two models do not have the same tensors.
        """
        held = dict(self.generator.manager.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in held or held[name].shape != tensor.shape:
                    found = tuple(held[name].shape) if name in held else "none"
                    raise WeightSyncError(
                        f"the trainer sends {name} {tuple(tensor.shape)}, and the engine's model "
                        f"has {found}; make AsyncRollouts of the trainer's own checkpoint."
                    )
                held[name].copy_(tensor)

    def resume(self) -> None:
        """Go on under the new weights."""
        self._pause.close()

    def close(self) -> None:
        """End the engine."""
        self.resume()
        self.generator.close()


class PooledEngine:
    """A pool, whose workers sample on until each has taken the new weights."""

    def __init__(self, pool: RolloutPool, in_flight: InFlightName) -> None:
        self.generator = PooledGenerator(pool)
        self._in_flight: InFlightName = in_flight

    def pause(self) -> None:
        """Do nothing: a worker pauses while it writes."""

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send the trainer's weights to every worker.

        Raises:
            WeightSyncError: the tensors are not the workers', or all workers refused them.
        """
        self.generator.pool.sync_weights(dict(tensors), in_flight=self._in_flight)

    def resume(self) -> None:
        """Do nothing: the workers run."""

    def close(self) -> None:
        """Do nothing: the pool is its owner's."""
