"""Attention over a prefix tree for trl 1.16's AsyncGRPOTrainer, on any device.

TRL's own is a kernel that is downloaded and runs on some GPUs only. Each segment of the tree
attends to the path from the root to itself. TRL also asks CUDA for the device's name, to report a
share of its peak; without a GPU that is switched off here.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.async_grpo.upstream import async_grpo_trainer

# The name under which trl 1.16 registers its own; the trainer's model is made with it.
TREE_ATTENTION = "tree_fa3"


def adapt_trainers() -> None:
    """Let trainers that are made from now on run without CUDA, on every process."""
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

    Q, K: tokens of a segment and of its path; H: heads; D: head size.

    Args:
        module: the attention layer, which is not read.
        query: (1, H, N, D).
        key: (1, KV heads, N, D).
        value: as `key`.
        attention_mask: not read: the segments say what is attended to.
        tree_kv_index: packed positions of every segment's path, end to end; int.
        tree_cu_seqlens_q: (S + 1), the ends of the segments in the row, from 0; int.
        tree_cu_seqlens_k: (S + 1), the ends of the paths in `tree_kv_index`, from 0; int.
        scaling: multiplies the scores; None: 1 / sqrt(D).
        sliding_window: most tokens that a token attends to, itself included; None: all.
        softcap: refused where it is set.

    Returns:
        (1, N, H, D), and None for the weights.
    """
    del module, attention_mask
    if softcap:
        raise ConfigurationError(
            f"attention softcap {softcap:g} in training without FlashAttention 3; train this model "
            "on a GPU that TRL's own kernel runs on."
        )
    segments = pairwise(tree_cu_seqlens_q.tolist())
    paths = pairwise(tree_cu_seqlens_k.tolist())
    outputs = []
    for (begin, end), (path_begin, path_end) in zip(segments, paths, strict=True):
        # The segment is the end of its path.
        num_before = path_end - path_begin - (end - begin)
        path_K = tree_kv_index[path_begin:path_end]
        mask_QK = torch.ones(end - begin, len(path_K), dtype=torch.bool, device=query.device)
        mask_QK = mask_QK.tril(num_before)
        if sliding_window:
            mask_QK = mask_QK.triu(num_before - sliding_window + 1)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, path_K],
                value[:, :, path_K],
                attn_mask=mask_QK,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None
