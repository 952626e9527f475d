"""Check that the object which the user trains computes what the module computes that generates.

That module is the innermost one, or a copy of it. A wrapper may compute something itself, and a
copy has what the model's config says. Changes nothing. Called when an engine is made or follows
another model.
"""

from functools import partial

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import forward_of
from cb_rollout.compat.fsdp import is_sharded, write_state
from cb_rollout.compat.module_state import is_adapter, module_settings
from cb_rollout.engine.model.check import attempt, text_rows
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import (
    agrees,
    is_measurable,
    references,
    rounding_noise,
)
from cb_rollout.errors import ConfigurationError, error_text

# Short rows of text that are compared.
NUM_ROWS = 2


def check_trained_model(runner: ModelRunner, trained: torch.nn.Module) -> None:
    """Refuse a training model whose own forward is not that of the module which generates.

    Models that are sharded, that compute in another dtype than their copy, or whose adapters are
    merged in 16 bits, are left to `RolloutGenerator.verify`: a forward would need other processes,
    or rounding would hide a difference.

    Args:
        runner: runs the module that generates, checked by `check_model`.
        trained: the training model, as its trainer calls it, maybe wrapped.

    Raises:
        ConfigurationError: the two forwards differ by more than rounding, or the model's own fails.
    """
    outermost = hf_compat.trained_forward(trained)
    if outermost is runner.model or not _are_comparable(runner, trained):
        return
    rows = text_rows(runner)[:NUM_ROWS]
    if invocation := hf_compat.invocation_token_ids(trained):
        rows.append([*rows[0][:2], *invocation, *rows[0][2:]])

    with eval_mode(trained), eval_mode(runner.model):
        difference, failure = _difference(runner, trained, rows)
    if difference:
        raise ConfigurationError(_refusal(trained, difference)) from failure


def wrapper_state(trained: torch.nn.Module) -> list[object]:
    """Return a value that changes when what stands around the innermost model computes otherwise.

    Empty for a sharded model, whose forward is not checked.
    """
    if is_sharded(trained):
        return []
    inside = set(map(id, hf_compat.unwrap(trained).modules()))
    state: list[object] = []
    for module in hf_compat.trained_forward(trained).modules():
        if id(module) in inside:
            continue
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        state.append((id(module), type(module), forward_of(module), list(map(id, hooks))))
        state.append((module_settings(module), [write_state(tensor) for tensor in tensors]))
    return state


def _difference(
    runner: ModelRunner, trained: torch.nn.Module, rows: list[list[int]]
) -> tuple[str, Exception | None]:
    """Return how the trained model's forward differs, and its error; "": by rounding alone."""
    outermost = hf_compat.trained_forward(trained)

    def logprobs(model: torch.nn.Module | None = None) -> list[torch.Tensor]:
        return [runner.plain_logits(row, model).log_softmax(-1) for row in rows]

    own = logprobs()
    if any(logprobs_TV.isnan().any() for logprobs_TV in own):
        # Diverged weights show nothing.
        return "", None
    through_wrappers, failure = attempt(lambda: logprobs(outermost))
    if through_wrappers is None:
        return f"fails ({error_text(failure)})", failure
    if all(map(torch.equal, own, through_wrappers)):
        # So it is as a rule, and the rounding need not be measured.
        return "", None
    if hf_compat.unwrap(trained) is not runner.model:
        # The weights of a copy were rounded, so a higher precision would show another model.
        noise = rounding_noise(own, None, runner.rounding_dtype)
        agreements = iter([agrees(through_wrappers, own, noise)])
    else:
        expected = references(
            logprobs,
            runner.rounding_dtype,
            runner.computing_in,
            is_coarse=runner.computes_coarsely,
            is_measured=is_measurable(runner.model, sum(map(len, rows))),
        )
        computed = partial(logprobs, outermost)
        agreements = (reference.compare(computed, runner.computing_in) for reference in expected)
    for agreement in agreements:
        if not agreement:
            return f"differs by {agreement}", None
    return "", None


def _are_comparable(runner: ModelRunner, trained: torch.nn.Module) -> bool:
    """Return whether both forwards can run here, and differ by no more than rounding if equal."""
    if is_sharded(trained) or runner.is_split:
        return False
    inner = hf_compat.unwrap(trained)
    first, copied = next(inner.parameters()), next(runner.model.parameters())
    if first.dtype != copied.dtype or first.device != copied.device:
        return False
    is_merged = inner is not runner.model and any(map(is_adapter, inner.modules()))
    return not (is_merged and runner.computes_coarsely)


def _refusal(trained: torch.nn.Module, difference: str) -> str:
    """Return the text of the error; `difference` says what the trained model's forward does."""
    outermost = hf_compat.trained_forward(trained)
    inner = hf_compat.unwrap(trained)
    if outermost is inner:
        return (
            "the copy of the weights computes other log-probabilities than the training "
            f"{type(inner).__name__}, whose forward {difference}; use weight_sync='shared'."
        )
    return (
        f"rollouts run the {type(inner).__name__} inside the {type(outermost).__name__} that "
        f"trains, whose own forward {difference}: the wrapper computes something itself, as PEFT's "
        "does for aLoRA and X-LoRA. Use an adapter that lives inside the model's layers, or "
        "model.generate."
    )
