"""Hold the state of one rollout of a trainer, from its prompts to its scored batch.

One context is made for each rollout; the trainer's thread alone reads and writes it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cb_rollout.integrations.trl.loss_rows import LossRow
from cb_rollout.metrics.run_records import Mode
from cb_rollout.types import GenerationOutput

# Metrics of a rollout's turns that are added up; of the others the largest counts.
SUMMED = (
    *("seconds", "tokens", "prefill_tokens", "prefill_tokens_saved", "preemptions"),
    *("drafted_tokens", "accepted_tokens", "drafted_tokens_earlier", "accepted_tokens_earlier"),
    *("drafted_tokens_run", "accepted_tokens_run", "images_encoded", "images_reused"),
)
# Averaged over the turns' tokens.
AVERAGED = ("log_kept_mass", "kept_tokens")


class Collected(NamedTuple):
    """Groups that a strategy sampled before the trainer asked for them."""

    examples: list[dict[str, Any]]
    """Rows of the data set, one a group."""
    outputs: list[GenerationOutput]
    """The groups' completions, group after group."""
    metrics: dict[str, float]


@dataclass
class RolloutContext:
    """Everything known of one rollout."""

    mode: Mode
    collected: Collected | None = None
    """Completions for the next prompts that the trainer asks for; None: sample them."""
    outputs: list[GenerationOutput] = field(default_factory=list)
    """Everything sampled, tool turns included, in the order of the trainer's prompts."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Pictures of the prompts that have any, by the request's id."""
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each call of the engine, by name."""
    rows: list[LossRow] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """One for each row, weighted and summed over the reward functions."""

    def metrics(self) -> dict[str, float]:
        """Combine the metrics of the turns; empty where nothing was sampled."""
        turns, combined = self.turn_metrics, {}
        if not turns:
            return combined
        for turn in turns:
            for name, value in turn.items():
                combined[name] = max(value, combined.get(name, value))
        for name in SUMMED:
            combined[f"rollout/{name}"] = sum(turn[f"rollout/{name}"] for turn in turns)
        num_tokens, seconds = combined["rollout/tokens"], combined["rollout/seconds"]
        combined["rollout/tokens_per_second"] = num_tokens / seconds if seconds else 0.0
        for name in (f"rollout/{name}" for name in AVERAGED):
            if name in combined:
                weighted = sum(turn[name] * turn["rollout/tokens"] for turn in turns)
                combined[name] = weighted / num_tokens
        return combined
