"""Sample plain rows by a C++ kernel, in one pass over the logits, as `draw.sample` does.

A plain row has no truncation, no logits processors and no `top_logprobs`. Called by the thread that
steps the engine.

B: rows, V: vocabulary, K: tokens that are never sampled.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cb_rollout.compat import inductor
from cb_rollout.engine.numerics.native.library import COUNT, TENSOR, library
from cb_rollout.errors import error_text

_LOGGER = logging.getLogger(__name__)


def prepare() -> None:
    """Compile the kernel, if there is a compiler."""
    _kernel()


def can_sample(logits_BV: torch.Tensor) -> bool:
    """Return whether the kernel takes these logits on this machine."""
    is_kind = logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32
    return is_kind and _kernel() is not None


def sample_plain(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    seeds_B: torch.Tensor,
    indices_B: torch.Tensor,
    never_sampled_K: torch.Tensor | None = None,
    *,
    is_processed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's next token id (int64) and natural log-probability (float32), `[B]`.

    `can_sample(logits_BV)` is True. Temperatures are float32; at 0 the most likely token is taken,
    its log-probability at temperature 1. Seeds, indices (tokens that each row has sampled) and
    distinct `never_sampled_K` are int64. `is_processed`: log-probabilities are of the tokens that
    can be sampled, else of the vocabulary. A row without a distribution gets NaN and an arbitrary
    token.
    """
    B, V = logits_BV.shape
    # The last product of a trace is stored by columns.
    logits_BV = logits_BV.contiguous()
    token_ids_B, logprobs_B = seeds_B.new_empty(B), logits_BV.new_empty(B)
    kernel = _kernel()
    assert kernel is not None, "can_sample is False"
    kernel(
        logits_BV.data_ptr(),
        B,
        V,
        None if never_sampled_K is None else never_sampled_K.data_ptr(),
        0 if never_sampled_K is None else len(never_sampled_K),
        is_processed,
        temperatures_B.data_ptr(),
        seeds_B.data_ptr(),
        indices_B.data_ptr(),
        token_ids_B.data_ptr(),
        logprobs_B.data_ptr(),
    )
    return token_ids_B, logprobs_B


@cache
def _kernel() -> Callable[..., Any] | None:
    if inductor.compiler_obstacle():
        return None
    try:
        kernel = library("sample", STORED="float").sample
    except Exception as error:  # noqa: BLE001  torch's operators do the same
        _LOGGER.warning(
            "tokens are sampled by torch's operators, not a kernel: %s", error_text(error)
        )
        return None
    kernel.argtypes = (TENSOR, *[COUNT] * 2, TENSOR, *[COUNT] * 2, *[TENSOR] * 5)
    kernel.restype = None
    return kernel
