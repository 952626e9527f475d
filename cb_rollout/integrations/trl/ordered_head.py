"""Give TRL's fused head the log-probabilities that rollouts with `numerics="bitwise"` report.

TRL 1.16 sums a vocabulary's exponentials tile by tile. Here the values come from the function that
the sampler calls, and the gradients from TRL's own. Called by the thread that trains.

N: tokens, H: hidden size, V: vocabulary.
"""

from typing import Any

import torch
from torch.nn import functional

from cb_rollout.compat.patching import CountedPatch
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.integrations.trl import upstream

# TRL 1.16's autograd function of the head.
FUSED_HEAD = "_ChunkedLogProbFunction"

# Tokens whose logits exist at a time.
CHUNK_TOKENS = 1024


class OrderedHead:
    """Stands for TRL's autograd function."""

    @staticmethod
    def apply(
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:
        """Return the same as TRL's function; its first output is the log-probabilities, (N,).

        Args:
            hidden_NH: hidden states before the head, floating point.
            weight_VH: the head's weight.
            bias_V: the head's bias; None: it has none.
            targets_N: token ids to score, int64.
            temperature: divides the logits.
            chunk_size: tokens whose logits TRL computes at a time.
            softcap: bound of the logits, by a tanh; None: there is none.
            logit_scale: multiplies the logits.
            outputs: names of what TRL's function returns besides log-probabilities.
        """
        # An autograd function takes no keywords.
        theirs_N, *others = HEAD.own.apply(
            hidden_NH,
            weight_VH,
            bias_V,
            targets_N,
            temperature,
            chunk_size,
            softcap,
            logit_scale,
            outputs,
        )
        hidden_chunks = hidden_NH.split(CHUNK_TOKENS)
        target_chunks = targets_N.split(CHUNK_TOKENS)
        ours = []
        with torch.no_grad():
            for chunk_NH, chunk_targets_N in zip(hidden_chunks, target_chunks, strict=True):
                # As transformers 5.23 computes logits.
                logits_NV = functional.linear(chunk_NH, weight_VH, bias_V)
                if logit_scale != 1:
                    logits_NV = logits_NV * logit_scale
                if softcap is not None:
                    logits_NV = torch.tanh(logits_NV / softcap) * softcap
                ours.append(chosen_logprobs(logits_NV.float() / temperature, chunk_targets_N))
        return (_WithGradientOf.apply(theirs_N, torch.cat(ours)), *others)


class _WithGradientOf(torch.autograd.Function):
    """Return the second argument; pass gradients to the first."""

    @staticmethod
    def forward(ctx: Any, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
        return ours.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return *grad_outputs, None


HEAD = CountedPatch(upstream.utils, FUSED_HEAD, OrderedHead)
