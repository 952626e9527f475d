"""How a model's own forward comes to call our attention, and nobody else's forward does.

Every model of transformers asks one class for its attention function, at every layer of every
forward. While a thread is inside `attending()`, that class answers it with ours, which is told what
it would have found. Other threads find what they always found, and with nobody inside the class is
as transformers left it. The model and its `_attn_implementation` are never touched. Any thread.

Attention of gathered decode steps on a CPU, as two batched matrix products.

PyTorch's own kernel for a CPU makes two small products for every row and head, and the cost of each
call is more than its work. Used where a model asks for `sdpa` and gives nothing that it would not
honour; the result is the same up to rounding.

B: rows, H: key heads, G: queries of each key head, S: tokens of the longest row, D: size of a head.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.attention.backend import CPU_DTYPES

Attention = Callable[..., Any]
# Called with the function that would have been found, then with its arguments.


class _Here(threading.local):
    attend: Attention | None = None


_HERE = _Here()
_LOCK = threading.Lock()
_INSIDE: list[Attention] = []
# One entry a thread inside.
_FOUND: list[Attention] = []
# What the class had when the first thread came in; kept for a thread that is between two lookups.


def _lookup(interface: Any, implementation: str, default: Attention) -> Attention:
    found = _FOUND[-1](interface, implementation, default)
    return found if _HERE.attend is None else partial(_HERE.attend, found)


@contextmanager
def attending(attend: Attention) -> Iterator[None]:
    """Have models that this thread calls use `attend(found, module, query, key, value, ...)`."""
    assert _HERE.attend is None, "a forward within a forward"
    with _LOCK:
        if not _INSIDE:
            _FOUND[:] = [hf_compat.swap_attention_lookup(_lookup)]
        _INSIDE.append(attend)
    _HERE.attend = attend
    try:
        yield
    finally:
        _HERE.attend = None
        with _LOCK:
            _INSIDE.remove(attend)
            if not _INSIDE:
                hf_compat.swap_attention_lookup(_FOUND[-1])


def batched_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    added: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of one new token a row, for every row and key head.

    Args:
        queries: `[B x H, G, D]`.
        keys: `[B x H, S, D]`.
        values: `[B x H, S, E]`.
        added: `[B x H, 1, S]`, added to the scores: -inf hides a column; None: all are seen.
        scale: of the scores.

    Returns:
        `[B x H, G, E]`.
    """
    keys = keys.transpose(1, 2)
    if added is None:
        scores = torch.bmm(queries, keys).mul_(scale)
    else:
        scores = torch.baddbmm(added, queries, keys, alpha=scale)
    return torch.bmm(scores.softmax(-1), values)


class BatchedAttention:
    """Attends in one forward of one new token a row."""

    def __init__(self) -> None:
        """Know no mask yet."""
        self._added: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        found: Any,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the attention function that the model found, of the same arguments.

        Args:
            found: that function; called where this one does not know what it would do.
            module: the model's attention module.
            query: `[B, H x G, 1, D]`.
            key: `[B, H, S, D]`.
            value: `[B, H, S, D]`, or with heads of another size.
            attention_mask: `[B, 1, 1, S]`, True or 0 where a token is seen; None: all are.
            kwargs: what else the model says.

        Returns:
            `[B, 1, H x G, D]`, and no weights.
        """
        B, num_heads, Q, D = query.shape
        is_known = (
            Q == 1
            and found is hf_compat.sdpa_attention()
            and query.dtype in CPU_DTYPES
            and query.dtype == key.dtype == value.dtype
            and num_heads % key.shape[1] == 0
            and (attention_mask is None or attention_mask.shape == (B, 1, 1, key.shape[2]))
            and not any(kwargs.get(name) for name in ("dropout", "softcap", "cache"))
            and kwargs.get("position_bias") is None
        )
        if not is_known:
            return found(module, query, key, value, attention_mask, **kwargs)
        H, S = key.shape[1:3]
        scale = kwargs.get("scaling")
        scale = D**-0.5 if scale is None else scale
        added = None
        if attention_mask is not None:
            added = self._added_to_scores(attention_mask, H, query.dtype)
        output = batched_attention(
            query.reshape(B * H, -1, D),
            key.reshape(B * H, S, D),
            value.reshape(B * H, S, -1),
            added,
            scale,
        )
        return output.view(B, 1, num_heads, -1), None

    def _added_to_scores(
        self, mask_B11S: torch.Tensor, num_key_heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The mask as `[B x H, 1, S]` to be added, made once for all the layers that share it."""
        known = self._added.get(id(mask_B11S))
        if known is None or known[1].shape[0] != num_key_heads * mask_B11S.shape[0]:
            added = mask_B11S.to(dtype)
            if mask_B11S.dtype == torch.bool:
                added = torch.zeros_like(added).masked_fill_(~mask_B11S, -torch.inf)
            B, S = mask_B11S.shape[0], mask_B11S.shape[3]
            spread = added.expand(B, num_key_heads, 1, S).reshape(-1, 1, S)
            # The mask is kept too, so that its id stays its own.
            known = self._added[id(mask_B11S)] = (mask_B11S, spread)
        return known[1]
