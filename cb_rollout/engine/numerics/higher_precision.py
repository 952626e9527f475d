"""Run a model's own forward in a higher precision than its weights have.

Differences in structure (masks, positions, neighbours, states) show in float32 or float64, where
rounding does not hide them. Every operator casts its inputs, one weight at a time, so no second
copy of the model exists. Called by the thread that runs the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cb_rollout.compat.torch import exact_float32_products

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Functions that require one dtype of all their inputs before an operator sees them.
CHECKED = {
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.batch_norm,
    functional.scaled_dot_product_attention,
}


@contextmanager
def higher_precision(dtype: torch.dtype) -> Iterator[None]:
    """Compute every operator of this thread in `dtype` if its inputs have fewer bits.

    Autocast casts to `dtype` too, and float32 products are not rounded to TF32 or bfloat16.
    Operators that write into a tensor with fewer bits round to that tensor's dtype.

    Args:
        dtype: float32 or float64.
    """
    # Autocast keeps the weights that it has cast.
    torch.clear_autocast_cache()
    upcast = _Upcast(dtype)
    try:
        with exact_float32_products(), upcast, _UpcastArguments(upcast):
            yield
    finally:
        torch.clear_autocast_cache()


class _UpcastArguments(TorchFunctionMode):
    """Cast the inputs of functions that compare the dtypes of their inputs."""

    def __init__(self, upcast: "_Upcast") -> None:
        super().__init__()
        self._upcast = upcast

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in CHECKED:
            args, kwargs = self._upcast.cast_all(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Upcast(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._coarser = frozenset(d for d in FLOATS if d.itemsize < dtype.itemsize)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            # Casts the rows that are taken, not the whole table.
            return self.cast(func(*args, **(kwargs or {})))
        if not func._schema.is_mutable:
            args, kwargs = self.cast_all(args, kwargs)
            return func(*args, **kwargs)
        return self._write(func, args, kwargs or {})

    def cast(self, value: Any) -> Any:
        """Return a tensor or a dtype in the higher precision; anything else as it is."""
        if isinstance(value, torch.Tensor) and value.dtype in self._coarser:
            return value.to(self._dtype)
        # The dtype of a result: a cast, or a new tensor.
        if isinstance(value, torch.dtype) and value in self._coarser:
            return self._dtype
        return value

    def cast_all(
        self, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments of a call with every tensor and dtype in the higher precision."""
        return pytree.tree_map(self.cast, (tuple(args), kwargs or {}))

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes into some of its inputs, in their own dtypes."""
        cast_args, cast_kwargs = self.cast_all(args, kwargs)
        result = func(*cast_args, **cast_kwargs)
        # The inputs that are written into, as they were given and as the operator got them.
        given: list[Any] = []
        written: list[Any] = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            # The arguments after the positional ones are named, or left at their defaults.
            if index < len(args):
                given.append(args[index])
                written.append(cast_args[index])
            elif argument.name in kwargs:
                given.append(kwargs[argument.name])
                written.append(cast_kwargs[argument.name])
        pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(written), strict=True)
        for target, value in pairs:
            if target is not value and isinstance(target, torch.Tensor):
                target.copy_(value)
        # An operator returns what it wrote into; models use only those that write into one input.
        if len(given) == 1 and isinstance(result, torch.Tensor):
            return given[0]
        return result
