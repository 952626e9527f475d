"""What this machine can do at most, and what it is."""

import platform
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

import cb_rollout
from cb_rollout.tools.bench.model import matmul_parameters
from cb_rollout.tools.bench.turns import timed
from cb_rollout.tools.bench.workload import Workload

PACKAGES = ("torch", "transformers", "trl", "triton", "flash_attn")
# Whose versions decide what is measured.


def matmul_flops(model: Qwen3ForCausalLM, num_rows: int) -> float:
    """Operations per second of a layer's largest matrix product, with so many rows."""
    layer: Any = model.model.layers[0]
    weight = layer.mlp.up_proj.weight.detach()
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    seconds = best_seconds(lambda: functional.linear(rows, weight), 200)
    return 2 * num_rows * weight.numel() / seconds


def bandwidth(num_bytes: int, device: str) -> float:
    """Bytes per second of a large copy, counting those read and those written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source)) for _ in range(8)]
    return 2 * num_bytes / statistics.median(times[3:])


def best_seconds(work: Callable[[], object], count: int) -> float:
    """Of one call, in the best of five runs of `count`."""

    def many() -> None:
        for _ in range(count):
            work()

    many()
    return min(timed(many) for _ in range(5)) / count


def needed_flops(model: Qwen3ForCausalLM, workload: Workload) -> int:
    """Operations of the matrix products that a workload cannot do without.

    Each different prompt is computed once, and so is each completion but for its last token.
    """
    body, head = matmul_parameters(model)
    prompts = {tuple(prompt) for prompt in workload.prompts}
    num_decoded = workload.num_tokens - len(workload.prompts)
    num_tokens = sum(map(len, prompts)) + num_decoded
    return 2 * (body * num_tokens + head * (len(prompts) + num_decoded))


def describe(device: str) -> dict[str, Any]:
    """The machine, the day, and the versions of what ran."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if "cuda" in device else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()}
        | {package: found for package in PACKAGES if (found := _version(package))}
        | {"cb_rollout": cb_rollout.__version__},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
