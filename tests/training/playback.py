"""A rollout recorded from an attached trainer, and played back through TRL's own path.

Two trainers from equal weights that learn from the same tokens: one samples them through
cb_rollout, the other gets them where TRL would have called `generate`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import trl.trainer.grpo_trainer as grpo
from tiny import CHAT_TEMPLATE
from transformers import TrainerCallback

TOOL_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] }}"
    "{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
assert TOOL_TEMPLATE != CHAT_TEMPLATE

# A random model hardly ever ends a turn itself.
TURN_TOKENS = 6

TOOLS = {
    "max_completion_length": 70,
    "max_tool_calling_iterations": 2,
    "generation_kwargs": {"max_new_tokens": TURN_TOKENS},
}


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: any.

    Returns:
        Twice as much.
    """
    return 2 * number


class Counter:
    """An environment with a tool and a reward."""

    def reset(self, **_: Any) -> str:
        self.total = 0
        return " count"

    def add(self, number: int) -> int:
        """Adds to the total.

        Args:
            number: how much.

        Returns:
            The total.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total % 5)


def parse_any_letter_as_a_call(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = ()):
    """TRL's `parse_response`, for a model that never learned to write a call."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if tools and any(letter.isalpha() for letter in text[:2]):
        name = tools[0].__name__
        call = {"name": name, "arguments": {"number": len(text)}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def with_tools(monkeypatch: Any, tokenizer: Any) -> None:
    """Have the trainers of a test find calls in what a random model writes."""
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = "parsed by the test"
    monkeypatch.setattr(grpo, "parse_response", parse_any_letter_as_a_call)


@dataclass
class Watched(TrainerCallback):
    """What a trainer learned from, and what it made of it."""

    turns: list[list[list[int]]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    num_scoring_forwards: int = 0
    remaining: Iterator[list[list[int]]] = field(default_factory=lambda: iter(()))
    """The turns that are left to be played back."""

    def forget(self):
        self.turns, self.gradients, self.losses = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )


def watched(trainer: Any, record: Watched | None = None) -> Watched:
    """Keep what every turn sampled, each loss and gradient, and count forwards without gradient."""
    record = record or Watched()
    trainer.add_callback(record)
    generate, compute_loss = trainer._generate_single_turn, trainer.compute_loss

    def generate_and_keep(*arguments, **named):
        result = generate(*arguments, **named)
        completions = result[0] if isinstance(result, tuple) else result
        record.turns.append([list(ids) for ids in completions])
        return result

    def compute_and_keep(*arguments, **named):
        loss = compute_loss(*arguments, **named)
        record.losses.append(loss.item())
        return loss

    def count(module, arguments, named):
        if named.get("fused_lm_head") and not torch.is_grad_enabled():
            record.num_scoring_forwards += 1

    trainer._generate_single_turn = generate_and_keep
    trainer.compute_loss = compute_and_keep
    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    return record


def play_back(trainer: Any, turns: list[list[list[int]]]) -> Watched:
    """Have a trainer get recorded completions from its own generation path."""
    record = Watched()

    def generate(*_: Any, **__: Any) -> Any:
        completions = [list(ids) for ids in next(record.remaining)]
        is_rloo = not hasattr(trainer, "rollout_func")
        return completions if is_rloo else (completions, None)

    record.remaining = iter(turns)
    trainer._generate_single_turn = generate
    return watched(trainer, record)


def assert_learned_alike(ours: Watched, theirs: Watched, tolerance: float = 1e-5) -> None:
    """Equal tokens, and losses and gradients equal to float32 rounding."""
    assert ours.turns == theirs.turns
    assert len(ours.gradients) == len(theirs.gradients) > 0
    sizes = [max(float(g.abs().max()) for g in other.values()) for other in theirs.gradients]
    # Some losses add hundreds of tokens' terms that cancel, and are rounded as those are.
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=3 * tolerance)
    for own, other, size in zip(ours.gradients, theirs.gradients, sizes, strict=True):
        assert own.keys() == other.keys()
        for name, gradient in own.items():
            assert (gradient - other[name]).abs().max() <= tolerance * max(1, size), name
