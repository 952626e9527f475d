"""Compile the C++ kernels, and call those that always add in the same order.

These are matrix products and attention. The same kernel runs for any number of rows, so a row has
the same bits in every batch, with any padding and any number of threads. Any thread may call.

B: rows or batches, M: rows of a matrix, K: inputs of a product, or heads of keys, N: outputs, H:
query heads, Q: queries, S: keys, D: size of a key, E: size of a value.
"""

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cb_rollout.compat import inductor
from cb_rollout.engine.numerics.qualification.qualifier import (
    Subject,
    require_proved,
)
from cb_rollout.engine.numerics.qualification.verdicts import Verdict
from cb_rollout.engine.numerics.signatures import ARGUMENTS, Products

# Dtypes of the ordered kernels, which compute in float32.
DTYPES = (torch.float32, torch.bfloat16)

# The C++ type STORED of each dtype.
TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16"}

# Run in a child process before a kernel is loaded into this one.
TRIAL = "cb_rollout.engine.numerics.qualification.native_kernels:try_kernel"

# A trial takes 0.3 s. A hanging kernel is killed after this time, even on a busy machine.
SECONDS_OF_A_TRIAL = 30

# Forms of a mask, as in ordered.cpp.
_NONE, _BOOLEAN, _ADDED = range(3)


def multiply(
    rows_BK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a linear layer, `[B, N]`; each output is one sum over the inputs, in one order.

    All tensors are on a CPU, in one of `TYPES`; the weight is contiguous.
    """
    rows_BK = rows_BK.contiguous()
    if bias_N is not None:
        bias_N = bias_N.contiguous()
    B, K = rows_BK.shape
    N = weight_NK.shape[0]
    outputs_BN = rows_BK.new_empty(B, N)
    run = kernel("multiply", rows_BK.dtype)
    run(
        rows_BK.data_ptr(),
        weight_NK.data_ptr(),
        _address(bias_N),
        outputs_BN.data_ptr(),
        B,
        K,
        N,
    )
    return outputs_BN


def multiply_many(
    rows_BK: torch.Tensor,
    weights_NK: Sequence[torch.Tensor],
    biases_N: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute linear layers of the same rows; made for 9 to 128 rows, correct for any number.

    Args:
        rows_BK: `[B, K]`, on a CPU, in one of `TYPES`.
        weights_NK: `[N, K]` each, contiguous; in the dtype of the rows, or all in float32 for rows
            in bfloat16, to which they are rounded.
        biases_N: `[N]`, one per weight, in the dtype of the rows, or none.

    Returns:
        The outputs of all layers, one after the other: `[B, sum of N]`.
    """
    dtype = rows_BK.dtype
    rows_BK = rows_BK.contiguous()
    biases_N = [bias_N.contiguous() for bias_N in biases_N]
    sizes = [weight_NK.shape[0] for weight_NK in weights_NK]
    B, K = rows_BK.shape
    assert all(weight_NK.shape[1:] == (K,) for weight_NK in weights_NK)
    assert not biases_N or [bias_N.shape[0] for bias_N in biases_N] == sizes
    outputs_BN = rows_BK.new_empty(B, sum(sizes))
    run = kernel("multiply_many", dtype, **rounding_of(dtype, weights_NK[0].dtype))
    products = Products(
        rows=rows_BK.data_ptr(),
        outputs=outputs_BN.data_ptr(),
        weights=_addresses(weights_NK),
        biases=_addresses(biases_N) if biases_N else None,
        sizes=(ctypes.c_int64 * len(sizes))(*sizes),
        num_weights=len(sizes),
        num_rows=B,
        num_inputs=K,
        allows_tiles=1,
    )
    run(ctypes.byref(products))
    return outputs_BN


def rounding_of(dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, int]:
    """Return the constants that `multiply_many` is compiled with for weights of another dtype."""
    return {} if weight_dtype == dtype else {"ROUNDS_WEIGHTS": 1}


def multiply_batch(left_BMK: torch.Tensor, right_BKN: torch.Tensor) -> torch.Tensor:
    """Multiply matrices, `[B, M, N]`: each output is one chain over K, which zeros do not change.

    Both are on a CPU, in one of `DTYPES`; the right one is copied if its last stride is not 1.
    """
    B, M, K = left_BMK.shape
    N = right_BKN.shape[2]
    if right_BKN.stride(2) != 1:
        right_BKN = right_BKN.contiguous()
    outputs_BMN = left_BMK.new_empty(B, M, N)
    right_strides = right_BKN.stride()
    run = kernel("multiply_batch", left_BMK.dtype)
    run(
        left_BMK.data_ptr(),
        *left_BMK.stride(),
        right_BKN.data_ptr(),
        right_strides[0],
        right_strides[1],
        outputs_BMN.data_ptr(),
        B,
        M,
        K,
        N,
    )
    return outputs_BMN


def attend(
    query_BHQD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSE: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with every query to the keys that its mask allows, in order.

    Args:
        query_BHQD: on a CPU, in one of `DTYPES`, as are all three states.
        key_BKSD: H is a multiple of K.
        value_BKSE: like the keys.
        mask: broadcast to `[B, H, Q, S]`: bool, True where a key is seen, or numbers to add; None:
            all keys are seen.
        scale: multiplies the scores.
        is_causal: the last query sees all keys, and each one before sees one less.
        softcap: bounds the scores; None: no bound.
        sinks_H: a score for each head that takes its share and gives no value; None: none.

    Returns:
        `[B, Q, H, E]`, zeros where a query sees no key.
    """
    B, H, Q, D = query_BHQD.shape
    _, K, S, E = value_BKSE.shape
    dtype = query_BHQD.dtype
    query_BHQD = with_unit_stride(query_BHQD)
    key_BKSD = with_unit_stride(key_BKSD)
    value_BKSE = with_unit_stride(value_BKSE)
    outputs_BQHE = query_BHQD.new_empty(B, Q, H, E)

    mask_form = _NONE
    mask_strides = (0, 0, 0, 0)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask_form = _BOOLEAN
        else:
            mask_form = _ADDED
            mask = mask.to(dtype)
        mask = mask.expand(B, H, Q, S)
        mask_strides = mask.stride()
    if sinks_H is not None:
        sinks_H = sinks_H.to(dtype).contiguous()

    run = kernel("attend_masked", dtype)
    run(
        *_strided(query_BHQD),
        *_strided(key_BKSD),
        *_strided(value_BKSE),
        outputs_BQHE.data_ptr(),
        _address(mask),
        mask_form,
        *mask_strides,
        B,
        H,
        K,
        Q,
        S,
        D,
        E,
        scale,
        softcap or 0.0,
        is_causal,
        _address(sinks_H),
    )
    return outputs_BQHE


def _address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's first number; None (a null pointer) without a tensor."""
    if tensor is None:
        return None
    return tensor.data_ptr()


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of the tensors' first numbers."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _strided(states: torch.Tensor) -> tuple[int, ...]:
    """Return the arguments for states of four dimensions, whose last stride is 1; see `STRIDED`."""
    return (states.data_ptr(), *states.stride()[:3])


def with_unit_stride(states: torch.Tensor) -> torch.Tensor:
    """Return states whose last stride is 1, copied if needed."""
    if states.stride(-1) == 1:
        return states
    return states.contiguous()


@cache
def kernel(name: str, dtype: torch.dtype, **sizes: int) -> Callable[..., Any]:
    """Compile a kernel of `native/`, once per machine, and load it once it has passed its trial.

    `sizes`: constants of the source, with which the compiler unrolls loops or chooses a type.

    Raises:
        UnprovedError: it failed its trial in a child process, or the trial could not run.
        Exception: what the compiler raises.
    """
    library = inductor.compile_library(
        source_of(name, dtype, sizes),
        # Compilers fuse products with sums in some loops only. The other kernels must give a row
        # the same bits in each of them.
        contracts=name == "attend",
        approve=partial(_approve, name, dtype, sizes),
    )
    function = getattr(library, name)
    function.argtypes = ARGUMENTS[name]
    function.restype = None
    return function


def source_of(name: str, dtype: torch.dtype, sizes: Mapping[str, int]) -> str:
    """Return the C++ source of a kernel; the arguments are those of `kernel`."""
    file_name = "ordered"
    if name in ("multiply", "multiply_many", "attend"):
        file_name = name
    parts = [f"#define STORED {TYPES[dtype]}"]
    for constant, value in sizes.items():
        parts.append(f"#define {constant} {value}")
    folder = Path(__file__).parent / "native"
    for file in ("vectors.h", "pages.h", f"{file_name}.cpp"):
        parts.append((folder / file).read_text())
    return "\n".join(parts)


def _approve(name: str, dtype: torch.dtype, sizes: Mapping[str, int], path: Path) -> None:
    """Raise `UnprovedError` unless a compiled kernel passed its trial on this machine."""
    verdict = require_proved(_subject(name, dtype, sizes, path))
    if verdict is not None:
        _PROOFS[name, dtype, tuple(sizes.items())] = verdict


_PROOFS: dict[tuple[Any, ...], Verdict] = {}


def proof_of(name: str, dtype: torch.dtype, **sizes: int) -> Verdict | None:
    """Return the verdict of a kernel that this process loaded.

    Args:
        name: of the kernel.
        dtype: of the numbers that it reads.
        sizes: constants that it was compiled with; others may have any value.

    Returns:
        None if no such kernel was loaded, or if it was loaded without a trial.
    """
    for (loaded, of_dtype, constants), verdict in _PROOFS.items():
        if loaded == name and of_dtype == dtype and sizes.items() <= dict(constants).items():
            return verdict
    return None


def _subject(name: str, dtype: torch.dtype, sizes: Mapping[str, int], path: Path) -> Subject:
    dtype_name = str(dtype).removeprefix("torch.")
    shape = ", ".join(f"{constant}={value}" for constant, value in sizes.items())
    description = f"C++ kernel {name} ({', '.join(filter(None, (dtype_name, shape)))})"
    # The library's bytes stand for source, compiler, flags and sizes.
    library = hashlib.sha256(path.read_bytes()).hexdigest()
    return Subject(
        name=description,
        function=TRIAL,
        argument={
            "library": str(path),
            "name": name,
            "dtype": dtype_name,
            "sizes": dict(sizes),
        },
        key={"kernel": description, "library": library, "machine": inductor.machine_hash()},
        otherwise="another kernel or PyTorch computes in its place",
        limit_seconds=SECONDS_OF_A_TRIAL,
        # Several threads on every machine; they do not spin while they wait.
        environment={"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    )
