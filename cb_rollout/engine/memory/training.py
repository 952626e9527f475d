"""How much an optimizer, known by its name, keeps of its parameters. Arithmetic only.

What the training beside an engine takes: estimated, and measured once over a full step.

Watches from its making to the first optimizer step of the trained model, in any trainer or loop.
Meanwhile it begins the peak of torch's allocator, or of the process's resident size, anew whenever
the engine falls idle. The engine's thread calls it; the step is noted on the training thread.
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

TENSORS_PER_PARAMETER = {
    "sgd": 0,  # momentum, where asked for, is counted beside
    "schedule_free_sgd": 1,  # the point that it averages
    "adafactor": 0,  # a row and a column of factors for each matrix
    "lomo": 0,  # steps each parameter in the backward pass, and keeps nothing
    "lion": 1,  # the momentum whose sign it steps along
    "muon": 0,  # likewise
    "adagrad": 1,  # the sum of squares
    "rmsprop": 1,  # the mean of squares
    "ademamix": 3,  # a fast and a slow first moment, and a second
}
# Parts of the names of torch's, bitsandbytes' and torchao's classes, and of the trainer's `optim`.

OTHERWISE = 2
# Adam and its kin keep a first and a second moment; what is not known is taken for one of them.

TENSOR_SETTINGS = ("momentum", "amsgrad", "centered", "beta1")
# Each adds a tensor where it is on: SGD's and RMSprop's, Adam's, RMSprop's, Adafactor's.

BYTES_PER_ELEMENT = {
    "8bit": 1 + 4 / 256,  # with a float32 scale for every 256
    "fp8": 1 + 4 / 256,
    "4bit": 0.5 + 4 / 128,
    "32bit": 4.0,
}
# Parts of names that say how states are stored; otherwise in their parameter's dtype.


def optimizer_state_bytes(
    name: str, settings: Mapping[str, Any], num_elements: int, num_bytes: int
) -> int:
    """Size of the states that an optimizer keeps.

    Args:
        name: its class's, or the trainer's word for it.
        settings: its defaults, as torch's optimizers hold them.
        num_elements: of all parameters that it steps.
        num_bytes: what these take.
    """
    name = name.lower().replace("-", "_")
    known = [part for part in TENSORS_PER_PARAMETER if part in name]
    num_tensors = TENSORS_PER_PARAMETER[max(known, key=len)] if known else OTHERWISE
    num_tensors += sum(bool(settings.get(setting)) for setting in TENSOR_SETTINGS)
    for part, width in BYTES_PER_ELEMENT.items():
        if part in name:
            return int(num_tensors * width * num_elements)
    return num_tensors * num_bytes


UNKNOWN_OPTIMIZER = "adam"
# The estimate for whoever does not say: most train with one of its kind.

_WATCHERS: "weakref.WeakSet[TrainingMemory]" = weakref.WeakSet()
# Those that wait for the first step of the model that they look after.


class TrainingMemory:
    """Tells what training holds and will still take."""

    def __init__(
        self,
        trained: torch.nn.Module,
        generating: torch.nn.Module,
        device: torch.device,
        optimizer: torch.optim.Optimizer | str | None,
        reserve_gib: float | str,
    ) -> None:
        """Wait for the first optimizer step.

        Args:
            trained: the model that trains, or does not.
            generating: the model that generates, where that is a copy.
            device: whose memory counts.
            optimizer: which will step it, or its name; None: not known, and whether it will be
                stepped at all is known by its being in training mode.
            reserve_gib: what training will still take; "auto": found out here.

        Raises:
            ConfigurationError: `optimizer` is neither an optimizer nor a name.
        """
        self._trained, self._generating, self._device = trained, generating, device
        self._optimizer_name = optimizer if isinstance(optimizer, str) else UNKNOWN_OPTIMIZER
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            # accelerate wraps the one that its `prepare` is given.
            self._optimizer = weakref.ref(getattr(optimizer, "optimizer", optimizer))
        elif not (optimizer is None or isinstance(optimizer, str)):
            raise ConfigurationError(
                f"optimizer={optimizer!r} is neither a torch optimizer nor the name of one; leave "
                "it out to have Adam's memory reserved."
            )
        self._is_expected = optimizer is not None or trained.training
        self._set_reserve = None if isinstance(reserve_gib, str) else int(reserve_gib * GIB)
        self._is_watching = False
        self._peak: int | None = None
        self.has_stepped = False
        """Whether the trained model's optimizer made its first step."""
        self.is_settled = False
        """Whether the plan that followed it was made."""
        _watch_optimizers()
        _WATCHERS.add(self)

    def note_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Some optimizer made a step; returns whether it was the trained model's."""
        ours = {id(parameter) for parameter in self._trainable()}
        steps = (id(p) for group in optimizer.param_groups for p in group["params"])
        if ours.isdisjoint(steps):
            return False
        self._optimizer, self.has_stepped = weakref.ref(optimizer), True
        return True

    @property
    def calls_for_plan(self) -> bool:
        """Whether the first step was made since the plan was."""
        return self.has_stepped and not self.is_settled

    def settle(self) -> None:
        """Stop watching; what is known now goes into the plan."""
        self.is_settled, self._is_watching = True, False

    def idle(self) -> None:
        """The engine falls idle: from here on it is training that takes memory."""
        if self._is_expected and not self.is_settled and self._set_reserve is None:
            self._is_watching = devices.reset_peak(self._device)

    def busy(self, cache_bytes: int) -> None:
        """The engine is about to run, or to plan, and holds this much of a cache.

        What training took while the cache was given back is nothing that the cache must leave.
        """
        if not self._is_watching:
            return
        self._is_watching = False
        found = devices.used_and_peak(self._device)
        if found is not None:
            used, peak = found
            beside = max(0, peak - used) if cache_bytes else 0
            self._peak = max(self._peak or 0, beside)

    def in_bytes(self) -> TrainingBytes:
        """What goes into a plan now."""
        trainable = [fsdp_compat.local_part(parameter) for parameter in self._trainable()]
        gradients = _sizes(p.grad for p in self._trainable() if p.grad is not None)
        models = {id(model): model for model in (self._trained, self._generating)}.values()
        tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
        states = self._states_now()
        is_measured = self.has_stepped and self._peak is not None
        gradients_to_come = states_to_come = 0
        if self._is_expected and not is_measured:
            gradients_to_come = max(0, _sizes(trainable) - gradients)
            if not self.has_stepped:
                states_to_come = max(0, self._estimated_states(trainable) - states)
        return TrainingBytes(
            weights=_sizes(t for t in tensors.values() if t.device.type == self._device.type),
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

    def _states_now(self) -> int:
        """What a known optimizer keeps on the device."""
        optimizer = self._optimizer and self._optimizer()
        if optimizer is None:
            return 0
        tensors = (value for state in optimizer.state.values() for value in _values(state))
        return _sizes(t for t in tensors if t.device.type == self._device.type)

    def _estimated_states(self, trainable: list[torch.Tensor]) -> int:
        optimizer = self._optimizer and self._optimizer()
        name, settings = self._optimizer_name, {}
        if optimizer is not None:
            name, settings = type(optimizer).__name__, optimizer.defaults
        num_elements = sum(part.numel() for part in trainable)
        return optimizer_state_bytes(name, settings, num_elements, _sizes(trainable))


def _values(state: Any) -> Iterable[torch.Tensor]:
    values = state.values() if isinstance(state, dict) else ()
    return (value for value in values if isinstance(value, torch.Tensor))


def _sizes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(fsdp_compat.local_part(tensor).nbytes for tensor in tensors)


@cache
def _watch_optimizers() -> None:
    """Have every optimizer's step noted, from now on.

    torch goes through its hooks while it calls them, so none may ever be taken out.
    """
    register_optimizer_step_post_hook(_note)


def _note(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for training in list(_WATCHERS):
        if training.note_step(optimizer):
            _WATCHERS.discard(training)
