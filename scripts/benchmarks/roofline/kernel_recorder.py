"""Record the kernels that operators would launch, with the bytes and operations of each.

Torch takes composite operators apart before they come here. A view or an allocation launches
nothing, any other operator one kernel or copy, except for those in `NUM_KERNELS` and `DECOMPOSED`.
Triton kernels are recorded from their launches.

B: rows, H: query heads, Q: new tokens, S: tokens of a row, D: size of a key, E: size of a value.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.roofline.tensors import CudaTensor

aten = torch.ops.aten

# Allocate, and launch nothing.
ALLOCATIONS = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten._pin_memory.default),
    aten._unsafe_view.default,
}

# Overwrite their first argument without reading it.
OVERWRITING = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}

# Read as many elements of their first argument as they return.
GATHERING = {
    *(aten.index_select.default, aten.gather.default, aten.embedding.default, aten.index.Tensor),
}

# Write as many elements of their first argument as their last one has.
SCATTERING = {
    *(aten.index_copy_.default, aten.index_put_.default, aten._index_put_impl_.default),
    *(aten.scatter_.src, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor),
}

# Kernels of operators that launch several, from torch 2.13's `aten/src/ATen/native/`.
NUM_KERNELS = {
    # Four passes of eight bits, each a count and a scan; then a gather and a sort
    # (cuda/TensorTopK.cu, `mbtopk`, which rows of this length take).
    "topk": 12,
    # Four passes of eight bits, each over keys and indices; then the ids are written
    # (cuda/Sort.cpp and SortStable.cu, segmented radix sort).
    "sort": 6,
    # A copy, then the elements (TensorAdvancedIndexing.cpp).
    **dict.fromkeys(("index_copy", "index_fill", "index_put", "masked_fill", "scatter"), 2),
    # Checks of the probabilities, a draw, a quotient, an argmax (Distributions.cpp).
    "multinomial": 8,
}


class Kernel(NamedTuple):
    """One launch."""

    name: str
    num_bytes: int
    """Read and written, each tensor once."""
    num_flops: int
    """Of matrix products; others are not counted."""


class Reads(NamedTuple):
    """Reads of Triton kernels that their arguments do not show."""

    num_keys: int = 0
    """Tokens of each row that attention over pages reads."""
    num_parts: Mapping[str, int] = {}
    """Parts of each row's logits that a kernel of sampling reads, by its name; a part that is read
    twice counts twice."""


NO_READS = Reads()


class KernelRecorder(TorchDispatchMode):
    """Record the kernels of the operators and Triton launches inside.

    `reads`: what Triton kernels read. `answer`: what the host reads where it asks the device for a
    boolean.
    """

    def __init__(self, *, reads: Reads = NO_READS, answer: bool = True) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self.num_waits = 0
        """Times that the host waits for the device."""
        self._reads, self._answer = reads, answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record an operator, or take it apart."""
        kwargs = kwargs or {}
        is_there = any(isinstance(leaf, CudaTensor) for leaf in tree_leaves((args, kwargs)))
        if is_there and func in DECOMPOSED:
            with self:
                return DECOMPOSED[func](*args, **kwargs)
        if is_there and func is aten._local_scalar_dense.default:
            assert args[0].dtype == torch.bool, "the host reads a number from the device"
            self.num_waits += 1
            return self._answer
        result = func(*args, **kwargs)
        if func.is_view or func in ALLOCATIONS:
            return result
        if is_there or any(isinstance(leaf, CudaTensor) for leaf in tree_leaves(result)):
            name = func.overloadpacket.__name__
            flops = _num_flops(func, args, kwargs, result)
            kernel = Kernel(name, _num_bytes(func, args, kwargs, result), flops)
            # Nothing is launched for tensors without elements.
            self.kernels[kernel] += NUM_KERNELS.get(name, 1) if kernel.num_bytes else 0
        return result

    @contextmanager
    def recording(self) -> Iterator["KernelRecorder"]:
        """Record Triton's launches too."""
        with self, launches_reported(self._launched), FusedAttention():
            yield self

    def _launched(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        cost = TRITON_COSTS.get(name, _plain_cost)
        if name in SAMPLING_KERNELS:
            cost = partial(_sampling_cost, name)
        self.kernels[Kernel(name, *cost(args, options, self._reads))] += 1


@contextmanager
def launches_reported(
    report: Callable[[str, tuple[Any, ...], Mapping[str, Any]], None],
) -> Iterator[None]:
    """Report the launches of all Triton kernels inside, in place of running them (3.6 to 3.9).

    Args:
        report: called with a kernel's name, its arguments, and its compile-time arguments and
            launch options.
    """
    # Triton is an optional dependency.
    from triton.runtime.jit import KernelInterface

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            report(kernel.fn.__name__, args, options)

        return launch

    with patch.object(KernelInterface, "__getitem__", launcher):
        yield


class FusedAttention(TorchFunctionMode):
    """Attend as on a CUDA device: by flash attention, and with a mask by the efficient kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace torch's attention by the operator that a CUDA device chooses."""
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None:
        given = query, key, value, dropout_p, is_causal, False
        return aten._scaled_dot_product_flash_attention.default(*given, scale=scale)[0]
    assert not enable_gqa, "the efficient kernel takes as many keys' heads as queries'"
    if attn_mask.dtype == torch.bool:
        # As `convert_boolean_attn_mask` of transformers/attention.cpp.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -torch.inf
        )
    given = query, key, value, attn_mask, False, dropout_p, is_causal
    return aten._scaled_dot_product_efficient_attention.default(*given, scale=scale)[0]


def _logsumexp(logits: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """Compute as `logsumexp_out_impl` of ReduceOps.cpp."""
    peaks = logits.amax(dim, keepdim=True)
    squeezed = peaks if keepdim else peaks.squeeze(dim)
    squeezed.masked_fill_(squeezed.abs() == torch.inf, 0)
    return (logits - peaks).exp_().sum(dim, keepdim=keepdim).log_().add_(squeezed)


# Operators that C++ composes of others below the dispatcher.
DECOMPOSED: dict[Any, Callable[..., Any]] = {aten.logsumexp.default: _logsumexp}


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; those that a stride of 0 repeats count once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(size for size, stride in pairs if stride or not size)


def _num_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    given = _tensors((args, kwargs))
    returned = [x for x in _tensors(result) if not any(x is one for one in given)]
    if func in GATHERING:
        return sum(map(num_bytes, given[1:])) + 2 * sum(map(num_bytes, returned))
    if func in SCATTERING:
        return sum(map(num_bytes, given[1:])) + num_bytes(given[-1])
    named = list(zip(func._schema.arguments, args, strict=False))
    named += [(argument, kwargs.get(argument.name)) for argument in func._schema.arguments]
    written = [
        tensor
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    ]
    is_unread = func in OVERWRITING or (bool(written) and written[0] is kwargs.get("out"))
    read = [x for x in given if not (is_unread and any(x is one for one in written))]
    return sum(map(num_bytes, (*read, *written, *returned)))


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among values, each once."""
    found = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    return list(found.values())


def _num_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if "scaled_dot_product" in packet.__name__:
        (B, H, Q, D), (S, E) = args[0].shape, args[2].shape[-2:]
        is_causal = next((x for x in (*args[3:], kwargs.get("is_causal")) if x is True), False)
        return 2 * B * H * Q * S * (D + E) // (1 + is_causal)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


Cost = Callable[[tuple[Any, ...], Mapping[str, Any], Reads], tuple[int, int]]

SAMPLING_KERNELS = ("measure_kernel", "truncate_kernel", "draw_kernel")


def _plain_cost(args: tuple[Any, ...], options: Mapping[str, Any], _: Reads) -> tuple[int, int]:
    """Return the bytes of a Triton kernel's tensors, each once, and no operations."""
    return sum(map(num_bytes, _tensors((args, dict(options))))), 0


def _sampling_cost(
    name: str, args: tuple[Any, ...], options: Mapping[str, Any], reads: Reads
) -> tuple[int, int]:
    """Return the cost of reading parts of each row's logits."""
    logits_BV = options["logits"]
    B, V = logits_BV.shape
    num_tokens = min(V * reads.num_parts[name], options["CHUNK"] * reads.num_parts[name])
    if name == "measure_kernel":
        # The last part is not full.
        num_tokens = V
    return B * num_tokens * logits_BV.itemsize, 0


def _write_cost(args: tuple[Any, ...], _: Mapping[str, Any], __: Reads) -> tuple[int, int]:
    """Return the cost of writing new keys and values, which are read once and written once."""
    return 2 * sum(map(num_bytes, args[:2])), 0


def _attend_cost(
    args: tuple[Any, ...], options: Mapping[str, Any], reads: Reads
) -> tuple[int, int]:
    """Return the cost of attending over each row's own pages."""
    assert not options["IS_SHARED"], "shared prompts are not modelled"
    queries_BHD, outputs, partials, sums = args[:4]
    B, H, _ = queries_BHD.shape
    sizes = options["KEY_SIZE"], options["VALUE_SIZE"]
    types = options["KEY_TYPE"], options["VALUE_TYPE"]
    token = sum(n * t.primitive_bitwidth // 8 for n, t in zip(sizes, types, strict=True))
    num_keys = reads.num_keys
    pages = B * num_keys * options["NUM_KEY_HEADS"] * token
    # Of partial outputs, all that there is room for.
    made = [outputs] if partials is None else [partials, sums]
    moved = pages + sum(map(num_bytes, (queries_BHD, *made)))
    return moved, 2 * B * H * num_keys * sum(sizes)


# Kernels whose arguments do not show what they move.
TRITON_COSTS: dict[str, Cost] = {"write_kernel": _write_cost, "attend_kernel": _attend_cost}
