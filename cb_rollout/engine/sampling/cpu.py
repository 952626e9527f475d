"""Draws tokens by a C++ kernel, in one pass over the logits: what `sampler` gives, for plain rows.

B: rows, V: vocabulary.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cb_rollout.compat import inductor
from cb_rollout.engine.native.library import COUNT, TENSOR, library
from cb_rollout.errors import said

_LOGGER = logging.getLogger(__name__)


def prepare() -> None:
    """Compile the kernel, unless that was done or cannot be."""
    _kernel()


def can_sample(logits_BV: torch.Tensor) -> bool:
    """Whether the kernel takes such logits on this machine."""
    is_kind = logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32
    return is_kind and _kernel() is not None


def sample_plain(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    seeds_B: torch.Tensor,
    indices_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's next token from its whole vocabulary.

    Args:
        logits_BV: such that `can_sample`.
        temperatures_B: float32; 0: the most likely token, its log-probability at temperature 1.
        seeds_B: int64.
        indices_B: int64, how many tokens each row has sampled before.

    Returns:
        Token ids (int64) and their log-probabilities (float32, natural logarithm), `[B]` each; NaN
        where a row's logits make no distribution, and its token means nothing.
    """
    B, V = logits_BV.shape
    # A trace's last product gives them column by column.
    logits_BV = logits_BV.contiguous()
    token_ids_B, logprobs_B = seeds_B.new_empty(B), logits_BV.new_empty(B)
    kernel = _kernel()
    assert kernel is not None, "asked of a machine that cannot"
    kernel(
        logits_BV.data_ptr(),
        B,
        V,
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
        kernel = library("sample", REAL="float").sample
    except Exception as error:  # noqa: BLE001  torch's operators do the same
        _LOGGER.warning("tokens are sampled by torch's operators, not a kernel: %s", said(error))
        return None
    kernel.argtypes = (TENSOR, COUNT, COUNT, TENSOR, TENSOR, TENSOR, TENSOR, TENSOR)
    kernel.restype = None
    return kernel
