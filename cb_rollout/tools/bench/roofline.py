"""What this machine can do at most: matrix products at the decode shapes, and copies."""

from typing import Any

import torch

from cb_rollout.tools.bench.machine import bandwidth, best_seconds, matmul_flops
from cb_rollout.tools.bench.model import create_model, linear_layers, matmul_parameters
from cb_rollout.tools.bench.products import ways_to_multiply
from cb_rollout.tools.bench.sizes import Setup

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Of a decode step.


def bench(setup: Setup) -> dict[str, Any]:
    """Rates, and the tokens per second that the matrix products alone would allow."""
    model = create_model(setup.sizes.shape, setup.device)
    flops = matmul_flops(model, setup.sizes.num_sequences)
    return {
        "machine": {
            "matmul_gflops": flops / 1e9,
            "copy_gb_per_second": bandwidth(setup.sizes.copied_bytes, setup.device) / 1e9,
            "matmul_bound_tokens_per_second": flops / (2 * sum(matmul_parameters(model))),
        }
    } | {f"linear layers of {rows} rows": _products(model, rows) for rows in ROWS}


@torch.inference_mode()
def _products(model: Any, num_rows: int) -> dict[str, float]:
    """Milliseconds of all linear layers of one forward, in each way."""
    weights = [layer.weight for layer in linear_layers(model)]
    inputs = [weight.new_ones(num_rows, weight.shape[1]) for weight in weights]
    return {
        f"{name}, milliseconds": 1e3
        * best_seconds(
            lambda way=way: [way(x, w) for x, w in zip(inputs, weights, strict=True)], 10
        )
        for name, way in ways_to_multiply(model.device).items()
    }
