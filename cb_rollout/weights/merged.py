"""Hold, for each named adapter, the weights that merging it changes in a copy.

The copy itself contains the adapters that were active at the last sync. To run a named adapter, a
forward temporarily uses other tensors in place of the copy's. A sync reads these tensors too.
Called by the thread that steps the engine, or by one that paused it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from cb_rollout.compat.module_state import adapter_names
from cb_rollout.config.combinations import refused
from cb_rollout.engine.model.adapters import require_adapter, require_unmerged
from cb_rollout.errors import WeightSyncError
from cb_rollout.weights.tensor import Weight

if TYPE_CHECKING:
    from cb_rollout.weights.copied import CopiedWeights


class _Place(NamedTuple):
    """A module's entry for a tensor."""

    tensors: dict[str, torch.Tensor | None]
    """Parameters or buffers of the module."""
    name: str


class MergedAdapters:
    """The adapters of a training model whose copy generates: an `AdapterSource`."""

    def __init__(self, weights: "CopiedWeights") -> None:
        """Hold no adapter yet.

        Args:
            weights: the copy; its syncs call `refresh`.
        """
        self._weights = weights
        self._held: dict[str, dict[str, torch.nn.Parameter]] = {}
        """For each adapter that was asked for, the tensors in which it differs from the copy."""

    def names(self) -> Sequence[str]:
        return adapter_names(self._weights.source_module)

    def prepare(self, names: Sequence[str]) -> bool:
        missing = [name for name in names if name not in self._held]
        if not missing:
            return False
        for name in missing:
            require_adapter(name, self.names())
        if self._weights.is_collective:
            raise refused("adapter named, sharded")
        self._held.update({name: {} for name in missing})
        try:
            if self._weights.is_of_syncing_thread:
                self._weights.sync()
            else:
                self._require_whole(missing[0])
                self._weights.copy_adapters(missing)
                # An optimizer step may have begun meanwhile.
                self._require_whole(missing[0])
        except BaseException:
            for name in missing:
                self._held.pop(name, None)
            raise
        return True

    def _require_whole(self, name: str) -> None:
        """Raise `WeightSyncError` if another thread may be in the middle of an optimizer step."""
        if not self._weights.is_as_synced():
            raise WeightSyncError(
                f"adapter {name!r} was not used before and cannot be read now: weights or adapter "
                "settings changed after the last sync, so an optimizer step may be under way. Ask "
                "for this adapter again after sync_weights(), or use it once before training."
            )

    @contextmanager
    def activated(self, name: str) -> Iterator[None]:
        require_adapter(name, sorted(self._held))
        exchanged: list[tuple[_Place, torch.Tensor | None]] = []
        try:
            for tensor_name, tensor in self._held[name].items():
                place = _place_of(self._weights.module, tensor_name)
                exchanged.append((place, place.tensors[place.name]))
                place.tensors[place.name] = tensor
            yield
        finally:
            for place, tensor in exchanged:
                place.tensors[place.name] = tensor

    def mixed(self, names: Sequence[str | None]) -> None:
        # Each adapter is merged into its own weights, so one forward cannot run several.
        return None

    @property
    def held(self) -> list[str]:
        """Return the names of the adapters that were asked for."""
        return list(self._held)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are stored in addition to the copy's own."""
        return [tensor for held in self._held.values() for tensor in held.values()]

    def refresh(
        self,
        adapters: Sequence[str],
        active: Sequence[Weight],
        weights_under: Callable[[str], list[Weight]],
        values: Callable[[Sequence[Weight]], Iterator[tuple[Weight, torch.Tensor]]],
        targets: Mapping[str, torch.Tensor],
    ) -> int:
        """Read the weights of adapters; return the bytes written.

        Adapters that no longer exist in the model are dropped.

        Args:
            adapters: names of adapters that were asked for.
            active: weights of the training model under its active adapters.
            weights_under: returns the weights under a single adapter.
            values: yields the value of each weight, valid until the next.
            targets: the copy's tensors by name.

        Raises:
            ConfigurationError: an adapter is not plain LoRA, or another adapter is merged in place.
        """
        names = self.names()
        num_bytes = 0
        before = {name: _sources(weight) for weight in active for name in weight.names}
        for adapter in adapters:
            if adapter not in names:
                del self._held[adapter]
                continue
            require_unmerged(adapter, self._weights.source_module)
            changed: list[Weight] = []
            for weight in weights_under(adapter):
                if any(before.get(name) != _sources(weight) for name in weight.names):
                    changed.append(weight)
            earlier = self._held[adapter]
            held: dict[str, torch.nn.Parameter] = {}
            for weight, value in values(changed):
                tensor = earlier.get(weight.names[0])
                target = targets[weight.names[0]]
                # The model may have been cast since.
                if tensor is None or tensor.dtype != target.dtype:
                    empty = torch.empty_like(target)
                    tensor = torch.nn.Parameter(empty, requires_grad=False)
                tensor.copy_(value)
                num_bytes += tensor.nbytes
                held.update(dict.fromkeys(weight.names, tensor))
            self._held[adapter] = held
        return num_bytes


def _place_of(module: torch.nn.Module, tensor_name: str) -> _Place:
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    tensors = owner._parameters if name in owner._parameters else owner._buffers
    return _Place(tensors, name)  # type: ignore[arg-type]


def _sources(weight: Weight) -> tuple[object, ...]:
    """Return a value that is equal for weights computed from the same tensors."""
    scalings = tuple(low_rank.scaling for low_rank in weight.low_ranks)
    return (*map(id, weight.tensors), *scalings)
