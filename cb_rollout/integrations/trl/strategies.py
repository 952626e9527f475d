"""Strategies under a stock trainer: which rows of its data set a training batch is made of.

TRL fixes a batch's prompts before it generates. What is done about it has two steps, of which a
strategy needs one or both. Groups are sampled ahead, of the batch's rows and of others, and the
trainer generates and scores a batch of the rows whose groups were complete first, and is given
those completions. And what has no advantage then is replaced: the trainer generates and scores
once more, and whole groups of that go into the batch. Knows the trainer by its attributes only.
"""

from typing import Any

from cb_rollout.config.enums import OldLogps
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import TrainerHooks, TrainerRollouts
from cb_rollout.integrations.trl.collector import (
    Batch,
    Example,
    TrainerCollector,
    groups_of,
    merged,
    other_rows,
)
from cb_rollout.strategies import DynamicSampling, Plain, Strategy

STRATEGY = "_cb_rollout_strategy"
# The trainer's attribute that holds what was put between it and its batches.


def use_strategy(trainer: Any, strategy: Strategy) -> None:
    """Have a `GRPOTrainer` sample its training batches as a strategy says; evaluation stays.

    A further call replaces the strategy, `Plain()` takes it away, and so does `detach`.

    Args:
        trainer: not training. Attached, or else the strategy submits no more than it keeps.
        strategy: `OverSampling`, `DynamicSampling`, `PartialRollouts`, one that combines them, or
            `Plain`.

    Raises:
        ConfigurationError: TRL's batch has no place for the strategy, or the trainer's settings
            have none.
    """
    if not isinstance(strategy, Plain):
        _require_place(trainer, strategy)
    drop_strategy(trainer)
    if not isinstance(strategy, Plain):
        TrainerStrategy(trainer, strategy).hook()


def drop_strategy(trainer: Any) -> None:
    """Take away what `use_strategy` put there, if it did; what is carried is cancelled."""
    used = vars(trainer).get(STRATEGY)
    if used is not None:
        used.close()


class TrainerStrategy:
    """Stands in for a trainer's `_generate_and_score_completions`."""

    def __init__(self, trainer: Any, strategy: Strategy) -> None:
        """Change nothing yet."""
        self._trainer, self._strategy = trainer, strategy
        self._hooks = TrainerHooks(trainer)
        self._generate_and_score = trainer._generate_and_score_completions
        self._others = other_rows(trainer)
        self._rollouts = _rollouts(trainer)
        self._collector: TrainerCollector | None = None
        if _samples_ahead(strategy):
            generator = self._rollouts.generator
            self._collector = TrainerCollector(trainer, generator, strategy, self._others)

    def hook(self) -> None:
        """Take the method's place."""
        self._hooks.put("_generate_and_score_completions", self.generate_and_score)
        self._hooks.put(STRATEGY, self)
        if self._collector is not None:
            self._rollouts.collector = self._collector.groups

    def close(self) -> None:
        """Give the place back."""
        self._hooks.restore()
        if self._collector is not None:
            self._rollouts.end_carried()
            self._rollouts.collector = None

    def generate_and_score(self, inputs: list[Example]) -> Batch:
        """A batch of as many groups as the trainer wants, of rows that the strategy chose."""
        trainer, size = self._trainer, self._trainer.num_generations
        if not trainer.model.training or len(inputs) % size:
            return self._generate_and_score(inputs)
        rows = inputs[::size]
        if not self._strategy.max_dropped_groups:
            return self._scored(rows)
        num_wanted, num_dropped = len(rows), 0
        kept: list[Batch] = []
        spare: list[Batch] = []
        while True:
            for group in groups_of(self._scored(rows), size):
                has_advantage = bool((group["advantages"] != 0).any())
                (kept if has_advantage else spare).append(group)
            num_missing = num_wanted - len(kept)
            num_more = min(num_missing, self._strategy.max_dropped_groups - num_dropped)
            if num_more <= 0:
                break
            num_dropped += num_more
            rows = [next(self._others) for _ in range(num_more)]
        trainer._metrics["train"]["rollout/groups_dropped"].append(float(num_dropped))
        return merged([*kept, *spare][:num_wanted], trainer._tokenizer.pad_token_id)

    def _scored(self, rows: list[Example]) -> Batch:
        """A batch of one group for each row, or of others that were complete before."""
        if self._collector is None:
            return self._generate_and_score(self._repeated(rows))
        self._rollouts.sync_once_a_step()
        try:
            collected = self._collector.collect(rows)
        except BaseException:
            self._rollouts.release()
            raise
        with self._rollouts.collected(collected.outputs, collected.figures):
            return self._generate_and_score(self._repeated(collected.rows))

    def _repeated(self, rows: list[Example]) -> list[Example]:
        return [dict(row) for row in rows for _ in range(self._trainer.num_generations)]


def _rollouts(trainer: Any) -> Any:
    """What is attached to the trainer; None: nothing."""
    rollouts = getattr(trainer, "vllm_generation", None)
    return rollouts if isinstance(rollouts, TrainerRollouts) else None


def _samples_ahead(strategy: Strategy) -> bool:
    return bool(strategy.num_extra_groups or strategy.num_extra_members or strategy.carries)


def _require_place(trainer: Any, strategy: Strategy) -> None:
    """Refuse what TRL's batch cannot hold, or these settings would make wrong."""
    name = type(strategy).__name__
    if not hasattr(trainer, "multi_objective_aggregation"):
        raise ConfigurationError(
            f"{name} under {type(trainer).__name__}: use_strategy takes a GRPOTrainer; use a "
            "GroupCollector in a loop of your own."
        )
    if strategy.max_retries or strategy.min_group_size is not None:
        raise ConfigurationError(
            f"{name} under {type(trainer).__name__}: its batch holds num_generations completions "
            "of each prompt, and it scores them itself, so nothing can be tried again or left out; "
            "use a GroupCollector in a loop of your own, or AsyncGRPOTrainer with AsyncRollouts."
        )
    if type(strategy).keeps not in (Strategy.keeps, DynamicSampling.keeps):
        raise ConfigurationError(
            f"{name}.keeps() under {type(trainer).__name__}: what is known of a group there is "
            "whether it has an advantage; leave keeps() to DynamicSampling, or use a "
            "GroupCollector in a loop of your own."
        )
    faults = {
        "several processes, whose batches would come to differ": trainer.accelerator.num_processes
        > 1,
        "a train_dataset without a length": not hasattr(trainer.train_dataset, "__len__"),
    }
    if strategy.max_dropped_groups:
        faults |= {
            "scale_rewards='batch', which mixes groups": trainer.scale_rewards == "batch",
            "multi_objective_aggregation='normalize_then_sum', which mixes groups": (
                trainer.multi_objective_aggregation != "sum_then_normalize"
            ),
        }
    if _samples_ahead(strategy):
        several = "whose later turns begin when a batch is fixed"
        faults |= {
            f"tools, {several}": bool(trainer.tools),
            f"environments, {several}": trainer.environment_factories is not None,
            "rollout_func, which samples for itself": trainer.rollout_func is not None,
            "a trainer that is not attached (call attach first)": _rollouts(trainer) is None,
        }
    for fault, is_so in faults.items():
        if is_so:
            raise ConfigurationError(
                f"{name} does not go with {fault}; use Plain(), or change that."
            )
    if strategy.carries:
        config = _rollouts(trainer).generator.config
        corrects = trainer.vllm_importance_sampling_correction
        if not corrects and config.old_logps == OldLogps.TRAINER:
            raise ConfigurationError(
                f"{name} carries tokens of older policies, and with "
                "vllm_importance_sampling_correction=False the loss would take them for its own; "
                "leave that True, or set old_logps='rollout'."
            )
