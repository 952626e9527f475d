"""Compute attention of gathered decode steps on a CPU, as two batched matrix products.

PyTorch's own kernel for a CPU makes two small products for each row and head, and each call costs
more than its work. `BatchedAttention` replaces it where the model calls `sdpa` with arguments
that it supports; the result is the same up to rounding. Called by the thread that runs a decode
step.

B: rows, H: key heads, G: queries of each key head, S: tokens of the longest row, D: size of a head.
"""

from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat

EXACT_DTYPES = (torch.float32, torch.float64)


class BatchedAttention:
    """Attend in one forward of one new token a row, in float32 or float64."""

    def __init__(self) -> None:
        self._biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        own_attention: Any,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the model's own attention function does, which computes what this cannot.

        Takes a query `[B, H x G, 1, D]`, a key `[B, H, S, D]`, a value of as many heads, and a mask
        `[B, 1, 1, S]`, True or 0 where a token is seen. Returns `[B, 1, H x G, D]`, and no weights.
        """
        B, num_heads, Q, D = query.shape
        is_supported = (
            Q == 1
            and own_attention is hf_compat.sdpa_attention()
            # In 16 bits a model's own attention rounds between its two products, and the trainer's
            # forward with it; exact products would drift from both.
            and query.dtype in EXACT_DTYPES
            and query.dtype == key.dtype == value.dtype
            and num_heads % key.shape[1] == 0
            and (attention_mask is None or attention_mask.shape == (B, 1, 1, key.shape[2]))
            and not any(kwargs.get(name) for name in ("dropout", "softcap", "cache"))
            and kwargs.get("position_bias") is None
        )
        if not is_supported:
            return own_attention(module, query, key, value, attention_mask, **kwargs)
        H, S = key.shape[1:3]
        scale = kwargs.get("scaling")
        scale = D**-0.5 if scale is None else scale
        queries, keys = query.reshape(B * H, -1, D), key.reshape(B * H, S, D).transpose(1, 2)
        if attention_mask is None:
            scores = torch.bmm(queries, keys).mul_(scale)
        else:
            bias = self._bias(attention_mask, H, query.dtype)
            scores = torch.baddbmm(bias, queries, keys, alpha=scale)
        output = torch.bmm(scores.softmax(-1), value.reshape(B * H, S, -1))
        return output.view(B, 1, num_heads, -1), None

    def _bias(
        self, mask_B11S: torch.Tensor, num_key_heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the mask to add to scores, `[B x H, 1, S]`; layers with one mask share it."""
        B, _, _, S = mask_B11S.shape
        _, bias = self._biases.get(id(mask_B11S), (None, None))
        if bias is None or bias.shape[0] != num_key_heads * B:
            bias = mask_B11S.to(dtype)
            if mask_B11S.dtype == torch.bool:
                bias = torch.zeros_like(bias).masked_fill_(~mask_B11S, -torch.inf)
            bias = bias.expand(B, num_key_heads, 1, S).reshape(-1, 1, S)
            # The mask is stored too, so that no other object gets its id.
            self._biases[id(mask_B11S)] = mask_B11S, bias
        return bias
