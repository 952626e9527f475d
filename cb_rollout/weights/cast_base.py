"""Generate with the trainer's own adapters, over frozen layers whose weights are cast once.

Under autocast a frozen float32 weight would be cast at every decode step. Owns the cast weights,
and a twin of the training module: modules of the same classes that hold these weights and, for the
rest, the training module's own tensors, hooks and settings. The training module is never changed.
Called from the training thread, the engine paused.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.precision import Precision
from cb_rollout.weights.adapters import has_adapters, layers_read_by_adapters, merged_layers
from cb_rollout.weights.base import WeightSynchronizer
from cb_rollout.weights.replica import held_dtype


@dataclass(slots=True)
class _Cast:
    """A frozen weight and its cast value."""

    weight: torch.nn.Parameter
    value: torch.nn.Parameter
    state: tuple[object, ...] = ()
    """Changes when torch counts a write to the weight, or an adapter is merged into it."""


# A module and its twin, by the module's id.
_Twins = dict[int, tuple[torch.nn.Module, torch.nn.Module]]


class CastBaseWeights(WeightSynchronizer):
    """Follow a module with adapters: share what trains, and cast what is frozen."""

    def __init__(self, model: PreTrainedModel, precision: Precision) -> None:
        """Cast the frozen weights of an unwrapped model; `precision` has an `autocast_dtype`."""
        self.trained = model
        self.autocast_dtype = precision.autocast_dtype
        self._model, self._precision = model, precision
        self._casts: dict[int, _Cast] = {}
        self._twins: _Twins = {}
        self.sync()
        module = self._twins[id(model)][1]
        assert isinstance(module, PreTrainedModel)
        self.module = module

    def sync(self) -> int:
        hf_compat.refuse_sharded(self._model)
        frozen = dict(frozen_weights(self._model, self._precision))
        if self._released:
            for cast in self._casts.values():
                cast.state = ()
            self._allocate_released()
        before, self._casts, num_bytes = self._casts, {}, 0
        with torch.no_grad(), devices.plain_modes():
            for weight, state in frozen.items():
                cast = before.get(id(weight))
                if cast is None or cast.weight is not weight or cast.value.shape != weight.shape:
                    value = torch.empty_like(weight, dtype=self.autocast_dtype)
                    cast = _Cast(weight, torch.nn.Parameter(value, requires_grad=False))
                if cast.state != state or weight.is_inference():
                    cast.value.copy_(weight)
                    cast.state, num_bytes = state, num_bytes + cast.value.nbytes
                self._casts[id(weight)] = cast
        twins, self._twins = self._twins, {}
        self._mirror(self._model, twins)
        return num_bytes

    def differing(self) -> list[str]:
        """Return the names of the cast weights that a new cast would change."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        named = ((name, self._casts.get(id(tensor))) for name, tensor in parameters)
        with torch.no_grad(), devices.plain_modes():
            return [
                name
                for name, cast in named
                if cast and not cast.value.equal(cast.weight.to(cast.value.dtype))
            ]

    def own_weights(self) -> list[torch.Tensor]:
        return [cast.value for cast in self._casts.values()]

    def _mirror(self, module: torch.nn.Module, twins: _Twins) -> torch.nn.Module:
        """Make the twin of a module hold what the module holds, its weights cast; return it."""
        if id(module) in self._twins:
            return self._twins[id(module)][1]
        original, twin = twins.get(id(module), (None, module))
        if original is not module or type(twin) is not type(module):
            twin = object.__new__(type(module))
            vars(twin)["training"] = False
        self._twins[id(module)] = module, twin
        attributes = {
            name: MethodType(value.__func__, twin) if _is_bound(value, module) else value
            for name, value in vars(module).items()
        }
        attributes["_parameters"] = {
            name: self._held(module, tensor) for name, tensor in module._parameters.items()
        }
        attributes["_modules"] = {
            name: child and self._mirror(child, twins) for name, child in module._modules.items()
        }
        # What `Module.compile()` made would run the training module.
        attributes |= {"training": twin.training, "_compiled_call_impl": None}
        if module is self._model:
            attributes.pop("forward", None)
        vars(twin).clear()
        vars(twin).update(attributes)
        return twin

    def _held(
        self, module: torch.nn.Module, parameter: torch.nn.Parameter | None
    ) -> torch.nn.Parameter | None:
        """Return the cast value of a parameter where autocast would cast it, else itself."""
        cast = self._casts.get(id(parameter))
        if parameter is None or cast is None:
            return parameter
        is_cast = held_dtype(self._precision, module, parameter.dtype) == cast.value.dtype
        return cast.value if is_cast else parameter


def _is_bound(value: object, module: torch.nn.Module) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module


def can_be_mirrored(model: torch.nn.Module) -> bool:
    """Return whether no function on an instance computes with a module of its own.

    It would run the training module, which may be in training mode.
    """
    forwards = ((module, vars(module).get("forward")) for module in model.modules())
    return all(
        forward is None
        or (_is_bound(forward, module) and not _holds_modules(forward))
        # TRL's and accelerate's wrappers of the whole model; the twin runs its class's forward.
        or (module is model and _unwrapped(forward) is _unwrapped(type(model).forward))
        for module, forward in forwards
    )


def _unwrapped(function: Any) -> object:
    return inspect.unwrap(getattr(function, "__func__", function))


def _holds_modules(method: MethodType) -> bool:
    values = inspect.getclosurevars(method).nonlocals.values()
    return any(isinstance(getattr(value, "__self__", value), torch.nn.Module) for value in values)


def saves_casts(model: PreTrainedModel, precision: Precision) -> bool:
    """Return whether `CastBaseWeights` can run a model with adapters, and would cast any weight."""
    if precision.autocast_dtype is None or precision.copy_dtype is not None:
        return False
    if not has_adapters(model) or hf_compat.is_quantized(model) or not can_be_mirrored(model):
        return False
    return next(frozen_weights(model, precision), None) is not None


def frozen_weights(
    model: PreTrainedModel, precision: Precision
) -> Iterator[tuple[torch.nn.Parameter, tuple[object, ...]]]:
    """Yield each frozen weight that autocast casts at every use, and a state that writes change.

    Left out are weights that an adapter reads itself, as DoRA does for its norms: in float32.
    """
    owned = ((m, p) for m in model.modules() for p in m.parameters(recurse=False))
    read, merged = (
        {id(weight) for layer in layers for weight in layer.parameters()}
        for layers in (layers_read_by_adapters(model), merged_layers(model))
    )
    for owner, weight in owned:
        if weight.requires_grad or id(weight) in read:
            continue
        if held_dtype(precision, owner, weight.dtype) != weight.dtype:
            # PEFT merges without torch counting it; while merged, every sync casts anew.
            writes = 0 if weight.is_inference() else weight._version
            yield weight, (weight.data_ptr(), object() if id(weight) in merged else writes)
