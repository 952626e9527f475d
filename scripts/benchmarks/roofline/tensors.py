"""Tensors of a CUDA device that is not there: shapes and dtypes, without contents.

Each wraps a meta tensor and says that it is on `DEVICE`. Torch's own fake tensors need a CUDA build
of torch for that, and transformers treats them as a trace.
"""

from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten

DEVICE = torch.device("cuda", 0)
META = torch.device("meta")


class CudaTensor(torch.Tensor):
    """A tensor without contents that says it is on `DEVICE`."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    held: torch.Tensor
    """The meta tensor inside."""

    @staticmethod
    def __new__(cls: type["CudaTensor"], held: torch.Tensor) -> "CudaTensor":
        """Wrap a meta tensor."""
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            # Torch's C++ asks a device for a guard, which only CUDA builds have.
            device=META,
        )
        tensor.held = held
        return tensor

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`DEVICE`."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True."""
        return True

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False, so that callers do not leave work out."""
        return False

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return shape and dtype."""
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the meta tensors inside."""
        return run(func, args, kwargs or {})


class CudaTensors(TorchDispatchMode):
    """Within, tensors that are created on `DEVICE` are `CudaTensor`s.

    It takes the place of torch's own mode of fake tensors (2.11 to 2.13), so that torch initialises
    no CUDA device.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __enter__(self) -> Self:
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on meta tensors if it is one of `DEVICE`."""
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; if it takes or makes tensors of `DEVICE`, without computing anything."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    is_there = any(isinstance(tensor, CudaTensor) for tensor in given)
    device = kwargs.get("device")
    kind = None if device is None else torch.device(device).type
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if func is aten._pin_memory.default:
        return args[0].clone()
    if not is_there and kind not in ("cuda", "meta"):
        return func(*args, **kwargs)
    own_args, own = tree_map(_meta, (args, kwargs))
    if device is not None:
        own["device"] = META
    sizes = [leaf.shape for leaf in tree_leaves((own_args, own)) if isinstance(leaf, torch.Tensor)]
    result = func(*own_args, **own)
    after = [leaf.shape for leaf in tree_leaves((own_args, own)) if isinstance(leaf, torch.Tensor)]
    assert sizes == after, f"{func} resizes a tensor"
    if kind == "cpu":
        return tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), result)
    wrapped = tree_map_only(torch.Tensor, CudaTensor, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if is_there else wrapped


def _meta(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.held
    # A number from the host, as a tensor without dimensions or one that is copied.
    return value.to(META) if isinstance(value, torch.Tensor) else value
