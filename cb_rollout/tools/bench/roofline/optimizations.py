"""Model what optimizations of a decode step would gain.

None of them is implemented. Each replaces some of the kernels of a traced step by fewer ones.

B: rows, V: vocabulary.
"""

from collections import Counter
from collections.abc import Callable

from cb_rollout.tools.bench.roofline.cards import Card
from cb_rollout.tools.bench.roofline.steps import Rows, Shape, Step, Traced, plain_sampling
from cb_rollout.tools.bench.roofline.vllm_kernels import LayerSizes, moving, product

# Returns a decode step: of these rows, truncated by top-p or not.
Decode = Callable[[Rows, bool], Traced]

FUSED = "norms, rotations, writes and activations fused, products joined"

# Kernels of a layer that its fusions leave as they are.
ATTENTION = ("attend_kernel", "join_kernel")

# Times that a kernel reads the logits: once for the draw, where a maximum and sums of chunks are
# carried along; and for top-p to search its threshold besides.
PLAIN_READS, TOP_P_READS = 1, 4


def optimizations(
    decode: Decode, shape: Shape, rows: Rows, card: Card
) -> dict[str, dict[str, float]]:
    """Return the modelled milliseconds of a step today, and with each optimization.

    Args:
        decode: traces a step of the card.
        shape: arguments of `AutoConfig.for_model`.
        rows: the sequences.
        card: runs the step.
    """
    plain, truncated = decode(rows, False), decode(rows, True)
    sizes = LayerSizes.of(shape)
    without_sampling = Traced(Step(graphed=truncated.step.graphed), plain.layer, plain.num_layers)
    sampled = _sampled(without_sampling, sizes, rows, PLAIN_READS)
    sampled_top_p = _sampled(without_sampling, sizes, rows, TOP_P_READS)
    # The first of each group is the step today.
    groups: list[dict[str, Step]] = [
        {
            "as it is": plain.step,
            FUSED: _fused(plain, sizes, rows).step,
            "sampling in one kernel": sampled.step,
            "both": _fused(sampled, sizes, rows).step,
        },
        {
            "top-p, as it is": truncated.step,
            "top-p in one kernel, inside the graph": sampled_top_p.step,
        },
    ]
    return {
        name: {
            "launches": step.num_launches,
            "milliseconds": 1e3 * card.step_seconds(step),
            "percent_saved": 100 * (1 - card.step_seconds(step) / today),
        }
        for group in groups
        for today in [card.step_seconds(next(iter(group.values())))]
        for name, step in group.items()
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


def _sampled(traced: Traced, sizes: LayerSizes, rows: Rows, num_reads: int) -> Traced:
    """Return a step whose graph samples in two kernels."""
    logits = rows.num_rows * sizes.vocab
    # The logits stay in bfloat16.
    (cast,) = (k for k in traced.step.graphed if k.name == "_to_copy" and k.num_bytes == 6 * logits)
    chosen = Counter([moving("sampling", num_reads * logits), moving("tokens", 16 * rows.num_rows)])
    (kept,) = (k for k in traced.step.graphed if k.name == "copy_" and k.num_bytes == 8 * logits)
    step = traced.step.plus(Step(graphed=Counter([cast, kept])), -1)
    step = step.plus(plain_sampling(rows, sizes.vocab), -1).plus(Step(graphed=chosen))
    return traced._replace(step=step)
