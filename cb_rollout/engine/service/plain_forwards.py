"""Compute log-probabilities by plain forwards, without a cache, on an engine that is paused.

Changes nothing in the engine. Called by the thread that paused it.
"""

import torch

from cb_rollout.engine.core import Engine
from cb_rollout.engine.model import runner
from cb_rollout.engine.model.check import attempt
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.numerics.agreement import is_measurable
from cb_rollout.engine.request import Request


def recomputed_logprobs(engine: Engine, request: Request) -> list[float]:
    """Return the log-probability of each sampled token, by one forward of the model that trains."""
    trained = engine.training_model.module
    with engine.runner.computing(), eval_mode(trained):
        return runner.recomputed_logprobs(engine.runner, trained, request)


def precise_logprobs(engine: Engine, request: Request) -> list[float] | None:
    """Recompute the log-probabilities in float32 or float64; None if unsupported or too slow.

    They are in float32 where the model computes in fewer bits, else in float64.
    """
    is_coarse = engine.runner.computes_coarsely
    is_quick = is_coarse or is_measurable(engine.runner.model, request.num_tokens)
    if not is_quick or engine.runner.is_bitwise or engine.runner.is_split:
        return None
    with engine.runner.computing_in(torch.float32 if is_coarse else torch.float64):
        logprobs, _ = attempt(lambda: recomputed_logprobs(engine, request))
    return logprobs


def prompt_logprobs(
    engine: Engine,
    token_ids: list[int],
    temperature: float,
    num: int,
    adapter: str | None = None,
) -> list[dict[int, tuple[float, int]]]:
    """Return the log-probabilities and ranks of the `num` likeliest tokens at each position.

    Args:
        engine: an engine that is paused.
        token_ids: of a prompt.
        temperature: divides the logits.
        num: tokens at each position, besides the prompt's own.
        adapter: a checked adapter that alone scores the prompt; None: the active adapters.

    Returns:
        For each token but the first, (log-probability, rank from 1) by token id.
    """
    with engine.runner.computing(), eval_mode(engine.model), engine.runner.under_adapter(adapter):
        return runner.prompt_logprobs(engine.runner, token_ids, temperature, num)
