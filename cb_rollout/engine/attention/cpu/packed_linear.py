"""Compute a model's linear layers on a CPU, by oneDNN, from weights that were packed once.

A product of few rows takes as long as bringing the weight into the order that the product reads it
in. torch's own linear layer does that in every call; here it is done once for each version of the
weights. Called by the thread that runs a forward.

B: rows, K: inputs of a linear layer, N: its outputs.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cb_rollout.compat import inductor
from cb_rollout.compat.torch import multiplies_bfloat16
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.kernels import multiply, ordered_kernel
from cb_rollout.errors import error_text

# So few rows are multiplied as fast by a kernel that reads the weight as it is.
FEW_ROWS = 4

# With more rows torch's own product gains little from packing.
MOST_ROWS = 256

# Rows that oneDNN packs a weight for; it takes any other number too.
PACKED_FOR_ROWS = 64

CPU = torch.device("cpu")

_LOGGER = logging.getLogger(__name__)
_ACTIVE = threading.local()


class PackedLinear:
    """Hold packed copies of the weights of a model's linear layers, made when first multiplied.

    Weights in bfloat16 are packed in float32 where the CPU does not multiply bfloat16. Nothing is
    packed if `is_enabled` is False, or where the copies would take more than a quarter of the free
    memory; `linear` then takes the weights as they are.
    """

    def __init__(self, model: torch.nn.Module, *, is_enabled: bool) -> None:
        self._model, self._is_enabled = model, is_enabled
        self._fits: bool | None = None
        self._weights: dict[int, torch.Tensor] | None = None
        self._packed: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def plan(self, free_bytes: int, dtype: torch.dtype) -> int:
        """Decide whether to pack; return the bytes of all packed weights, 0 if none is packed.

        `dtype` is that of the rows.
        """
        held = _product_dtype(dtype) if self._is_enabled else None
        size = sum(map(torch.numel, _linear_weights(self._model)))
        packed = 0 if held is None else held.itemsize * size
        self._fits = devices.FREE_PER_COPY * packed <= free_bytes
        if not self._fits:
            self.forget()
        return packed if self._fits else 0

    def forget(self) -> None:
        """Drop all packed weights: they changed, or their memory is needed."""
        self._weights, self._packed = None, {}

    def packed(self, weight_NK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a weight, rounded to `dtype` and packed; None: its product takes it as it is."""
        key = id(weight_NK), dtype
        if (packed := self._packed.get(key)) is not None:
            return packed
        if self._fits is None:
            self.plan(devices.memory(CPU).free_bytes, dtype)
        if self._weights is None:
            weights = _linear_weights(self._model) if self._is_enabled and self._fits else []
            self._weights = {id(weight): weight for weight in weights}
        held = _product_dtype(dtype)
        if held is None or id(weight_NK) not in self._weights:
            return None
        rounded_NK = weight_NK.detach().to(dtype).to(held)
        packed = torch.ops.mkldnn._reorder_linear_weight(rounded_NK, PACKED_FOR_ROWS)
        self._packed[key] = packed
        return packed

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have `linear` take packed weights, in this thread."""
        before, _ACTIVE.weights = getattr(_ACTIVE, "weights", None), self
        try:
            yield
        finally:
            _ACTIVE.weights = before

    def replacing_linear(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Have a model's linear layers of `dtype` computed by `linear`, in this thread."""
        if not self._is_enabled or _product_dtype(dtype) is None:
            return nullcontext()
        return _ReplacedLinear(self, dtype)


def linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`, in the way that is fastest for its number of rows.

    All tensors are on a CPU. A weight in another dtype than the rows is rounded to it. Results of
    bfloat16 are summed in float32 and rounded once.
    """
    dtype = rows_BK.dtype
    is_few = rows_BK.shape[0] <= FEW_ROWS and _can_multiply(dtype)
    # Bitwise forwards take one kernel for any number of rows.
    is_kernels = (is_few or operators.are_installed()) and weight_NK.dtype == dtype
    if is_kernels and weight_NK.is_contiguous():
        return multiply(rows_BK, weight_NK, bias_N)
    weights: PackedLinear | None = getattr(_ACTIVE, "weights", None)
    packed = None
    if weights is not None and rows_BK.shape[0] <= MOST_ROWS:
        packed = weights.packed(weight_NK, dtype)
    held = _product_dtype(dtype) or dtype
    rows_BK, bias_N = rows_BK.to(held), None if bias_N is None else bias_N.to(held)
    if packed is None:
        return functional.linear(rows_BK, weight_NK.to(dtype).to(held), bias_N).to(dtype)
    return multiply_packed(rows_BK, packed, bias_N).to(dtype)


def multiply_packed(
    rows_BK: torch.Tensor, packed: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`, of a packed weight; all tensors have one dtype.

    For each number of rows oneDNN keeps a program and a buffer of the outputs' size (torch 2.13),
    so rows are padded to few numbers.
    """
    B, K = rows_BK.shape
    step = 8 if B <= PACKED_FOR_ROWS else 32
    size = -(-B // step) * step
    padded_CK = rows_BK.contiguous()
    if size > B:
        padded_CK = rows_BK.new_zeros(size, K)
        padded_CK[:B] = rows_BK
    product = torch.ops.mkldnn._linear_pointwise
    outputs_CN: torch.Tensor = product(padded_CK, packed, bias_N, "none", [], "")
    return outputs_CN[:B]


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernel of few rows now, not in a rollout, if there is a compiler."""
    _can_multiply(dtype)


def _product_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that oneDNN multiplies in, for numbers of `dtype`; None: it does not."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if dtype == torch.bfloat16:
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return torch.float32 if dtype == torch.float32 else None


def _linear_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights of a model's linear layers on a CPU, each once."""
    layers = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    weights = (layer.weight for layer in layers if layer.weight.device.type == "cpu")
    return list(
        {id(weight): weight for weight in weights if weight.dtype.is_floating_point}.values()
    )


@cache
def _can_multiply(dtype: torch.dtype) -> bool:
    if inductor.compiler_obstacle():
        return False
    try:
        ordered_kernel(dtype, "multiply")
    except Exception as error:  # noqa: BLE001  a library computes the same
        _LOGGER.warning("products of few rows run without a kernel: %s", error_text(error))
        return False
    return True


class _ReplacedLinear(TorchFunctionMode):
    """Compute `functional.linear` by `linear`, as an operator that a trace may hold."""

    def __init__(self, weights: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        inputs, weight, *rest = args
        bias = rest[0] if rest else None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
            is_ours = weight.dtype.is_floating_point
        else:
            is_ours = weight.dtype == self._dtype
        tensors = [inputs] if bias is None else [inputs, bias]
        is_plain = bias is None or bias.shape == weight.shape[:1]
        if not (is_ours and is_plain and all(t.dtype == self._dtype for t in tensors)):
            return func(*args)
        rows = inputs.reshape(-1, inputs.shape[-1])
        with self._weights.active():
            outputs = torch.ops.cb_rollout.linear(rows, weight, bias)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])


# An operator, so that a traced graph may hold it and inductor compile it.
torch.library.define("cb_rollout::linear", "(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("cb_rollout::linear")
def _output_of_linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weight_NK.shape[0])


torch.library.impl("cb_rollout::linear", "CPU", linear)
