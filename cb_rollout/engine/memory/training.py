"""Estimate the memory of training beside an engine, then measure it over one full step.

Until the first optimizer step, the peak of torch's allocator, or of the process's resident size, is
reset whenever the engine becomes idle. Called by the engine's thread; the training thread records
each step.
"""

import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, TrainingBytes
from cb_rollout.errors import ConfigurationError

# Tensors of a parameter's size that an optimizer keeps for it, by a part of the name of a torch,
# bitsandbytes or torchao class, or of the trainer's `optim`; the longest part counts. Momentum is
# counted by `TENSOR_SETTINGS`; Adafactor's rows and columns of factors are negligible.
TENSORS_PER_PARAMETER = {
    "sgd": 0,
    "adafactor": 0,
    "lomo": 0,
    "muon": 0,
    "schedule_free_sgd": 1,
    "lion": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adam": 2,
    "adadelta": 2,
    "rprop": 2,
    "ademamix": 3,
}

# Adam's two moments, assumed if the optimizer, or its class, is unknown.
DEFAULT_TENSORS = 2

# Settings that add a tensor each: of SGD and RMSprop, Adam, RMSprop, Adafactor.
TENSOR_SETTINGS = ("momentum", "amsgrad", "centered", "beta1")

# By a part of the name; other optimizers store states in the dtype of their parameter. Quantised
# states have a float32 scale for every 256 or 128 elements.
BYTES_PER_ELEMENT = {"8bit": 1 + 4 / 256, "fp8": 1 + 4 / 256, "4bit": 0.5 + 4 / 128, "32bit": 4.0}

# An optimizer, an optimizer class, or the name of a known optimizer.
OptimizerOrName = torch.optim.Optimizer | type[torch.optim.Optimizer] | str

# Instances that count the steps of their model's optimizer.
_WATCHERS: "weakref.WeakSet[TrainingMemory]" = weakref.WeakSet()


def optimizer_state_bytes(
    name: str, settings: Mapping[str, Any], num_elements: int, num_bytes: int
) -> int:
    """Return the estimated bytes of an optimizer's states, from its class.

    Args:
        name: of the optimizer's class, or of the trainer's `optim`.
        settings: the optimizer's defaults.
        num_elements: of the parameters that it steps.
        num_bytes: of the same parameters.
    """
    num_tensors = DEFAULT_TENSORS
    matches = _matching_names(name)
    if matches:
        longest_match = max(matches, key=len)
        num_tensors = TENSORS_PER_PARAMETER[longest_match]
    for setting in TENSOR_SETTINGS:
        if settings.get(setting):
            num_tensors += 1
    for part, width in BYTES_PER_ELEMENT.items():
        if part in name.lower():
            return int(num_tensors * width * num_elements)
    return num_tensors * num_bytes


def _matching_names(name: str) -> list[str]:
    name = name.lower().replace("-", "_")
    return [known for known in TENSORS_PER_PARAMETER if known in name]


class TrainingMemory:
    """Estimate, then measure, the memory that training holds and will still allocate."""

    def __init__(
        self,
        trained: torch.nn.Module,
        generating: torch.nn.Module,
        device: torch.device,
        optimizer: OptimizerOrName | None,
        reserve_gib: float | str,
    ) -> None:
        """Watch for optimizer steps.

        Args:
            trained: the training model, maybe wrapped.
            generating: the model that generates: `trained` itself, or a copy of it.
            device: the device whose memory is planned.
            optimizer: the model's optimizer, its class or its known name. Without one, training is
                expected if the model is in training mode.
            reserve_gib: memory that training will still allocate; "auto": measured.

        Raises:
            ConfigurationError: `optimizer` is neither an optimizer nor a known name.
        """
        self._trained = trained
        self._generating = generating
        self._device = device
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
                "leave it out to reserve Adam's memory."
            )
        self._is_expected = optimizer is not None or trained.training
        self._set_reserve: int | None = None
        if not isinstance(reserve_gib, str):
            self._set_reserve = int(reserve_gib * GIB)
        self._is_measuring = False
        self._peak: int | None = None
        self.num_steps = 0
        """Steps of the trained model's optimizers; torch counts no write by a fused one (2.13)."""
        self.is_settled = False
        """True once the memory was planned after the first step."""
        _watch_optimizers()
        _WATCHERS.add(self)

    def record_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step of an optimizer, if it has any of the trained parameters."""
        trained = set(map(id, self._trained.parameters()))
        stepped: set[int] = set()
        for group in optimizer.param_groups:
            stepped.update(map(id, group["params"]))
        if trained.isdisjoint(stepped):
            return
        if self.num_steps == 0:
            self._optimizer = weakref.ref(optimizer)
        self.num_steps += 1

    @property
    def needs_new_plan(self) -> bool:
        return self.num_steps > 0 and not self.is_settled

    def settle(self) -> None:
        self.is_settled = True
        self._is_measuring = False

    def start_measuring(self) -> None:
        """Reset the peak: the engine is idle, and training allocates from now on."""
        if self._is_expected and not self.is_settled and self._set_reserve is None:
            self._is_measuring = devices.reset_peak(self._device)

    def forget_peak(self) -> None:
        """Reset a measured peak: work since the last reset is not part of a training step."""
        if self._is_measuring:
            self._is_measuring = devices.reset_peak(self._device)

    def stop_measuring(self, cache_bytes: int) -> None:
        """Read the peak: the engine is about to run or plan, with this much cache allocated.

        A peak without a cache does not limit the cache.
        """
        if not self._is_measuring:
            return
        self._is_measuring = False
        measured = devices.used_and_peak(self._device)
        if measured is None:
            return
        activations = 0
        if cache_bytes:
            used, peak = measured
            activations = peak - used
        self._peak = max(self._peak or 0, activations)

    def bytes_now(self) -> TrainingBytes:
        """Return training's present memory, and an estimate or measurement of later memory."""
        trainable: list[torch.Tensor] = []
        gradients = 0
        for parameter in self._trainable():
            trainable.append(fsdp_compat.local_part(parameter))
            if parameter.grad is not None:
                gradients += _num_bytes([parameter.grad])
        states = self._state_bytes()
        is_measured = self.num_steps > 0 and self._peak is not None
        gradients_to_come = 0
        states_to_come = 0
        if self._is_expected and not is_measured:
            gradients_to_come = max(0, _num_bytes(trainable) - gradients)
            if self.num_steps == 0:
                states_to_come = max(0, self._estimated_state_bytes(trainable) - states)
        activations = 0
        if is_measured and self._peak is not None:
            activations = self._peak
        return TrainingBytes(
            weights=self._weight_bytes(),
            gradients=gradients,
            optimizer_states=states,
            gradients_to_come=gradients_to_come,
            optimizer_states_to_come=states_to_come,
            activations=activations,
            is_measured=is_measured,
            set_reserve=self._set_reserve,
        )

    def _weight_bytes(self) -> int:
        """Return the bytes of both models' tensors on the device, each tensor counted once."""
        tensors: dict[int, torch.Tensor] = {}
        for model in (self._trained, self._generating):
            for tensor in chain(model.parameters(), model.buffers()):
                tensors[id(tensor)] = tensor
        return self._bytes_on_device(tensors.values())

    def _bytes_on_device(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of those tensors that are on the planned device."""
        on_device = [tensor for tensor in tensors if tensor.device.type == self._device.type]
        return _num_bytes(on_device)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self._trained.parameters() if p.requires_grad]

    def _living_optimizer(self) -> torch.optim.Optimizer | None:
        if self._optimizer is None:
            return None
        return self._optimizer()

    def _state_bytes(self) -> int:
        """Return the bytes of the optimizer's states on the device; 0 if it is not known."""
        optimizer = self._living_optimizer()
        if optimizer is None:
            return 0
        tensors: list[torch.Tensor] = []
        for state in optimizer.state.values():
            if not isinstance(state, dict):
                continue
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
        return self._bytes_on_device(tensors)

    def _estimated_state_bytes(self, trainable: list[torch.Tensor]) -> int:
        """Return the bytes of the states that an optimizer will allocate for these parameters."""
        name = self._optimizer_name
        settings: Mapping[str, Any] = {}
        optimizer = self._living_optimizer()
        if optimizer is not None:
            name = type(optimizer).__name__
            settings = optimizer.defaults
        num_elements = sum(part.numel() for part in trainable)
        return optimizer_state_bytes(name, settings, num_elements, _num_bytes(trainable))


def forget_peaks() -> None:
    """Reset measured peaks after a comparison, whose memory training steps do not need."""
    for training in list(_WATCHERS):
        training.forget_peak()


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(fsdp_compat.local_part(tensor).nbytes for tensor in tensors)


@cache
def _watch_optimizers() -> None:
    def record_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for training in list(_WATCHERS):
            training.record_step(optimizer)

    # Never removed: torch iterates over its hooks while it calls them.
    register_optimizer_step_post_hook(record_step)
