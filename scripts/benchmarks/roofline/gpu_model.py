"""The workload `gpu_model`: kernels of a step, and a model of their time.

A model, not a measurement: no device runs anything. Steps are those of cb_rollout, of transformers'
own forward, and of vLLM as its source reads.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.roofline.cards import CARDS, KERNEL_SECONDS, Card
from benchmarks.roofline.kernel_recorder import SAMPLING_KERNELS
from benchmarks.roofline.machine import matmul_parameters
from benchmarks.roofline.optimizations import optimizations
from benchmarks.roofline.steps import (
    PLAIN,
    SAMPLED,
    TOP_P,
    Rows,
    Shape,
    Step,
    Traced,
    engine_decode,
    engine_prefill,
    of_all_layers,
    transformers_decode,
    transformers_prefill,
)
from benchmarks.roofline.stretches import stretches
from benchmarks.roofline.vllm_kernels import BF16, VERSION, vllm_step
from benchmarks.sizes import Setup
from cb_rollout.engine.attention.shared_prefix import is_cut, max_stretches
from cb_rollout.tools.bench import create_model

if TYPE_CHECKING:
    from benchmarks.roofline.kernel_recorder import Kernel

NOTE = "a model, not a measurement"

# The card, and the rows of a decode step, whose kernels are listed one by one.
LISTED_CARD, LISTED_ROWS = "H100", 256

# Parts of a step by the kernels of its layers.
PARTS = {
    "mm": "matrix products of the layers",
    "attend_kernel": "attention over pages",
    "join_kernel": "attention over pages",
    "cut_kernel": "attention over pages",
    "write_kernel": "attention over pages",
}
OTHERS = "norms, rotations, activations and sums"
OUTSIDE = "embedding, head and sampling"

# The part of a card's memory that weights, keys and values may take.
USABLE = 0.9


class Ideal(NamedTuple):
    """The least work of a step, on any card."""

    num_bytes: float
    """Weights once; each key and value read once, or written once by a prefill."""
    num_flops: float

    def seconds(self, card: Card) -> float:
        """Return the time at the card's own rates."""
        return max(self.num_bytes / card.bytes_per_second, self.num_flops / card.flops_per_second)


def bench_gpu_model(setup: Setup) -> dict[str, Any]:
    """Return launches, bytes and modelled milliseconds of decode steps and prefills."""
    results: dict[str, Any] = {}
    for name, shape in setup.sizes.modelled_shapes.items():
        for card in CARDS:
            results[f"decode of {name} on {card.name}, modelled"] = dict(
                _decodes(shape, card, setup)
            )
            results[f"prefill of {name} on {card.name}, modelled"] = dict(
                _prefills(shape, card, setup)
            )
        card, rows = listed(setup)
        step = f"a decode step of {name}, {rows} tokens, on {card.name}, modelled"
        results[f"parts of {step}"] = _parts(engine_step(shape, rows, card), card)
        results[f"optimizations of {step}"] = optimizations(
            engine_step(shape, rows, card), shape, rows, card
        )
        results[f"sampling of {step}"] = _samplings(shape, rows, card)
        results[f"attention of rows that differ, {name}, on {card.name}, modelled"] = stretches(
            shape, card
        )
        results[f"kernels of a layer in {step}"] = _layer_kernels(
            engine_step(shape, rows, card), card
        )
    return results


def listed(setup: Setup) -> tuple[Card, Rows]:
    """Return the card and the rows of the step that is looked at more closely."""
    sizes = setup.sizes
    card = next(card for card in CARDS if card.name == LISTED_CARD)
    return card, Rows(min(max(sizes.modelled_rows), LISTED_ROWS), sizes.modelled_tokens[0])


def _samplings(shape: Shape, rows: Rows, card: Card) -> dict[str, dict[str, float]]:
    """Return a step of each kind of sampling parameters: what a graph launches, and its time."""
    traced = {name: engine_step(shape, rows, card, name) for name in SAMPLED}
    return {
        name: {
            "launches": one.step.num_launches,
            "outside of the graph": one.step.eager.total(),
            "milliseconds": 1e3 * card.step_seconds(one.step),
            "sampling_milliseconds": 1e3
            * sum(
                n * (KERNEL_SECONDS + card.kernel_seconds(kernel))
                for kernel, n in one.step.kernels.items()
                if kernel.name in SAMPLING_KERNELS
            ),
        }
        for name, one in traced.items()
    }


def _parts(traced: Traced, card: Card) -> dict[str, dict[str, float]]:
    """Split a step that is one CUDA graph into parts, which add up to its time."""
    parts: dict[str, Counter[Kernel]] = {name: Counter() for name in (*PARTS.values(), OTHERS)}
    outside = traced.step.kernels
    for kernel, launches in traced.layer.kernels.items():
        count = launches * traced.num_layers
        parts[PARTS.get(kernel.name, OTHERS)][kernel] = count
        outside[kernel] -= count
    parts[OUTSIDE] = +outside
    rows = {
        name: {
            "launches": kernels.total(),
            "milliseconds": 1e3 * sum(n * card.kernel_seconds(k) for k, n in kernels.items()),
        }
        for name, kernels in parts.items()
    }
    gaps = 1e3 * KERNEL_SECONDS * traced.step.num_launches
    return rows | {"gaps between kernels": {"launches": 0, "milliseconds": gaps}}


def _decodes(shape: Shape, card: Card, setup: Setup) -> Iterator[tuple[str, dict[str, float]]]:
    sizes = setup.sizes
    for num_tokens in sizes.modelled_tokens:
        for num_rows in sizes.modelled_rows:
            rows = Rows(num_rows, num_tokens)
            if memory_bytes(shape, rows) > USABLE * card.memory_bytes:
                continue
            traced = {"cb_rollout": engine_step(shape, rows, card)}
            if num_tokens == sizes.modelled_tokens[0]:
                traced["cb_rollout, top-p"] = engine_step(shape, rows, card, TOP_P)
            traced["transformers"] = _traced(transformers_decode, _key(shape), rows)
            traced[f"vLLM {VERSION}"] = vllm_step(shape, rows, is_decode=True)
            ideal = ideal_decode(shape, rows)
            for contender, one in traced.items():
                yield f"{rows} tokens, {contender}", _figures(one, card, ideal)


def _prefills(shape: Shape, card: Card, setup: Setup) -> Iterator[tuple[str, dict[str, float]]]:
    for prompts in setup.sizes.modelled_prefills:
        rows = Rows(*prompts)
        traced = {
            "cb_rollout": _traced(engine_prefill, _key(shape), rows),
            "transformers": _traced(transformers_prefill, _key(shape), rows),
            f"vLLM {VERSION}": vllm_step(shape, rows, is_decode=False),
        }
        for contender, one in traced.items():
            figures = _figures(one, card, ideal_prefill(shape, rows))
            yield f"{rows} tokens, {contender}", figures


def _layer_kernels(traced: Traced, card: Card) -> dict[str, dict[str, float]]:
    """List the kernels of one layer."""
    return {
        f"{kernel.name} of {kernel.num_bytes:,} bytes": {
            "launches": launches,
            "gigaflops": kernel.num_flops / 1e9,
            "microseconds": 1e6 * card.kernel_seconds(kernel),
        }
        for kernel, launches in sorted(traced.layer.kernels.items())
    }


def _figures(traced: Traced, card: Card, ideal: Ideal) -> dict[str, float]:
    seconds = card.step_seconds(traced.step)
    return {
        "launches": traced.step.num_launches,
        "launches_per_layer": traced.layer.num_launches,
        "gigabytes": traced.step.num_bytes / 1e9,
        "milliseconds": 1e3 * seconds,
        "percent_of_roofline": 100 * ideal.seconds(card) / seconds,
    }


def engine_step(shape: Shape, rows: Rows, card: Card, sampled: str = PLAIN) -> Traced:
    """Return a decode step of cb_rollout; it differs between cards only by the list of stretches.

    The list is as long as the card has processors to fill, if rows are cut at all.
    """

    def num_stretches(one: Card) -> int:
        count = max_stretches(shape["num_key_value_heads"], one.num_processors)
        lengths = [rows.num_tokens] * rows.num_rows
        return count if is_cut(lengths, count) else 0

    like = next(one for one in CARDS if num_stretches(one) == num_stretches(card))
    return _engine_decode(_key(shape), rows, like.num_processors, sampled)


_Key = tuple[tuple[str, Any], ...]


def _key(shape: Shape) -> _Key:
    return tuple(shape.items())


@cache
def _engine_decode(key: _Key, rows: Rows, num_processors: int, sampled: str) -> Traced:
    shape = dict(key)
    return of_all_layers(
        lambda layers: engine_decode(shape, rows, num_processors, layers, SAMPLED[sampled]),
        shape["num_hidden_layers"],
    )


@cache
def _traced(trace: Callable[[Shape, Rows, int], Step], key: _Key, rows: Rows) -> Traced:
    shape = dict(key)
    return of_all_layers(lambda layers: trace(shape, rows, layers), shape["num_hidden_layers"])


@cache
def _parameters(key: _Key) -> tuple[int, int]:
    """Return the parameters that multiply every token, and those of the head."""
    return matmul_parameters(create_model(dict(key), "meta"))


def ideal_decode(shape: Shape, rows: Rows) -> Ideal:
    """Return the least work of a decode step."""
    body, head = _parameters(_key(shape))
    num_flops = 2 * rows.num_rows * (body + head) + _attention_flops(shape, rows)
    return Ideal(BF16 * (body + head) + _state_bytes(shape, rows), num_flops)


def ideal_prefill(shape: Shape, rows: Rows) -> Ideal:
    """Return what a prefill of whole prompts must move and compute: logits of the last tokens."""
    body, head = _parameters(_key(shape))
    # A token sees half of the prompt on average.
    attention = _attention_flops(shape, rows) * rows.num_tokens / 2
    num_flops = 2 * rows.num_rows * (body * rows.num_tokens + head) + attention
    return Ideal(BF16 * (body + head) + _state_bytes(shape, rows), num_flops)


def memory_bytes(shape: Shape, rows: Rows) -> float:
    """Return the bytes of the weights and of all keys and values."""
    body, head = _parameters(_key(shape))
    embedding = 0 if shape["tie_word_embeddings"] else head
    return BF16 * (body + head + embedding) + _state_bytes(shape, rows)


def _state_bytes(shape: Shape, rows: Rows) -> int:
    per_token = 2 * BF16 * shape["num_key_value_heads"] * shape["head_dim"]
    return rows.num_rows * rows.num_tokens * shape["num_hidden_layers"] * per_token


def _attention_flops(shape: Shape, rows: Rows) -> int:
    """Return the operations of one query of each row over all of its keys."""
    per_key = 4 * shape["num_attention_heads"] * shape["head_dim"]
    return rows.num_rows * rows.num_tokens * shape["num_hidden_layers"] * per_key
