"""Estimate the memory of the training beside an engine, then measure it over one full step.

Until the first optimizer step the peak of torch's allocator, or of the process's resident size, is
reset whenever the engine becomes idle. Called by the engine's thread; training's records the step.
"""

import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, TrainingBytes
from cb_rollout.errors import ConfigurationError

# By a part of the name of a torch, bitsandbytes or torchao class, or of the trainer's `optim`.
# Momentum is counted by `TENSOR_SETTINGS`; Adafactor's rows and columns of factors are negligible.
_NAMES_BY_TENSORS = (
    "sgd adafactor lomo muon", "schedule_free_sgd lion adagrad rmsprop", "adam adadelta rprop",
    "ademamix",
)  # fmt: skip
TENSORS_PER_PARAMETER = {
    name: number for number, names in enumerate(_NAMES_BY_TENSORS) for name in names.split()
}

# Adam's two moments, assumed of an optimizer of an unknown class, or where none is known.
DEFAULT_TENSORS = 2

# Settings that add a tensor each: of SGD and RMSprop, Adam, RMSprop, Adafactor.
TENSOR_SETTINGS = ("momentum", "amsgrad", "centered", "beta1")

# By a part of the name; other optimizers store states in the dtype of their parameter. Quantised
# states have a float32 scale for every 256 or 128 elements.
BYTES_PER_ELEMENT = {"8bit": 1 + 4 / 256, "fp8": 1 + 4 / 256, "4bit": 0.5 + 4 / 128, "32bit": 4.0}

# An optimizer, the class of one, or the name of a known one.
OptimizerOrName = torch.optim.Optimizer | type[torch.optim.Optimizer] | str

# Those that count the steps of their model's optimizer.
_WATCHERS: "weakref.WeakSet[TrainingMemory]" = weakref.WeakSet()


def optimizer_state_bytes(
    name: str, settings: Mapping[str, Any], num_elements: int, num_bytes: int
) -> int:
    """Return the bytes of states; `name` is that of the class, or of the trainer's `optim`."""
    matches = _matching_names(name)
    num_tensors = TENSORS_PER_PARAMETER[max(matches, key=len)] if matches else DEFAULT_TENSORS
    num_tensors += sum(bool(settings.get(setting)) for setting in TENSOR_SETTINGS)
    for part, width in BYTES_PER_ELEMENT.items():
        if part in name.lower():
            return int(num_tensors * width * num_elements)
    return num_tensors * num_bytes


def _matching_names(name: str) -> list[str]:
    name = name.lower().replace("-", "_")
    return [known for known in TENSORS_PER_PARAMETER if known in name]


class TrainingMemory:
    """Estimate, then measure, what training holds and will still allocate."""

    def __init__(
        self,
        trained: torch.nn.Module,
        generating: torch.nn.Module,
        device: torch.device,
        optimizer: OptimizerOrName | None,
        reserve_gib: float | str,
    ) -> None:
        """Watch for optimizer steps; `ConfigurationError`: `optimizer` is none, nor a known name.

        `generating` is `trained`, or a copy of it. Without an optimizer, training is expected if
        the model is in training mode. `reserve_gib`: still to be allocated; "auto": measured.
        """
        self._trained, self._generating, self._device = trained, generating, device
        self._optimizer_name = ""
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            # accelerate's `prepare` wraps it.
            self._optimizer = weakref.ref(getattr(optimizer, "optimizer", optimizer))
        elif isinstance(optimizer, type):
            self._optimizer_name = optimizer.__name__
        elif isinstance(optimizer, str) and _matching_names(optimizer):
            self._optimizer_name = optimizer
        elif optimizer is not None:
            raise ConfigurationError(
                f"optimizer={optimizer!r} is neither a torch optimizer nor a name with one of "
                f"{', '.join(sorted(TENSORS_PER_PARAMETER))}; pass the optimizer or its class, or "
                "leave it out to have Adam's memory reserved."
            )
        self._is_expected = optimizer is not None or trained.training
        self._set_reserve = None if isinstance(reserve_gib, str) else int(reserve_gib * GIB)
        self._is_measuring = False
        self._peak: int | None = None
        self.num_steps = 0
        """Steps of the trained model's optimizers; torch counts no write by a fused one (2.13)."""
        self.is_settled = False
        """True once the memory was planned after that step."""
        _watch_optimizers()
        _WATCHERS.add(self)

    def record_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step of an optimizer, unless it holds none of the trained parameters."""
        ours = {id(parameter) for parameter in self._trained.parameters()}
        steps = (id(p) for group in optimizer.param_groups for p in group["params"])
        if not ours.isdisjoint(steps):
            if not self.num_steps:
                self._optimizer = weakref.ref(optimizer)
            self.num_steps += 1

    @property
    def needs_new_plan(self) -> bool:
        return self.num_steps > 0 and not self.is_settled

    def settle(self) -> None:
        self.is_settled, self._is_measuring = True, False

    def start_measuring(self) -> None:
        """Reset the peak: the engine is idle, and training allocates from now on."""
        if self._is_expected and not self.is_settled and self._set_reserve is None:
            self._is_measuring = devices.reset_peak(self._device)

    def stop_measuring(self, cache_bytes: int) -> None:
        """Read the peak: the engine is about to run or plan, with this much cache allocated.

        A peak without a cache does not limit the cache.
        """
        measured = devices.used_and_peak(self._device) if self._is_measuring else None
        self._is_measuring = False
        if measured is not None:
            used, peak = measured
            self._peak = max(self._peak or 0, peak - used if cache_bytes else 0)

    def bytes_now(self) -> TrainingBytes:
        trainable = [fsdp_compat.local_part(parameter) for parameter in self._trainable()]
        gradients = _num_bytes(p.grad for p in self._trainable() if p.grad is not None)
        models = {id(model): model for model in (self._trained, self._generating)}.values()
        tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
        states = self._state_bytes()
        is_measured = self.num_steps > 0 and self._peak is not None
        gradients_to_come = states_to_come = 0
        if self._is_expected and not is_measured:
            gradients_to_come = max(0, _num_bytes(trainable) - gradients)
            if not self.num_steps:
                states_to_come = max(0, self._estimated_state_bytes(trainable) - states)
        return TrainingBytes(
            weights=_num_bytes(t for t in tensors.values() if t.device.type == self._device.type),
            gradients=gradients,
            optimizer_states=states,
            gradients_to_come=gradients_to_come,
            optimizer_states_to_come=states_to_come,
            activations=self._peak or 0 if is_measured else 0,
            is_measured=is_measured,
            set_reserve=self._set_reserve,
        )

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self._trained.parameters() if p.requires_grad]

    def _state_bytes(self) -> int:
        optimizer = self._optimizer and self._optimizer()
        if optimizer is None:
            return 0
        states = (state for state in optimizer.state.values() if isinstance(state, dict))
        tensors = (t for state in states for t in state.values() if isinstance(t, torch.Tensor))
        return _num_bytes(t for t in tensors if t.device.type == self._device.type)

    def _estimated_state_bytes(self, trainable: list[torch.Tensor]) -> int:
        optimizer = self._optimizer and self._optimizer()
        name, settings = self._optimizer_name, {}
        if optimizer is not None:
            name, settings = type(optimizer).__name__, optimizer.defaults
        num_elements = sum(part.numel() for part in trainable)
        return optimizer_state_bytes(name, settings, num_elements, _num_bytes(trainable))


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(fsdp_compat.local_part(tensor).nbytes for tensor in tensors)


@cache
def _watch_optimizers() -> None:
    def record_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for training in list(_WATCHERS):
            training.record_step(optimizer)

    # Never removed: torch iterates over its hooks while it calls them.
    register_optimizer_step_post_hook(record_step)
