"""What this machine can do at most: matrix products at the decode shapes, and copies."""

from typing import Any

from benches.machine import bandwidth, matmul_flops
from benches.model import create_model, matmul_parameters
from benches.sizes import Setup


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
    }
