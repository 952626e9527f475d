"""Model what an optimization of a decode step would gain.

It replaces some of the kernels of a traced step, which runs the model's own forward, by fewer ones.
The workload `gpu_compiled` counts the kernels that inductor makes instead.
"""

from collections import Counter

from benchmarks.roofline.cards import Card
from benchmarks.roofline.steps import Rows, Shape, Step, Traced
from benchmarks.roofline.vllm_kernels import LayerSizes, moving, product

FUSED = "norms, rotations, writes and activations fused, products joined"

# Kernels of a layer that its fusions leave as they are.
ATTENTION = ("attend_kernel", "join_kernel")


def optimizations(
    decode: Traced, shape: Shape, rows: Rows, card: Card
) -> dict[str, dict[str, float]]:
    """Return the modelled milliseconds of a step today, and with its layers fused.

    Args:
        decode: a step of the card.
        shape: arguments of `AutoConfig.for_model`.
        rows: the sequences.
        card: runs the step.
    """
    steps = {"as it is": decode.step, FUSED: _fused(decode, LayerSizes.of(shape), rows).step}
    today = card.step_seconds(decode.step)
    return {
        name: {
            "launches": step.num_launches,
            "milliseconds": 1e3 * card.step_seconds(step),
            "percent_saved": 100 * (1 - card.step_seconds(step) / today),
        }
        for name, step in steps.items()
    }


def _fused(traced: Traced, sizes: LayerSizes, rows: Rows) -> Traced:
    """Return the step with nine kernels a layer; ten where keys are split."""
    tokens = rows.num_rows
    hidden, queries, keys, inner, _ = sizes
    kept = {k: n for k, n in traced.layer.graphed.items() if k.name in ATTENTION}
    layer = Counter(kept)
    layer.update(
        [
            moving("add and norm", 4 * tokens * hidden),
            product(tokens, hidden, queries + 2 * keys),
            moving("norm, rotation and write", 2 * tokens * (queries + 2 * keys)),
            product(tokens, queries, hidden),
            moving("add and norm", 4 * tokens * hidden),
            product(tokens, hidden, 2 * inner),
            moving("silu and mul", 3 * tokens * inner),
            product(tokens, inner, hidden),
        ]
    )
    fused = Step(graphed=layer)
    step = traced.step.plus(traced.layer, -traced.num_layers).plus(fused, traced.num_layers)
    return Traced(step, fused, traced.num_layers)
