"""Attention over a prefix tree for trl 1.16's AsyncGRPOTrainer, on any device.

TRL's own is a kernel that is downloaded and runs on some GPUs only. Each segment of the tree
attends to the path from the root to itself. TRL also asks CUDA for the device's name, to report a
share of its peak; without a GPU that is switched off here.
"""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.async_grpo.upstream import async_grpo_trainer

# The name under which trl 1.16 registers its own; the trainer's model is made with it.
TREE_ATTENTION = "tree_fa3"


def adapt_trainers() -> None:
    """Let trainers that are made from now on run without CUDA, on every process.

    They register this attention for their kernel, and report no share of a device's peak.
    """
    module: Any = async_grpo_trainer
    module.get_peak_flops_per_device = lambda accelerator, dtype: None
    module.register_tree_attention = partial(
        AttentionInterface.register, TREE_ATTENTION, plain_tree_attention
    )


def plain_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend N packed tokens in S segments, each to the path from the root to itself.

    `query` is (1, H, N, D); `key` and `value` are (1, KV heads, N, D). `tree_cu_seqlens_q`,
    (S + 1), are the ends of the segments in the row, from 0. `tree_kv_index` are packed positions
    of every segment's path, end to end, and `tree_cu_seqlens_k`, (S + 1), the ends of the paths.
    Q, K: longest segment and path; H: heads; D: head size.

    Returns:
        (1, N, H, D), and None for the weights.
    """
    del module, attention_mask
    if softcap:
        raise ConfigurationError(
            f"attention softcap {softcap:g} in training without FlashAttention 3; train this model "
            "on a GPU that TRL's own kernel runs on."
        )
    q_at_SQ, is_query_SQ = _padded_ranges(tree_cu_seqlens_q)
    k_at_SK, is_key_SK = _padded_ranges(tree_cu_seqlens_k)
    offset_S1 = (is_key_SK.sum(1) - is_query_SQ.sum(1)).unsqueeze(1)
    position_SQ = offset_S1 + torch.arange(q_at_SQ.shape[1], device=query.device)
    distance_SQK = position_SQ.unsqueeze(2) - torch.arange(k_at_SK.shape[1], device=query.device)
    mask_SQK = (distance_SQK >= 0) & is_key_SK.unsqueeze(1)
    if sliding_window:
        mask_SQK &= distance_SQK < sliding_window
    # The gradient of a row that attends to nothing is NaN.
    mask_SQK[..., 0] |= ~is_query_SQ
    path_SK = tree_kv_index[k_at_SK]
    output_SHQD = scaled_dot_product_attention(
        query[0][:, q_at_SQ].transpose(0, 1),
        key[0][:, path_SK].transpose(0, 1),
        value[0][:, path_SK].transpose(0, 1),
        attn_mask=mask_SQK.unsqueeze(1),
        scale=scaling,
        enable_gqa=True,
    )
    return output_SHQD.transpose(1, 2)[is_query_SQ].unsqueeze(0), None


def _padded_ranges(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each range between two ends as a row of indices, and a mask of those in the range."""
    starts, lengths = ends[:-1].long(), ends.long().diff()
    offsets = torch.arange(int(lengths.max()), device=ends.device)
    is_inside = offsets < lengths.unsqueeze(1)
    return torch.where(is_inside, starts.unsqueeze(1) + offsets, 0), is_inside
