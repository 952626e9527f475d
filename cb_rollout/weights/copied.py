"""Generate with an engine-owned copy of the weights, updated in place.

Owns the copy and the record of its last sync. Reads the training module and never changes it.
Gathers sharded weights one bucket at a time. Called from the training thread while the engine is
paused; the first use of a named adapter may come from another thread.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.tensor_parallel import Split, split_of
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.precision import Precision
from cb_rollout.errors import WeightSyncError, abbreviated
from cb_rollout.weights.adapters import has_adapters
from cb_rollout.weights.base import WeightSynchronizer
from cb_rollout.weights.merged import MergedAdapters
from cb_rollout.weights.replica import (
    create_replica,
    held_dtype,
    misplaced,
    place,
    require_match,
    tensors_by_name,
)
from cb_rollout.weights.settings import Setting, settings_of, take_over_settings
from cb_rollout.weights.source import PlainSource, create_source, register_head
from cb_rollout.weights.state import weights_state
from cb_rollout.weights.tensor import Weight, module_classes, values_of, weights_of

_LOGGER = logging.getLogger(__name__)


class WeightState(NamedTuple):
    """State of a weight in the training module; it changes when torch counts a write."""

    tensors: tuple[tuple[int, int, int], ...]
    """Identity, address and number of writes of each tensor."""
    scalings: tuple[float, ...]
    """Scaling of each adapter."""


class Copied(NamedTuple):
    """A weight that was copied at the last sync."""

    weight: Weight
    """Keeps its tensors alive, so that no new tensor gets the same `id()`."""
    state: WeightState
    """The state of the weight when it was copied."""


class Match(NamedTuple):
    """The training module's tensors, matched by name to the copy's."""

    structure: list[object]
    """The training module's structure; the match is valid until it changes."""
    source: PlainSource
    weights: list[Weight]


class CopiedWeights(WeightSynchronizer):
    """Follow the training module with a copy that generates."""

    def __init__(
        self,
        trained: torch.nn.Module,
        precision: Precision,
        device: torch.device | None,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Make the copy of a training module, and fill it.

        Args:
            trained: the training module, wrapped or not.
            precision: dtypes of the copy's weights and of its forward.
            device: the copy's; None: that of the training module.
            tensor_parallel_size: neighbouring processes over which the copy's layers are split.
        """
        self._hooked: list[str] = []
        self.follow(trained)
        self._check_forwards()
        self.autocast_dtype = precision.autocast_dtype
        self._precision = precision
        self._copied: dict[tuple[str, ...], Copied] = {}
        """The weights of the last sync, by their names."""
        self._match: Match | None = None
        self._syncing_thread = weakref.ref(threading.current_thread())
        self._synced_state: list[object] = []
        """State of a training module with adapters at the last sync."""
        self._merged = MergedAdapters(self)
        self.adapters = self._merged
        _, weights, shapes = self._read()
        self._device = device or next(trained.parameters()).device
        # Tensors made in inference mode could not be written outside it.
        with devices.plain_modes():
            self.module = create_replica(
                trained=self._source,
                weights=weights,
                shapes=shapes,
                precision=precision,
                device=self._device,
                tensor_parallel_size=tensor_parallel_size,
            )
        self._targets = tensors_by_name(self.module)
        """The copy's tensors, tied ones under each name."""
        self._classes = module_classes(self._source)
        self._require_described_modules()
        self._settings = settings_of(self._source)
        # Split layers have their own sizes, so only settings that change later are taken over.
        if tensor_parallel_size == 1:
            take_over_settings(self.module, self._source, self._settings)
        self.sync()

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a re-wrapped model as the source; FSDP1 and DeepSpeed wrap when training starts."""
        self.trained = trained
        self._source = hf_compat.unwrap(trained)
        register_head(self._source)

    def sync(self) -> int:
        """Copy what may have changed, and note the calling thread as the one that trains."""
        self._syncing_thread = weakref.ref(threading.current_thread())
        num_bytes = self._copy_stale()
        self._synced_state = self._state_with_adapters()
        return num_bytes

    def _copy_stale(self) -> int:
        """Copy every tensor that may have changed since the last sync; return the bytes written.

        A trainable tensor may always have changed; a frozen one if torch counted a write to it or
        its storage moved. Adapters are merged into a fresh value of the frozen base.
        """
        # The wrapper may hold another module by now.
        self.follow(self.trained)
        # Autocast would round the adapters that are merged.
        with devices.plain_modes(), torch.no_grad():
            self._check_forwards()
            source, weights = self._matching()
            self._take_over_changed_settings()
            if self._released:
                self._copied.clear()
            for storage, num_bytes in self._released:
                storage.resize_(num_bytes)
            self._released = ()
            stale = [weight for weight in weights if self._is_stale(weight)]
            # Reading replaces a shard's storage, so take the states first.
            states = {weight: _state(weight) for weight in stale}
            num_bytes = 0
            for weight, value in values_of(stale, source, self._stored_as):
                target = fsdp_compat.local_part(self._targets[weight.names[0]])
                target.copy_(value)
                num_bytes += target.nbytes
                self._copied[weight.names] = Copied(weight, states[weight])
            num_bytes += self._refresh_adapters(source, weights, self._merged.held)
        return num_bytes

    def copy_adapters(self, names: Sequence[str]) -> None:
        """Read the weights of adapters that were just asked for; the copy itself stays as it is."""
        with devices.plain_modes(), torch.no_grad():
            source, weights, _ = self._read()
            self._refresh_adapters(source, weights, names)

    def _refresh_adapters(
        self, source: PlainSource, active: Sequence[Weight], names: Sequence[str]
    ) -> int:
        return self._merged.refresh(
            names,
            active=active,
            weights_under=partial(self._weights_of, source),
            values=partial(values_of, source=source, stored_as=self._stored_as),
            targets=self._targets,
        )

    @property
    def is_of_syncing_thread(self) -> bool:
        """Return whether the calling thread is the one that syncs.

        That thread also trains, so the weights are whole when it calls. A call by another thread
        may fall into an optimizer step.
        """
        return self._syncing_thread() is threading.current_thread()

    def is_as_synced(self) -> bool:
        """Return whether the training module has the weights and settings of the last sync.

        The contents of trainable tensors are compared: torch counts no write of a fused optimizer.
        """
        return self._state_with_adapters() == self._synced_state

    def _state_with_adapters(self) -> list[object]:
        """Return the training module's state; empty if it has no adapters that could be named."""
        if self.is_collective or not has_adapters(self._source):
            return []
        return weights_state(self._source)

    @property
    def source_module(self) -> torch.nn.Module:
        """Return the training module, without wrappers."""
        return self._source

    def is_of(self, model: torch.nn.Module) -> bool:
        return hf_compat.unwrap(model) is self._source

    def differing(self) -> list[str]:
        """Return the names of all tensors that differ in any bit from a fresh full sync."""
        source, weights, _ = self._read()
        names: list[str] = []
        with torch.no_grad(), devices.plain_modes():
            for weight, value in values_of(weights, source, self._stored_as):
                for name in weight.names:
                    target = fsdp_compat.local_part(self._targets[name])
                    if not _is_equal(target, value):
                        names.append(name)
        return names

    def own_weights(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self._merged.tensors]

    def _matching(self) -> tuple[PlainSource, list[Weight]]:
        """Match the training module's present tensors with the copy's.

        The match is kept while the module holds the same tensors, without adapters: matching by
        name takes longer than copying a small model.
        """
        structure = _structure(self.trained)
        if self._match is not None and self._match.structure == structure:
            return self._match.source, self._match.weights
        source, weights, shapes = self._read()
        require_match(self.module, weights, shapes)
        self._require_same_modules()
        # Tie the copy's tensors and choose their dtypes as the training module has them now.
        moved = misplaced(self.module, weights, self._precision)
        place(self.module, moved, self._precision, self._device)
        for weight in moved:
            self._copied.pop(weight.names, None)
        self._targets = tensors_by_name(self.module)
        # The weights keep the tensors alive, so no other tensor takes over an identity.
        self._match = None
        if not has_adapters(self._source):
            self._match = Match(structure, source, weights)
        return source, weights

    def _check_forwards(self) -> None:
        """Raise `WeightSyncError` for replaced forwards of the training module; warn of hooks."""
        replaced = torch_compat.own_forwards(self._source)
        if replaced:
            raise WeightSyncError(
                f"{len(replaced)} submodules of the training module have a patched forward: "
                f"{abbreviated(replaced)}. A copy receives tensors and settings, not patches; use "
                "weight_sync='shared'."
            )
        hooked = torch_compat.own_hooks(self._source)
        if hooked and hooked != self._hooked:
            _LOGGER.warning(
                "the rollout runs a copy of the model, without the training module's forward "
                "hooks (%s); if a hook changes what the model computes, use weight_sync='shared'",
                abbreviated(hooked),
            )
        self._hooked = hooked

    def _require_described_modules(self) -> None:
        """Raise `WeightSyncError` if a module has another class than in the copy."""
        replaced: list[str] = []
        for name, copied in module_classes(self.module).items():
            trained = self._classes.get(name, copied)
            if trained is not copied:
                replaced.append(f"{name} ({trained.__name__} for {copied.__name__})")
        if replaced:
            raise WeightSyncError(
                f"{len(replaced)} submodules of the training module have another class than the "
                f"model's config describes: {abbreviated(replaced)}. A copy is made from the "
                "config and would not compute what they do; use weight_sync='shared', or, for a "
                "sharded model, define them in the model's own class."
            )

    def _require_same_modules(self) -> None:
        """Raise `WeightSyncError` if a module was replaced since the copy was made.

        The copy has the modules that the model's config describes. A sync transfers tensors and
        settings, not modules.
        """
        now = module_classes(self._source)
        before = self._classes
        replaced: list[str] = []
        for name in module_classes(self.module):
            if now.get(name) != before.get(name):
                replaced.append(name)
        if replaced:
            raise WeightSyncError(
                f"{len(replaced)} submodules of the training module have changed class since its "
                f"copy was made: {abbreviated(replaced)}. A copy receives tensors and settings "
                "only; use weight_sync='shared', or make the change before training."
            )

    def _take_over_changed_settings(self) -> None:
        """Copy the settings of modules and config that changed since the last sync."""
        settings = settings_of(self._source)
        changed: list[Setting] = []
        for setting, value in settings.items():
            if value != self._settings.get(setting):
                changed.append(setting)
        take_over_settings(self.module, self._source, changed)
        self._settings = settings

    def _read(self) -> tuple[PlainSource, list[Weight], dict[Weight, torch.Size]]:
        """Return the source of the training module, its weights, and the whole shape of each."""
        # A trainer may have sharded the module since the last sync.
        source = create_source(self.trained)
        self.is_collective = source.is_collective
        weights = self._weights_of(source)
        shapes = {weight: source.shape(weight.base) for weight in weights}
        return source, weights, shapes

    def _weights_of(self, source: PlainSource, adapter: str | None = None) -> list[Weight]:
        """Return the training module's weights under an adapter; None: under the active ones."""
        dtype_of = partial(held_dtype, self._precision)
        return weights_of(self._source, source.stored, dtype_of, adapter=adapter)

    def _stored_as(self, weight: Weight) -> tuple[torch.dtype, Split | None]:
        target = self._targets[weight.names[0]]
        return target.dtype, split_of(target)

    def _is_stale(self, weight: Weight) -> bool:
        """Return whether the training module's value may differ from the one that was copied."""
        if weight.is_buffer:
            return True
        for tensor in weight.tensors:
            # torch counts no writes to inference tensors.
            if tensor.requires_grad or tensor.is_inference():
                return True
        copied = self._copied.get(weight.names)
        return copied is None or copied.state != _state(weight)


def _structure(model: torch.nn.Module) -> list[object]:
    """Return a value that changes when a tensor or a module is replaced, tied, resized or cast."""
    structure: list[object] = []
    for module in model.modules():
        structure.append((weakref.ref(module), type(module)))
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    # A resize or a cast may keep the tensor and replace its contents.
                    structure.append((id(tensor), tensor.shape, tensor.dtype))
    return structure


def _state(weight: Weight) -> WeightState:
    return WeightState(
        tensors=tuple((id(tensor), *fsdp_compat.write_state(tensor)) for tensor in weight.tensors),
        scalings=tuple(low_rank.scaling for low_rank in weight.low_ranks),
    )


def _is_equal(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Compare a tensor of the copy elementwise with its value; NaN equals NaN."""
    stored = value.to(target.device, target.dtype)
    are_both_nan = (target != target) & (stored != stored)
    return bool(((target == stored) | are_both_nan).all())
