"""Run a model's own forward in a higher precision than that of its weights.

The structure of two computations (masks, positions, neighbours, states) shows in float32 or
float64, where rounding hides nothing of it. Every operator casts its inputs, one weight at a time,
so that no second copy of the model exists. Called by the thread that runs the model.
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
    *(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d),
    *(torch.batch_norm, functional.scaled_dot_product_attention),
}


@contextmanager
def higher_precision(dtype: torch.dtype) -> Iterator[None]:
    """Compute every operator of this thread in `dtype` where its inputs have fewer bits.

    Autocast casts to `dtype` too, and float32 products are not rounded to TF32 or bfloat16.
    Operators that write into a tensor of fewer bits round to that tensor's dtype.

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
            positional, named = pytree.tree_map(self._upcast.cast, (tuple(args), kwargs or {}))
            return func(*positional, **named)
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
            positional, named = pytree.tree_map(self.cast, (tuple(args), kwargs or {}))
            return func(*positional, **named)
        return self._write(func, args, kwargs or {})

    def cast(self, value: Any) -> Any:
        """Return a tensor or a dtype in the higher precision; anything else as it is."""
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if value.dtype in self._coarser else value
        # The dtype of a result: a cast, or a new tensor.
        return self._dtype if isinstance(value, torch.dtype) and value in self._coarser else value

    def _write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes into some of its inputs, in their own dtypes."""
        arguments = func._schema.arguments
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        # The arguments after the positional ones are named, or left at their defaults.
        passed = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        own = {name: value for name, value in passed.items() if name in written}
        cast = pytree.tree_map(self.cast, passed)
        positional = list(cast.values())[: len(args)]
        result = func(*positional, **{name: cast[name] for name in kwargs})
        values = pytree.tree_leaves({name: cast[name] for name in own})
        for target, value in zip(pytree.tree_leaves(own), values, strict=True):
            if target is not value and isinstance(target, torch.Tensor):
                target.copy_(value)
        # An operator returns what it wrote into; only a single one is in use by models.
        returns_own = len(own) == 1 and isinstance(result, torch.Tensor)
        return next(iter(own.values())) if returns_own else result
