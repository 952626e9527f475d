"""Compute a model's linear layers on a CPU, by oneDNN, from weights that were packed once.

A product of few rows takes as long as bringing the weight into the order in which the product reads
it. torch's own linear layer reorders the weight in every call; here it is reordered once for each
version of the weights. Layers with the same rows, such as query, key and value, are packed
together. Called by the thread that runs a forward.

B: rows, K: inputs of a linear layer, N: its outputs.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cb_rollout.compat import inductor
from cb_rollout.compat.torch import multiplies_bfloat16
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.kernels import kernel, multiply
from cb_rollout.engine.numerics.qualification.qualifier import UnprovedError
from cb_rollout.errors import error_text

# Up to this many rows are multiplied as fast by a kernel that reads the weight as it is.
FEW_ROWS = 8

# With more rows torch's own product gains little from packing.
MOST_ROWS = 256

# Number of rows for which oneDNN packs a weight; any other number may be multiplied too.
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
        self._model = model
        self._is_enabled = is_enabled
        self._fits: bool | None = None
        self._layers: dict[int, LinearLayer] | None = None
        self._packed: dict[tuple[object, ...], torch.Tensor] = {}
        self._joined: dict[int, Sequence[torch.Tensor]] = {}

    def plan(self, free_bytes: int, dtype: torch.dtype) -> int:
        """Decide whether to pack; return the bytes of all packed weights, 0 if none is packed.

        `dtype` is that of the rows.
        """
        num_bytes = 0
        held = _product_dtype(dtype)
        if self._is_enabled and held is not None:
            for layer in _linear_layers(self._model).values():
                num_bytes += held.itemsize * layer.weight_NK.numel()
        self._fits = devices.FREE_PER_COPY * num_bytes <= free_bytes
        if self._fits:
            return num_bytes
        self.forget()
        return 0

    def forget(self) -> None:
        """Drop all packed weights: they changed, or their memory is needed."""
        self._layers = None
        self._packed = {}

    def packed(self, weights_NK: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
        """Return weights, rounded to `dtype` and packed together; None: take them as they are."""
        key = (*map(id, weights_NK), dtype)
        known = self._packed.get(key)
        if known is not None:
            return known
        held = _product_dtype(dtype)
        layers = self._packable(dtype)
        if held is None or not all(id(weight) in layers for weight in weights_NK):
            return None
        if len(weights_NK) > 1:
            for weight in weights_NK:
                self._joined[id(weight)] = weights_NK
                self._packed.pop((id(weight), dtype), None)
        rounded = [weight.detach().to(dtype).to(held) for weight in weights_NK]
        rounded_NK = torch.cat(rounded) if len(rounded) > 1 else rounded[0]
        packed = torch.ops.mkldnn._reorder_linear_weight(rounded_NK, PACKED_FOR_ROWS)
        self._packed[key] = packed
        return packed

    def joined_with(self, weight: torch.Tensor, dtype: torch.dtype) -> list["LinearLayer"]:
        """Return the layers packed together with this weight, including its own; []: no layers."""
        layers = self._packable(dtype)
        joined = self._joined.get(id(weight), ())
        return [layers[id(other)] for other in joined]

    def _packable(self, dtype: torch.dtype) -> dict[int, "LinearLayer"]:
        """Return the layers that are packed, by the `id` of their weights."""
        if self._fits is None:
            self.plan(devices.memory(CPU).free_bytes, dtype)
        if self._layers is not None:
            return self._layers
        layers: dict[int, LinearLayer] = {}
        if self._is_enabled and self._fits:
            layers = _linear_layers(self._model)
        still_joined: dict[int, Sequence[torch.Tensor]] = {}
        for key, weights in self._joined.items():
            if all(id(weight) in layers for weight in weights):
                still_joined[key] = weights
        self._layers = layers
        self._joined = still_joined
        return layers

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `linear` use packed weights, in this thread."""
        before = getattr(_ACTIVE, "weights", None)
        _ACTIVE.weights = self
        try:
            yield
        finally:
            _ACTIVE.weights = before

    def replacing_linear(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Compute a model's linear layers of `dtype` by `linear`, in this thread."""
        if not self._is_enabled or _product_dtype(dtype) is None:
            return nullcontext()
        return _ReplacedLinear(self, dtype)


def linear(
    rows_BK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute linear layers of the same rows in the way that is fastest for the number of rows.

    All tensors are on a CPU. A weight in another dtype than the rows is rounded to it. Results of
    bfloat16 are summed in float32 and rounded once. There is one bias per weight, or none.

    Returns:
        The outputs of all layers, one after the other: `[B, sum of N]`.
    """
    dtype = rows_BK.dtype
    is_few = rows_BK.shape[0] <= FEW_ROWS and has_kernel(dtype)
    # Bitwise forwards take one kernel for any number of rows.
    if (is_few or operators.are_installed()) and all(
        tensor.dtype == dtype and tensor.is_contiguous() for tensor in (*weights_NK, *biases_N)
    ):
        return _each(multiply, rows_BK, weights_NK, biases_N)
    if len(weights_NK) > 1:
        product = _packed_product(rows_BK, weights_NK, biases_N)
        if product is not None:
            return product
    return _each(_linear, rows_BK, weights_NK, biases_N)


def _packed_product(
    rows_BK: torch.Tensor, weights_NK: Sequence[torch.Tensor], biases_N: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Compute layers from weights that are packed together; None if they are not."""
    dtype = rows_BK.dtype
    held = _product_dtype(dtype)
    weights: PackedLinear | None = getattr(_ACTIVE, "weights", None)
    if weights is None or held is None or rows_BK.shape[0] > MOST_ROWS:
        return None
    packed = weights.packed(weights_NK, dtype)
    if packed is None:
        return None
    bias_N = None
    if biases_N:
        bias_N = torch.cat([bias.to(dtype).to(held) for bias in biases_N])
    return multiply_packed(rows_BK.to(held), packed, bias_N).to(dtype)


def _linear(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """Compute one layer whose weight is packed alone, or not at all."""
    biases_N = [] if bias_N is None else [bias_N]
    product = _packed_product(rows_BK, [weight_NK], biases_N)
    if product is not None:
        return product
    dtype = rows_BK.dtype
    held = _product_dtype(dtype) or dtype
    if bias_N is not None:
        bias_N = bias_N.to(dtype).to(held)
    return functional.linear(rows_BK.to(held), weight_NK.to(dtype).to(held), bias_N).to(dtype)


def _each(
    layer: Callable[..., torch.Tensor],
    rows_BK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor],
) -> torch.Tensor:
    pairs = zip(weights_NK, biases_N or [None] * len(weights_NK), strict=True)
    outputs_BN = [layer(rows_BK, weight_NK, bias_N) for weight_NK, bias_N in pairs]
    return outputs_BN[0] if len(outputs_BN) == 1 else torch.cat(outputs_BN, dim=1)


def multiply_packed(
    rows_BK: torch.Tensor, packed: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`, of a packed weight; all tensors have one dtype.

    For each number of rows oneDNN keeps a program and a buffer of the outputs' size (torch 2.13),
    so rows are padded to few numbers.
    """
    B, K = rows_BK.shape
    step = 32
    if B <= 32:
        step = 4
    elif B <= PACKED_FOR_ROWS:
        step = 8
    size = -(-B // step) * step
    padded_CK = rows_BK.contiguous()
    if size > B:
        padded_CK = rows_BK.new_zeros(size, K)
        padded_CK[:B] = rows_BK
    product = torch.ops.mkldnn._linear_pointwise
    outputs_CN: torch.Tensor = product(padded_CK, packed, bias_N, "none", [], "")
    return outputs_CN[:B]


def _product_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that oneDNN multiplies `dtype` in; None if it cannot multiply it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if dtype == torch.bfloat16:
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return torch.float32 if dtype == torch.float32 else None


class LinearLayer(NamedTuple):
    """The parameters of a linear layer, kept alive so that no other tensor gets their `id`."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None


def _linear_layers(model: torch.nn.Module) -> dict[int, LinearLayer]:
    """Return a model's linear layers on a CPU by the `id` of their weights, each weight once."""
    layers: dict[int, LinearLayer] = {}
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        # A module may return another tensor at each access, as a module split over processes does.
        layer = LinearLayer(module.weight, module.bias)
        weight_NK = layer.weight_NK
        if weight_NK.device.type == "cpu" and weight_NK.dtype.is_floating_point:
            layers[id(weight_NK)] = layer
    return layers


@cache
def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel of few rows, which the first call compiles."""
    if inductor.compiler_obstacle():
        return False
    try:
        kernel("multiply", dtype)
    except UnprovedError:
        # This was logged already.
        return False
    except Exception as error:  # noqa: BLE001  a library computes the same
        _LOGGER.warning("products of few rows run without a kernel: %s", error_text(error))
        return False
    return True


class _ReplacedLinear(TorchFunctionMode):
    """Compute `functional.linear` by `linear`, as an operator that a trace may hold."""

    def __init__(self, weights: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._weights = weights
        self._dtype = dtype
        self._joined_inputs: tuple[torch.Tensor, int] | None = None
        self._joined_outputs: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        inputs, weight, *rest = args
        bias = rest[0] if rest else None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            is_ours = weight.dtype.is_floating_point and self._dtype == dtype
        else:
            tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
            is_ours = all(tensor.dtype == self._dtype for tensor in tensors)
        if not is_ours or (bias is not None and bias.shape != weight.shape[:1]):
            return func(*args)
        with self._weights.active():
            outputs = self._outputs(inputs, weight, bias)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    def _outputs(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return outputs for all rows, which a layer of the same inputs may have computed."""
        rows = inputs.to(self._dtype).reshape(-1, inputs.shape[-1])
        if rows.shape[0] <= MOST_ROWS and not inputs.is_inference():
            layers = self._weights.joined_with(weight, self._dtype)
            if any(layer.weight_NK is weight and layer.bias_N is bias for layer in layers):
                return self._joined(inputs, rows, weight, layers)
        return torch.ops.cb_rollout.linear(rows, [weight], [] if bias is None else [bias])

    def _joined(
        self,
        inputs: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        layers: Sequence[LinearLayer],
    ) -> torch.Tensor:
        """Return one layer's outputs, computed together with the layers it is packed with."""
        known, version = self._joined_inputs or (None, 0)
        is_known = known is inputs and version == inputs._version
        if not is_known or id(weight) not in self._joined_outputs:
            biases = [layer.bias_N for layer in layers if layer.bias_N is not None]
            weights = [layer.weight_NK for layer in layers]
            outputs = torch.ops.cb_rollout.linear(rows, weights, biases)
            columns = outputs.split([weight_NK.shape[0] for weight_NK in weights], dim=1)
            self._joined_inputs = (inputs, inputs._version)
            self._joined_outputs = dict(zip(map(id, weights), columns, strict=True))
        # A caller may write to them, so they are returned once.
        return self._joined_outputs.pop(id(weight))


# An operator, so that a traced graph may hold it and inductor compile it.
torch.library.define(
    "cb_rollout::linear", "(Tensor rows, Tensor[] weights, Tensor[] biases) -> Tensor"
)


@torch.library.register_fake("cb_rollout::linear")
def _output_of_linear(
    rows_BK: torch.Tensor, weights_NK: Sequence[torch.Tensor], biases_N: Sequence[torch.Tensor]
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], sum(weight.shape[0] for weight in weights_NK))


torch.library.impl("cb_rollout::linear", "CPU", linear)
