"""Recompute a sequence's log-probabilities by a plain forward, as the loss would.

Called by the thread that runs the model.

T: sampled tokens, V: vocabulary, N: all tokens, L: routers, K: experts of a token.
"""

from contextlib import nullcontext

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.routers import Replay, joined_routes
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import chosen_logprobs
from cb_rollout.engine.sampling.mask import SamplingMask, masked_logprobs


def recomputed_logprobs(
    runner: ModelRunner, model: torch.nn.Module, request: Request
) -> list[float]:
    """Return log-probabilities by a forward of the (wrapped) training `model` without a cache."""
    num_prompt = len(request.prompt_ids)
    temperature = 1.0 if request.params.is_greedy else request.params.temperature
    recorder, replaying = runner.recorder, nullcontext()
    if recorder is not None and request.routed_experts is not None:
        routers, part = recorder.routers, (request.routed_experts, 0, request.num_tokens)
        routes_NLK = joined_routes([part], routers.spec.shape, runner.device)
        assert routes_NLK is not None
        replaying = routers.replaying(hf_compat.unwrap(model), Replay(routes_NLK))
    with replaying:
        logits_NV = runner.plain_logits(
            request.token_ids, hf_compat.collective_forward(model), images=request.images
        )
    chosen_T = devices.to_device(request.token_ids[num_prompt:], runner.device)
    logits_TV = logits_NV[num_prompt - 1 : -1]
    if request.kept_token_ids:
        kept = SamplingMask.joined(request.kept_token_ids[: len(chosen_T)])
        return masked_logprobs(logits_TV, chosen_T, kept, temperature)[0].tolist()
    return chosen_logprobs(logits_TV / temperature, chosen_T).tolist()
