"""Replace torch's CPU operators by operators that compute each row alone.

Replaced at the CPU's dispatch key (torch 2.11 to 2.13), below autograd and autocast, so models are
not touched and gradients are torch's own formulas. Products in a real backward pass run torch's
kernels, because gradients need not be bitwise equal. torch's other operators are kept: they give a
row the same bits in any batch (tests/numerics/test_operators.py).

Process-wide, for as long as at least one caller is inside `installed`. Any thread may call.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library, get_kernel

from cb_rollout.engine.numerics.kernels import DTYPES, attend, multiply, multiply_batch

_Operator = Callable[..., Any]

# Added to and subtracted from a float64 in [0, 1], this rounds it to a multiple of 2**-36.
_ROUNDING = 1.5 * 2**16

_LOCK = threading.Lock()
_THREAD = threading.local()
_NUM_INSIDE = 0
_LIBRARY: Library | None = None


@contextmanager
def installed() -> Iterator[None]:
    """Make torch compute with these operators, in every thread."""
    global _NUM_INSIDE, _LIBRARY
    with _LOCK:
        if _NUM_INSIDE == 0:
            _LIBRARY = _install()
        _NUM_INSIDE += 1
    try:
        yield
    finally:
        with _LOCK:
            _NUM_INSIDE -= 1
            if _NUM_INSIDE == 0 and _LIBRARY is not None:
                _LIBRARY._destroy()
                _LIBRARY = None


def are_installed() -> bool:
    """Return whether torch computes with these operators."""
    return _LIBRARY is not None


@contextmanager
def torchs_own() -> Iterator[None]:
    """Make this thread compute with torch's own operators, for example gradients."""
    before = getattr(_THREAD, "is_plain", False)
    _THREAD.is_plain = True
    try:
        yield
    finally:
        _THREAD.is_plain = before


def summable(weights: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 1 as float64 whose sums are exact up to 131,072, in any order.

    Each is rounded to a multiple of 2**-36. Gradients pass unchanged.
    """
    return weights.double() + _ROUNDING - _ROUNDING


def _install() -> Library:
    own = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of the first operator that is replaced.
        warnings.simplefilter("ignore")
        for name, replaced in _OPERATORS.items():
            own.impl(name, _dispatched(name, replaced), "CPU", with_keyset=True)
    return own


def _dispatched(name: str, replaced: _Operator) -> _Operator:
    """Return the kernel of an operator: `replaced`, or torch's if `replaced` returns None."""
    torchs_own = get_kernel(f"aten::{name}", "CPU")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_backward():
            result = replaced(*args, **kwargs)
            if result is not None:
                return result
        return torchs_own.call_boxed(keyset, *args, **kwargs)

    return run


def _is_backward() -> bool:
    """Return whether a backward pass is running, not a forward that it recomputes."""
    if getattr(_THREAD, "is_plain", False):
        return True
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _are_supported(*tensors: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(tensor.dtype == dtype for tensor in tensors)


def _is_transposed(right_KN: torch.Tensor) -> bool:
    """Return whether a matrix is a linear layer's weight, transposed."""
    return right_KN.stride() == (1, right_KN.shape[0])


def _mm(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor | None:
    if not _are_supported(left_MK, right_KN):
        return None
    if _is_transposed(right_KN):
        return multiply(left_MK, right_KN.t())
    return multiply_batch(left_MK[None], right_KN[None])[0]


def _addmm(
    bias: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, **factors: float
) -> torch.Tensor | None:
    if not _are_supported(left_MK, right_KN, bias):
        return None
    is_plain_sum = all(factor == 1 for factor in factors.values())
    if is_plain_sum and bias.dim() == 1 and _is_transposed(right_KN):
        return multiply(left_MK, right_KN.t(), bias.expand(right_KN.shape[1]))
    product = _mm(left_MK, right_KN)
    assert product is not None
    return _added(bias, product, **factors)


def _addmm_(
    total: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, **factors: float
) -> torch.Tensor | None:
    product = _mm(left_MK, right_KN)
    if product is None or total.dtype != product.dtype:
        return None
    return total.copy_(_added(total, product, **factors))


def _added(
    bias: torch.Tensor, product: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return `beta * bias + alpha * product`, without a multiplication by 1."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    if beta != 1:
        bias = bias * beta
    return product + bias


def _bmm(left_BMK: torch.Tensor, right_BKN: torch.Tensor) -> torch.Tensor | None:
    if not _are_supported(left_BMK, right_BKN):
        return None
    if right_BKN.stride(0) == 0 and right_BKN.stride(1) == 1:
        # A linear layer of rows that are not contiguous, as torch computes it without gradients.
        outputs = _mm(left_BMK.reshape(-1, left_BMK.shape[2]), right_BKN[0])
        assert outputs is not None
        return outputs.view(*left_BMK.shape[:2], -1)
    return multiply_batch(left_BMK, right_BKN)


def _baddbmm(
    bias: torch.Tensor, left_BMK: torch.Tensor, right_BKN: torch.Tensor, **factors: float
) -> torch.Tensor | None:
    product = _bmm(left_BMK, right_BKN)
    if product is None:
        return None
    return _added(bias, product, **factors)


def _mv(matrix_MK: torch.Tensor, vector_K: torch.Tensor) -> torch.Tensor | None:
    product = _mm(matrix_MK, vector_K[:, None])
    if product is None:
        return None
    return product[:, 0]


def _grouped_mm(
    rows_BK: torch.Tensor,
    weights_GKN: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Multiply the rows of each group by the group's matrix; None: torch computes it.

    The parameter names are those of torch's operator.

    Args:
        rows_BK: the rows, one group after another.
        weights_GKN: a matrix for each group.
        offs: the row at which each group ends.
        bias: None; with a bias, torch computes it.
        out_dtype: dtype of the outputs; None: that of the rows.
    """
    if rows_BK.dim() != 2 or weights_GKN.dim() != 3:
        return None
    if offs is None or bias is not None or not _are_supported(rows_BK, weights_GKN):
        return None
    outputs = rows_BK.new_zeros(rows_BK.shape[0], weights_GKN.shape[2])
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            outputs[start:end] = torch.mm(rows_BK[start:end], weights_GKN[group])
        start = end
    if out_dtype is None:
        return outputs
    return outputs.to(out_dtype)


def _attention(
    query_BHQD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSE: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend for a model that calls torch's function directly (Falcon in transformers 5.23).

    Args:
        query_BHQD: queries, of the same dtype as the next two.
        key_BKSD: keys.
        value_BKSE: values.
        dropout_p: share of the weights that are dropped.
        is_causal: each query sees the keys up to its own.
        attn_mask: see `kernels.attend`.
        scale: multiplies the scores; None: one over the root of D.

    Returns:
        The outputs, `[B, H, Q, E]`, and the logarithms of the sums; None: torch computes it.
    """
    Q, D = query_BHQD.shape[2:]
    S = key_BKSD.shape[2]
    if dropout_p or (is_causal and Q != S) or not _are_supported(query_BHQD, key_BKSD, value_BKSE):
        return None
    with torchs_own():
        # The backward pass takes the second output, the logarithms of the sums.
        _, logsumexp_BQH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHQD,
            key_BKSD,
            value_BKSE,
            dropout_p,
            is_causal,
            attn_mask=attn_mask,
            scale=scale,
        )
    factor = D**-0.5
    if scale is not None:
        factor = scale
    outputs_BQHE = attend(
        query_BHQD,
        key_BKSD,
        value_BKSE,
        attn_mask,
        scale=factor,
        is_causal=is_causal and Q > 1,
    )
    return outputs_BQHE.transpose(1, 2), logsumexp_BQH


def _elementwise(function: Callable[..., torch.Tensor]) -> _Operator:
    """Compute in float32 with operators that treat the ends of a tensor like its middle."""

    def run(numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if numbers.dtype not in DTYPES:
            return None
        result = function(numbers.float(), *args, **kwargs)
        return result.to(numbers.dtype)

    return run


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / x.neg().exp_().add_(1)


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return x * 0.5 * (torch.erf(x * 0.5**0.5) + 1)
    inner = (x + x * x * x * 0.044715) * (2 / torch.pi) ** 0.5
    return x * 0.5 * (torch.tanh(inner) + 1)


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


def _mish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(_softplus(x))


def _elu(
    x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> torch.Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return x.sqrt().reciprocal_()


def _over_last(function: Callable[..., torch.Tensor | None]) -> _Operator:
    """Compute over the last dimension of numbers in `DTYPES`."""

    def run(x: torch.Tensor, dim: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        dims = [dim]
        if not isinstance(dim, int):
            dims = list(dim)
        is_last = dims in ([-1], [x.dim() - 1])
        if not is_last or x.numel() == 0 or x.dtype not in DTYPES:
            return None
        return function(x, *args, **kwargs)

    return run


def _logsumexp(x: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
    peaks, _, sums = _exponentials(x)
    logs = (sums.log().float() + peaks).to(x.dtype)
    if keepdim:
        return logs
    return logs.squeeze(-1)


def _softmax(x: torch.Tensor, half_to_float: bool) -> torch.Tensor:
    _, weights, sums = _exponentials(x)
    probabilities = weights / sums.float()
    return probabilities.to(_output_dtype(x, half_to_float))


def _safe_softmax(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return softmax, with zeros where every score is minus infinity."""
    if dtype not in (None, x.dtype):
        return None
    _, weights, sums = _exponentials(x)
    divisors = sums.float().masked_fill(sums == 0, 1.0)
    return (weights / divisors).to(x.dtype)


def _log_softmax(x: torch.Tensor, half_to_float: bool) -> torch.Tensor:
    peaks, _, sums = _exponentials(x)
    logprobs = x.float() - (sums.log().float() + peaks)
    return logprobs.to(_output_dtype(x, half_to_float))


def _output_dtype(x: torch.Tensor, half_to_float: bool) -> torch.dtype:
    if half_to_float:
        return torch.float32
    return x.dtype


def _exponentials(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest numbers of the last dimension, the exponentials over it, and their sums.

    The exponentials are added as `summable`, in any order and with any number of zeros between.
    """
    x = x.float()
    peaks = x.amax(-1, keepdim=True)
    peaks = torch.where(peaks == -torch.inf, 0.0, peaks)
    weights = (x - peaks).exp_()
    return peaks, weights, summable(weights).sum(-1, keepdim=True)


_OPERATORS: dict[str, _Operator] = {
    "mm": _mm,
    "addmm": _addmm,
    "addmm_": _addmm_,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "mv": _mv,
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "sigmoid": _elementwise(_sigmoid),
    "silu": _elementwise(_silu),
    "gelu": _elementwise(_gelu),
    "softplus": _elementwise(_softplus),
    "mish": _elementwise(_mish),
    "elu": _elementwise(_elu),
    "rsqrt": _elementwise(_rsqrt),
    "logsumexp": _over_last(_logsumexp),
    "_softmax": _over_last(_softmax),
    "_safe_softmax": _over_last(_safe_softmax),
    "_log_softmax": _over_last(_log_softmax),
}
