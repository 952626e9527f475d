"""The matmul bound: the speed of a workload if only its matrix products took time."""

from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from cb_rollout.tools.bench.timing import best_seconds
from cb_rollout.tools.bench.workload import Workload


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Return the linear layers, the head included."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def matmul_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Return the parameters that multiply every token, and the head's, which multiply the last."""
    head = model.lm_head.weight.numel()
    return sum(layer.weight.numel() for layer in linear_layers(model)) - head, head


def matmul_flops(model: PreTrainedModel, num_rows: int) -> float:
    """Return the operations per second of a layer's largest product with `num_rows` rows."""
    layer: Any = model.model.layers[0]
    weight = layer.mlp.up_proj.weight.detach()
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    seconds = best_seconds(lambda: functional.linear(rows, weight), 200)
    return 2 * num_rows * weight.numel() / seconds


def needed_flops(model: PreTrainedModel, workload: Workload) -> int:
    """Return the operations of the matrix products that a workload needs at least.

    Each distinct prompt is computed once, and each completion except for its last token.
    """
    body, head = matmul_parameters(model)
    prompts = {tuple(prompt) for prompt in workload.prompts}
    num_decoded = workload.num_tokens - len(workload.prompts)
    num_tokens = sum(map(len, prompts)) + num_decoded
    return 2 * (body * num_tokens + head * (len(prompts) + num_decoded))
