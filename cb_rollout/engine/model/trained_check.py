"""Check that the user's training object and the generating module compute the same.

The generating module is the innermost module of the training object, or a copy of it. A wrapper may
compute something itself, and a copy computes what the model's config says. Changes nothing. Called
when an engine is made or follows another model.
"""

from functools import partial

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import forward_of
from cb_rollout.compat.fsdp import is_sharded, write_state
from cb_rollout.compat.module_state import is_adapter, module_settings
from cb_rollout.engine.model.check import attempt, text_rows
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import (
    agrees,
    is_measurable,
    references,
    rounding_noise,
)
from cb_rollout.errors import ConfigurationError, error_text

# Number of short text rows that are compared.
NUM_ROWS = 2


def check_trained_model(runner: ModelRunner, trained: torch.nn.Module) -> None:
    """Refuse a training model whose forward differs from the generating module's.

    Models that are sharded, that compute in another dtype than their copy, or whose adapters are
    merged in 16 bits, are left to `RolloutGenerator.verify`: a forward would need other processes,
    or rounding would hide a difference.

    Args:
        runner: runs the module that generates, checked by `check_model`.
        trained: the training model, as its trainer calls it, maybe wrapped.

    Raises:
        ConfigurationError: the two forwards differ by more than rounding, or the model's own fails.
    """
    facts = ModelFacts.of(trained)
    if facts.outermost is runner.model or not _are_comparable(runner, facts):
        return
    rows = text_rows(runner)[:NUM_ROWS]
    invocation = hf_compat.invocation_token_ids(trained)
    if invocation:
        first = rows[0]
        rows.append(first[:2] + invocation + first[2:])

    with eval_mode(trained), eval_mode(runner.model):
        difference, failure = _difference(runner, facts, rows)
    if difference:
        raise ConfigurationError(_refusal(facts, difference)) from failure


def wrapper_state(trained: torch.nn.Module) -> list[object]:
    """Return a value that changes when the wrappers around the innermost model change.

    Empty for a sharded model, whose forward is not checked.
    """
    if is_sharded(trained):
        return []
    facts = ModelFacts.of(trained)
    inside = set(map(id, facts.module.modules()))
    state: list[object] = []
    for module in facts.outermost.modules():
        if id(module) in inside:
            continue
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        state.append((id(module), type(module), forward_of(module), list(map(id, hooks))))
        state.append((module_settings(module), [write_state(tensor) for tensor in tensors]))
    return state


def _difference(
    runner: ModelRunner, facts: ModelFacts, rows: list[list[int]]
) -> tuple[str, Exception | None]:
    """Return how the trained model's forward differs ("": only by rounding), and its error."""

    def logprobs(model: torch.nn.Module | None = None) -> list[torch.Tensor]:
        return [runner.plain_logits(row, model).log_softmax(-1) for row in rows]

    own = logprobs()
    if any(logprobs_TV.isnan().any() for logprobs_TV in own):
        # Diverged weights show nothing.
        return "", None
    through_wrappers, failure = attempt(lambda: logprobs(facts.outermost))
    if through_wrappers is None:
        return f"fails ({error_text(failure)})", failure
    if all(map(torch.equal, own, through_wrappers)):
        # This is the usual case, and the rounding need not be measured.
        return "", None
    if facts.module is not runner.model:
        # The weights of a copy were rounded, so a higher precision would show another model.
        noise = rounding_noise(own, None, runner.rounding_dtype)
        agreement = agrees(through_wrappers, own, noise)
        return "" if agreement else f"differs by {agreement}", None
    expected = references(
        logprobs,
        runner.rounding_dtype,
        runner.computing_in,
        is_coarse=runner.computes_coarsely,
        is_measured=is_measurable(runner.model, sum(map(len, rows))),
    )
    for reference in expected:
        computed = partial(logprobs, facts.outermost)
        agreement = reference.compare(computed, runner.computing_in)
        if not agreement:
            return f"differs by {agreement}", None
    return "", None


def _are_comparable(runner: ModelRunner, facts: ModelFacts) -> bool:
    """Return whether both forwards can run here, and differ by no more than rounding if equal."""
    if is_sharded(facts.given) or runner.is_split:
        return False
    trained_weight = next(facts.module.parameters())
    generating_weight = next(runner.model.parameters())
    if trained_weight.dtype != generating_weight.dtype:
        return False
    if trained_weight.device != generating_weight.device:
        return False
    is_copied = facts.module is not runner.model
    is_merged = is_copied and any(map(is_adapter, facts.module.modules()))
    return not (is_merged and runner.computes_coarsely)


def _refusal(facts: ModelFacts, difference: str) -> str:
    """Return the error's text; `difference` says how the trained model's forward differs."""
    if facts.outermost is facts.module:
        return (
            "the copy of the weights computes other log-probabilities than the training "
            f"{facts.name}, whose forward {difference}; use weight_sync='shared'."
        )
    return (
        f"rollouts run the {facts.name} inside the {type(facts.outermost).__name__} that trains, "
        f"whose own forward {difference}: the wrapper computes something itself, as PEFT's "
        "does for aLoRA and X-LoRA. Use an adapter that lives inside the model's layers, or "
        "model.generate."
    )
