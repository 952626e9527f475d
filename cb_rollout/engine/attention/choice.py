"""Which attention an engine's decode steps use, and why not more. Asked once, where it is made."""

import importlib.util
from dataclasses import dataclass
from enum import StrEnum

import torch

from cb_rollout import _compat_cpp
from cb_rollout.engine.native.library import TYPES
from cb_rollout.engine.probe import CacheLayout

LEAST_CAPABILITY = (8, 0)
# Ampere: the first whose tensor cores take bfloat16, and that copies memory asynchronously.

LARGEST_HEAD = 256
# A tile of longer keys does not fit the shared memory of every card.

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What tensor cores multiply.

CPU_DTYPES = tuple(TYPES)
# Of C++ kernels and of batched products. In shorter types a model's own attention rounds between
# its two products, and the trainer's forward with it: to be more exact is to be further from both.


class DecodePath(StrEnum):
    """How a decode step reads the keys of the past."""

    GATHERED = "gathered"
    """Each row's history is gathered for the model's own attention; right for every model."""
    TRITON = "triton"
    """Triton kernels read the pages where they lie."""
    CPP = "cpp"
    """A C++ kernel reads the pages where they lie; for CPUs."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What was chosen, and why."""

    path: DecodePath
    reason: str

    def __str__(self) -> str:
        """One line."""
        return f"decode attention: {self.path.value} ({self.reason})"


def choose_attention(
    device: torch.device, layout: CacheLayout | None = None, *, is_padded: bool = True
) -> AttentionChoice:
    """The best decode path that a device and a model can have.

    Args:
        device: where the model is.
        layout: what its layers keep; None: an ordinary model's.
        is_padded: whether rows of different lengths may stand in one forward.
    """
    path, obstacle = DecodePath.TRITON, device_obstacle(device)
    if obstacle and device.type == "cpu":
        path, obstacle = DecodePath.CPP, _cpp_obstacle()
    if obstacle is None:
        obstacle = layout and _layout_obstacle(layout, path)
        if obstacle is None and not is_padded:
            obstacle = "the model takes only rows of one length together"
    if obstacle:
        return AttentionChoice(DecodePath.GATHERED, obstacle)
    return AttentionChoice(path, _REASONS[path])


_REASONS = {
    DecodePath.TRITON: "kernels read the pages, with no gather",
    DecodePath.CPP: "a kernel reads the pages, with no gather",
}


def device_obstacle(device: torch.device) -> str | None:
    """Why a device cannot run the kernels; None: it can."""
    if device.type != "cuda":
        return f"the kernels need a CUDA device, and the model is on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, got = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, capability))
        return f"the kernels need compute capability {needed}, and the device has {got}"
    return None


def _cpp_obstacle() -> str | None:
    if obstacle := _compat_cpp.compiler_obstacle():
        return f"the kernel needs a C++ compiler, g++ or the one that CXX names ({obstacle})"
    return None


def _layout_obstacle(layout: CacheLayout, path: DecodePath) -> str | None:
    keyed = [layer for layer in layout.layers if layer.keys]
    if not keyed:
        return "no layer keeps keys"
    if any(layer.index or layer.is_recurrent for layer in keyed):
        return "some layers keep more than keys and values"
    is_triton = path is DecodePath.TRITON
    for states in (states for layer in keyed for states in layer.per_token):
        if is_triton and states.shape[1] > LARGEST_HEAD:
            return f"heads of {states.shape[1]} are larger than {LARGEST_HEAD}"
        if states.dtype not in (TRITON_DTYPES if is_triton else CPU_DTYPES):
            return f"keys are {states.dtype}"
    return None
