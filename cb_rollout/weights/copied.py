"""Generate with an engine-owned copy of the weights, updated in place.

Owns the copy and the record of its last sync. Reads the training module and never changes it.
Gathers sharded weights one bucket at a time. Called from the training thread, the engine paused.
"""

import logging
import weakref
from functools import partial

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
from cb_rollout.weights.replica import (
    create_replica,
    held_dtype,
    misplaced,
    place,
    require_match,
    tensors_by_name,
)
from cb_rollout.weights.settings import settings_of, take_over_settings
from cb_rollout.weights.source import PlainSource, create_source, register_head
from cb_rollout.weights.tensor import Weight, module_classes, values_of, weights_of

_LOGGER = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


class CopiedWeights(WeightSynchronizer):
    """Follow the training module with a copy that generates."""

    def __init__(
        self,
        trained: torch.nn.Module,
        precision: Precision,
        device: torch.device | None,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Make the copy of a training module, wrapped or not, and fill it.

        `device`: of the copy; None: that of the training module. `tensor_parallel_size`:
        neighbouring processes over which the copy's layers are split.
        """
        self._hooked: list[str] = []
        self.follow(trained)
        self._check_forwards()
        self.autocast_dtype = precision.autocast_dtype
        self._precision = precision
        # A weight keeps its tensors alive, so no other tensor takes over an id.
        self._taken: dict[tuple[str, ...], tuple[Weight, Signature, tuple[float, ...]]] = {}
        self._matched: tuple[list[object], PlainSource, list[Weight]] | None = None
        _, weights, shapes = self._read()
        self._device = device or next(trained.parameters()).device
        # Tensors made in inference mode could not be written outside it.
        with devices.plain_modes():
            self.module = create_replica(
                self._source, weights, shapes, precision, self._device, tensor_parallel_size
            )
        self._held = tensors_by_name(self.module)
        self._classes = module_classes(self._source)
        self._settings = settings_of(self._source)
        # Split layers have their own sizes: there only what changes later is taken over.
        if tensor_parallel_size == 1:
            take_over_settings(self.module, self._source, self._settings)
        self.sync()

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a re-wrapped model as the source; FSDP1 and DeepSpeed wrap when training starts."""
        self.trained, self._source = trained, hf_compat.unwrap(trained)
        register_head(self._source)

    def sync(self) -> int:
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
                self._taken.clear()
            for storage, num_bytes in self._released:
                storage.resize_(num_bytes)
            self._released = ()
            stale = [weight for weight in weights if self._is_stale(weight)]
            # Reading replaces a shard's storage, so take the states first.
            states = {weight: _state(weight) for weight in stale}
            num_bytes = 0
            for weight, value in values_of(stale, source, self._stored_as):
                target = fsdp_compat.local_part(self._held[weight.names[0]])
                target.copy_(value)
                num_bytes += target.nbytes
                self._taken[weight.names] = (weight, *states[weight])
        return num_bytes

    def is_of(self, model: torch.nn.Module) -> bool:
        return hf_compat.unwrap(model) is self._source

    def differing(self) -> list[str]:
        """Return every name of the tensors that differ from a fresh full sync in any bit."""
        source, weights, _ = self._read()
        with torch.no_grad(), devices.plain_modes():
            return [
                name
                for weight, value in values_of(weights, source, self._stored_as)
                for name in weight.names
                if not _is_equal(fsdp_compat.local_part(self._held[name]), value)
            ]

    def own_weights(self) -> list[torch.Tensor]:
        return list(self.module.parameters())

    def _matching(self) -> tuple[PlainSource, list[Weight]]:
        """Match the training module's present tensors with the copy's.

        The match is kept while the module holds the same tensors, without adapters: matching by
        name takes longer than copying a small model.
        """
        structure = _structure(self.trained)
        if self._matched is not None and self._matched[0] == structure:
            return self._matched[1:]
        source, weights, shapes = self._read()
        require_match(self.module, weights, shapes)
        self._require_same_modules()
        # Tie the copy's tensors and choose their dtypes as the training module has them now.
        moved = misplaced(self.module, weights, self._precision)
        place(self.module, moved, self._precision, self._device)
        for weight in moved:
            self._taken.pop(weight.names, None)
        self._held = tensors_by_name(self.module)
        # The weights keep the tensors alive, so no other tensor takes over an id.
        self._matched = None if has_adapters(self._source) else (structure, source, weights)
        return source, weights

    def _check_forwards(self) -> None:
        """Raise `WeightSyncError` where the training module has own forwards; warn of its hooks."""
        if replaced := torch_compat.own_forwards(self._source):
            raise WeightSyncError(
                f"{len(replaced)} parts of the training module have a forward that is not their "
                f"class's: {abbreviated(replaced)}. A copy takes over tensors and settings only; "
                "use weight_sync='shared'."
            )
        hooked = torch_compat.own_hooks(self._source)
        if hooked and hooked != self._hooked:
            _LOGGER.warning(
                "a copy of the weights generates, and runs no forward hook of the training module "
                "(%s); if a hook changes what the model computes, use weight_sync='shared'",
                abbreviated(hooked),
            )
        self._hooked = hooked

    def _require_same_modules(self) -> None:
        """Raise `WeightSyncError` where a module of another kind computes since the copy was made.

        The copy has the modules that the model's config describes: tensors and settings are taken
        over, modules are not.
        """
        now = module_classes(self._source)
        before = self._classes
        replaced = [
            name for name in module_classes(self.module) if now.get(name) != before.get(name)
        ]
        if replaced:
            raise WeightSyncError(
                f"{len(replaced)} parts of the training module are of another class than when "
                f"its copy was made: {abbreviated(replaced)}. A copy takes over tensors and "
                "settings only; use weight_sync='shared', or make the change before training."
            )

    def _take_over_changed_settings(self) -> None:
        settings = settings_of(self._source)
        before = self._settings
        changed = [setting for setting, value in settings.items() if value != before.get(setting)]
        take_over_settings(self.module, self._source, changed)
        self._settings = settings

    def _read(self) -> tuple[PlainSource, list[Weight], dict[Weight, torch.Size]]:
        # A trainer may have sharded the module since the last sync.
        source = create_source(self.trained)
        self.is_collective = source.is_collective
        held = partial(held_dtype, self._precision)
        weights = weights_of(self._source, source.stored, held)
        return source, weights, {weight: source.shape(weight.base) for weight in weights}

    def _stored_as(self, weight: Weight) -> tuple[torch.dtype, Split | None]:
        target = self._held[weight.names[0]]
        return target.dtype, split_of(target)

    def _is_stale(self, weight: Weight) -> bool:
        # torch counts no writes to inference tensors.
        if weight.is_buffer or any(t.requires_grad or t.is_inference() for t in weight.tensors):
            return True
        _, *taken = self._taken.get(weight.names, (None,))
        return taken != list(_state(weight))


def _structure(model: torch.nn.Module) -> list[object]:
    """Return a value that changes when a tensor or a module is replaced, tied, resized or cast."""
    structure: list[object] = []
    for module in model.modules():
        structure.append((weakref.ref(module), type(module)))
        for tensors in (module._parameters, module._buffers):
            # A resize or a cast may keep the tensor and replace its contents.
            structure += ((id(t), t.shape, t.dtype) for t in tensors.values() if t is not None)
    return structure


def _state(weight: Weight) -> tuple[Signature, tuple[float, ...]]:
    """Return a value that changes when torch counts a write to any tensor of the weight."""
    signature = tuple((id(t), *fsdp_compat.write_state(t)) for t in weight.tensors)
    return signature, tuple(added.scaling for added in weight.low_ranks)


def _is_equal(held: torch.Tensor, value: torch.Tensor) -> bool:
    """Compare elementwise; NaN equals NaN."""
    wanted = value.to(held.device, held.dtype)
    return bool(((held == wanted) | ((held != held) & (wanted != wanted))).all())
