"""Try a compiled C++ kernel against NumPy, in a child process: `try_kernel`.

Imports NumPy and no torch, so that a trial takes a fraction of a second. Memory that cannot be read
or written follows every array, so a kernel that reaches past the end is killed here. The numbers
just before an array must stay unchanged.

B: rows, K: inputs of a product, or heads of keys, N: outputs, H: query heads, Q: queries, S: keys,
D: size of a key, E: size of a value.
"""

import ctypes
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from cb_rollout.engine.numerics.signatures import ARGUMENTS, Products, States, Step

PAGE = mmap.PAGESIZE

# Fills memory that must not change.
PATTERN = 0x5A

# Types of numbers in memory; bfloat16 is the upper half of a float32.
STORED_AS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16}

# Rounding of one number in memory, as a share of it; and of the numbers computed before.
ROUNDING = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-8}
COMPUTED = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-23}

# Roundings that errors of sums may add up to.
MARGIN = 64

# Size of attended values, which are of order one; a score's rounding moves its share of them.
SIZE_OF_ATTENDED = 4.0

NO_MASK, BOOLEAN_MASK, ADDED_MASK = range(3)


class WrongResultError(Exception):
    """A kernel's result differs from NumPy's, or it changed memory that it must not write."""


class Numbers:
    """An array that is followed by memory that cannot be accessed."""

    def __init__(self, values: np.ndarray, dtype: str) -> None:
        """Store values, rounded to a dtype of `STORED_AS`, "int64", or "bool" (one byte each)."""
        self.dtype = dtype
        stored = _stored(values, dtype)
        num_pages = -(-max(stored.nbytes, 1) // PAGE)
        self._memory = mmap.mmap(-1, (num_pages + 1) * PAGE)
        self._before = num_pages * PAGE - stored.nbytes
        whole = np.frombuffer(self._memory, np.uint8)
        whole[: self._before] = PATTERN
        self._whole = whole
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if protect(first + num_pages * PAGE, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = first + self._before
        self.array: np.ndarray = np.frombuffer(
            self._memory, stored.dtype, count=stored.size, offset=self._before
        ).reshape(stored.shape)
        self.array[...] = stored

    @property
    def values(self) -> np.ndarray:
        """Return the numbers as they are now, in float64."""
        if self.dtype == "bfloat16":
            bits = self.array.astype(np.uint32) << 16
            return bits.view(np.float32).astype(np.float64)
        return self.array.astype(np.float64)

    def require_untouched(self) -> None:
        if (self._whole[: self._before] != PATTERN).any():
            raise WrongResultError("it writes before the first number of an array")


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "int64":
        return np.ascontiguousarray(values, np.int64)
    if dtype == "bool":
        return np.ascontiguousarray(values, np.uint8)
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, STORED_AS[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16)


class KernelTrial:
    """A loaded kernel, and the numbers that it is called with."""

    def __init__(self, argument: Mapping[str, Any]) -> None:
        self.name, self.dtype = argument["name"], argument["dtype"]
        self.sizes: dict[str, int] = argument["sizes"]
        library = _loaded(argument["library"])
        self.function = getattr(library, self.name)
        self.function.argtypes = ARGUMENTS[self.name]
        self.function.restype = None
        self.random = np.random.default_rng(0)
        self.milliseconds = 0.0
        self._numbers: list[Numbers] = []

    def draw(self, *shape: int) -> Numbers:
        return self.keep(self.random.standard_normal(shape), self.dtype)

    def keep(self, values: Any, dtype: str) -> Numbers:
        numbers = Numbers(np.asarray(values), dtype)
        self._numbers.append(numbers)
        return numbers

    def run(self, *arguments: Any) -> None:
        begun = time.perf_counter()
        self.function(*arguments)
        self.milliseconds += 1000 * (time.perf_counter() - begun)
        for numbers in self._numbers:
            numbers.require_untouched()

    def compare(self, found: np.ndarray, expected: np.ndarray, size: np.ndarray | float) -> None:
        """Raise if numbers differ by more than rounding; `size`: of the sums behind them."""
        bound = ROUNDING[self.dtype] * np.abs(expected) + MARGIN * COMPUTED[self.dtype] * size
        off = np.abs(found - expected)
        if not (off <= bound).all():
            # NaN too.
            most = np.nan if np.isnan(off).any() else off.max()
            raise WrongResultError(f"it computes numbers that are off by {most:.2g}")


def _loaded(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError:
        # Torch brings the OpenMP library on some systems.
        import torch  # noqa: F401

        return ctypes.CDLL(path)


def try_kernel(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Run a kernel in all its forms; return its verdict, as `Subject` says.

    Args:
        argument: "library": path; "name": of the function; "dtype"; "sizes": as it was compiled.
    """
    trial = KernelTrial(argument)
    try:
        TRIALS[trial.name](trial)
    except WrongResultError as error:
        return {"fault": str(error), "milliseconds": {}}
    return {"fault": "", "milliseconds": {trial.name: trial.milliseconds}}


def _try_multiply(trial: KernelTrial) -> None:
    # Whole vectors and parts of one; one tile of rows and several; work for several threads.
    for B, K, N in [(1, 64, 8), (3, 67, 37), (8, 300, 70), (9, 129, 5), (33, 1, 1)]:
        rows = trial.draw(B, K)
        weight = trial.draw(N, K)
        bias = trial.draw(N)
        for given in (None, bias):
            outputs = trial.keep(np.full((B, N), np.nan), trial.dtype)
            address = None if given is None else given.address
            trial.run(rows.address, weight.address, address, outputs.address, B, K, N)
            expected = rows.values @ weight.values.T
            size = np.abs(rows.values) @ np.abs(weight.values).T
            if given is not None:
                expected = expected + given.values
                size = size + np.abs(given.values)
            trial.compare(outputs.values, expected, size)


def _try_multiply_many(trial: KernelTrial) -> None:
    weight_dtype = "float32" if "ROUNDS_WEIGHTS" in trial.sizes else trial.dtype
    # Whole blocks and parts of one; one, two and three vectors of rows, and several groups.
    for B, K, sizes in [
        (1, 64, [48]),
        (17, 67, [37, 5]),
        (40, 300, [70, 96, 1]),
        (75, 1, [1]),
        (100, 64, [96]),
    ]:
        rows = trial.draw(B, K)
        weights = [trial.keep(trial.random.standard_normal((N, K)), weight_dtype) for N in sizes]
        biases = [trial.draw(N) for N in sizes]
        multiplied = np.concatenate([_rounded(weight, trial.dtype) for weight in weights])
        for passed_biases, allows_tiles in product((None, biases), (0, 1)):
            outputs = trial.keep(np.full((B, sum(sizes)), np.nan), trial.dtype)
            products = Products(
                rows=rows.address,
                outputs=outputs.address,
                weights=_addresses(weights),
                biases=None if passed_biases is None else _addresses(passed_biases),
                sizes=(ctypes.c_int64 * len(sizes))(*sizes),
                num_weights=len(sizes),
                num_rows=B,
                num_inputs=K,
                allows_tiles=allows_tiles,
            )
            trial.run(ctypes.addressof(products))
            expected = rows.values @ multiplied.T
            size = np.abs(rows.values) @ np.abs(multiplied).T
            if passed_biases is not None:
                bias = np.concatenate([bias.values for bias in passed_biases])
                expected = expected + bias
                size = size + np.abs(bias)
            trial.compare(outputs.values, expected, size)


def _rounded(weight: Numbers, dtype: str) -> np.ndarray:
    """Return a weight, `[N, K]`, in float64, rounded to the `dtype` that a kernel multiplies."""
    if dtype != "bfloat16" or weight.dtype == dtype:
        return weight.values
    bits = weight.array.view(np.uint32)
    # To the nearest, ties to even.
    nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    upper_half = nearest & np.uint32(0xFFFF0000)
    return upper_half.view(np.float32).astype(np.float64)


def _addresses(arrays: Sequence[Numbers]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*[numbers.address for numbers in arrays])


def _try_multiply_batch(trial: KernelTrial) -> None:
    for B, M, K, N in [(1, 1, 5, 3), (2, 5, 40, 33), (3, 9, 64, 64)]:
        left = trial.draw(B, M, K)
        right = trial.draw(B, K, N)
        outputs = trial.keep(np.full((B, M, N), np.nan), trial.dtype)
        trial.run(
            left.address,
            M * K,
            K,
            1,
            right.address,
            K * N,
            N,
            outputs.address,
            B,
            M,
            K,
            N,
        )
        size = np.abs(left.values) @ np.abs(right.values)
        trial.compare(outputs.values, left.values @ right.values, size)


def _try_attend_masked(trial: KernelTrial) -> None:
    B, H, K, D, E = 2, 6, 3, 20, 12
    for Q, S, form, is_causal, softcap in [
        (1, 1, NO_MASK, False, 0.0),
        (7, 7, NO_MASK, True, 0.0),
        (5, 40, BOOLEAN_MASK, False, 3.0),
        (70, 70, ADDED_MASK, True, 0.0),
    ]:
        query = trial.draw(B, H, Q, D)
        key = trial.draw(B, K, S, D)
        value = trial.draw(B, K, S, E)
        sinks = trial.draw(H)
        outputs = trial.keep(np.full((B, Q, H, E), np.nan), trial.dtype)
        mask, address = np.zeros((B, H, Q, S)), None
        if form == BOOLEAN_MASK:
            seen = trial.random.random((B, H, Q, S)) < 0.7
            seen[..., 3] = True
            address = trial.keep(seen, "bool").address
            mask = np.where(seen, 0.0, -np.inf)
        elif form == ADDED_MASK:
            added = trial.draw(B, H, Q, S)
            mask, address = added.values, added.address
        if is_causal:
            late = np.arange(S)[None] > np.arange(S - Q, S)[:, None]
            mask = np.where(late, -np.inf, mask)
        trial.run(
            *(query.address, H * Q * D, Q * D, D),
            *(key.address, K * S * D, S * D, D),
            *(value.address, K * S * E, S * E, E),
            outputs.address,
            *(address, form, H * Q * S, Q * S, S, 1),
            *(B, H, K, Q, S, D, E),
            *(0.3, softcap, is_causal, sinks.address),
        )
        for row in range(B):
            for head in range(H):
                keys = key.values[row, head * K // H]
                scores = _capped(query.values[row, head] @ keys.T * 0.3, softcap)
                weights = _shares(scores + mask[row, head], sinks.values[head])
                expected = weights @ value.values[row, head * K // H]
                trial.compare(outputs.values[row, :, head], expected, SIZE_OF_ATTENDED)


def _capped(scores: np.ndarray, softcap: float) -> np.ndarray:
    return softcap * np.tanh(scores / softcap) if softcap else scores


def _shares(scores_QS: np.ndarray, sink: float | None) -> np.ndarray:
    """Return the softmax over keys, after a sink has taken its share."""
    largest = scores_QS.max(-1, keepdims=True)
    if sink is not None:
        largest = np.maximum(largest, sink)
    weights = np.exp(scores_QS - largest)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - largest)
    return weights / total


def _try_paged(trial: KernelTrial) -> None:
    """Try a decode step over pages, whatever its kernel."""
    sizes = trial.sizes
    shape = (
        sizes.get("NUM_HEADS", 6),
        sizes.get("NUM_KEY_HEADS", 3),
        sizes.get("KEY_SIZE", 20),
        sizes.get("VALUE_SIZE", 12),
    )
    few, many = [1, 33, 6, 70], [300, 2, 301]
    for lengths, window, softcap, has_sinks in [
        (few, 0, 0.0, False),
        (few, 9, 3.0, True),
        (many, 0, 0.0, True),
    ]:
        _try_step(trial, shape, lengths, window=window, softcap=softcap, has_sinks=has_sinks)


def _try_step(
    trial: KernelTrial,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    *,
    window: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    """Run one decode step of the attention kernel, and compare it with NumPy.

    Args:
        trial: holds the kernel and draws numbers.
        shape: query heads, key heads, size of a key, size of a value.
        lengths: tokens of each row.
        window: of sliding attention; 0: none.
        softcap: of the scores; 0: none.
        has_sinks: True if each head has a sink.
    """
    H, K, D, E = shape
    B, block_size, scale = len(lengths), 4, D**-0.5
    width = max(lengths) // block_size + 1
    blocks = trial.random.permutation(B * width).reshape(B, width)
    # Rows stand in the table in another order than in the step.
    table_rows = np.arange(B)[::-1]
    slots = _slots_of_rows(lengths, blocks, table_rows, block_size)
    keys = trial.draw(blocks.size * block_size, K, D)
    values = trial.draw(blocks.size * block_size, K, E)
    query = trial.draw(B, H, 1, D)
    key = trial.draw(B, K, 1, D)
    value = trial.draw(B, K, 1, E)
    sinks = trial.draw(H)
    outputs = trial.keep(np.full((B, H, E), np.nan), trial.dtype)
    expected_keys, expected_values = keys.values, values.values
    for row in range(B):
        expected_keys[slots[row][-1]] = key.values[row, :, 0]
        expected_values[slots[row][-1]] = value.values[row, :, 0]
    step = Step(
        queries=_states(query),
        new_keys=_states(key),
        new_values=_states(value),
        outputs=outputs.address,
        keys=keys.address,
        values=values.address,
        table=trial.keep(blocks, "int64").address,
        table_width=width,
        block_size=block_size,
        table_rows=trial.keep(table_rows, "int64").address,
        lengths=trial.keep(lengths, "int64").address,
        num_rows=B,
        num_heads=H,
        num_key_heads=K,
        key_size=D,
        value_size=E,
        scale=scale,
        softcap=softcap,
        window=window,
        sinks=sinks.address if has_sinks else None,
    )
    trial.run(ctypes.addressof(step))
    if (keys.values != expected_keys).any() or (values.values != expected_values).any():
        raise WrongResultError("it writes wrong keys or values, or in a wrong place")
    sink_of_head: list[float | None] = sinks.values.tolist() if has_sinks else [None] * H
    for row, head in np.ndindex(B, H):
        # Without a window, [-0:] takes all slots.
        seen = slots[row][-window:], head * K // H
        scores = _capped(expected_keys[seen] @ query.values[row, head, 0] * scale, softcap)
        weights = _shares(scores[None], sink_of_head[head])
        expected = weights[0] @ expected_values[seen]
        trial.compare(outputs.values[row, head], expected, SIZE_OF_ATTENDED)


def _slots_of_rows(
    lengths: list[int], blocks: np.ndarray, table_rows: np.ndarray, block_size: int
) -> list[np.ndarray]:
    """Return the slots of each row's tokens in the pages, in order."""
    slots: list[np.ndarray] = []
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        own = blocks[table_rows[row]][positions // block_size] * block_size
        slots.append(own + positions % block_size)
    return slots


def _states(numbers: Numbers) -> States:
    heads, size = numbers.array.shape[1], numbers.array.shape[3]
    return States(first=numbers.address, row_stride=heads * size, head_stride=size, stride=1)


TRIALS: dict[str, Callable[[KernelTrial], None]] = {
    "multiply": _try_multiply,
    "multiply_many": _try_multiply_many,
    "multiply_batch": _try_multiply_batch,
    "attend_masked": _try_attend_masked,
    "attend_paged": _try_paged,
    "attend": _try_paged,
}
