"""Groups sampled ahead of a trainer's batch, by a strategy that submits more than it keeps.

The trainer asks for completions of prompts that it chose; here the prompts are chosen by which
groups were complete first. Owns where prompts come from: the trainer's batch, then other rows of
its data set. Called by the trainer, on its thread; knows it by its attributes only.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cb_rollout.generator import RolloutGenerator
from cb_rollout.rollout import measured, standing
from cb_rollout.strategies import Flight, GroupCollector, Strategy
from cb_rollout.types import GenerationOutput

Example = dict[str, Any]
# A row of the data set.

LOGGED = (
    "rollout/useful_tokens_per_second",
    "rollout/tokens_discarded",
    "rollout/groups_cancelled",
    "rollout/groups_carried",
    "rollout/staleness_mean",
    "rollout/staleness_max",
)
# A collector's figures that hold before the trainer has scored anything.


class Collected(NamedTuple):
    """What was complete first."""

    rows: list[Example]
    """Of the data set, one a group."""
    outputs: list[GenerationOutput]
    """The groups' completions, group after group."""
    figures: dict[str, float]


class TrainerCollector:
    """A collector whose groups the trainer scores."""

    def __init__(
        self,
        trainer: Any,
        generator: RolloutGenerator,
        strategy: Strategy,
        others: Iterator[Example],
    ) -> None:
        """Take rows from `others` when the trainer's own have all been submitted."""
        self._trainer, self._generator, self._others = trainer, generator, others
        self._offered: deque[Example] = deque()
        self.groups = GroupCollector(
            Flight(generator),
            self._prompts(),
            _scored_later,
            FirstComplete(strategy),
            num_generations=trainer.num_generations,
        )

    def collect(self, rows: Sequence[Example]) -> Collected:
        """As many groups as there are `rows`, of those and of others."""
        self._offered.extend(rows)
        with measured(self._generator.manager) as figures:
            groups = self.groups.collect(len(rows))
        found = self.groups.metrics()
        figures |= {name: found[name] for name in LOGGED}
        figures |= standing(self._generator.manager.engine)
        outputs = [output for group in groups for output in group.outputs]
        return Collected([group.prompt["row"] for group in groups], outputs, figures)

    def _prompts(self) -> Iterator[Example]:
        while True:
            row = self._offered.popleft() if self._offered else next(self._others)
            (ids,), _, _ = self._trainer._tokenize_prompts([row["prompt"]])
            yield {"prompt": list(ids), "row": row}


class FirstComplete(Strategy):
    """What a strategy submits, cancels and carries; what it drops is for after the scoring."""

    def __init__(self, strategy: Strategy) -> None:
        """Take these over."""
        self.num_extra_groups = strategy.num_extra_groups
        self.num_extra_members = strategy.num_extra_members
        self.carries = strategy.carries
        self.max_staleness = strategy.max_staleness


def other_rows(trainer: Any) -> Iterator[Example]:
    """Rows of the trainer's data set, in an order of their own, again and again."""
    draws = random.Random(trainer.args.seed)
    while True:
        order = list(range(len(trainer.train_dataset)))
        draws.shuffle(order)
        for index in order:
            yield trainer.train_dataset[index]


def _scored_later(prompt: Any, outputs: list[GenerationOutput]) -> list[float]:
    """No reward yet: the trainer gives them."""
    del prompt
    return [0.0] * len(outputs)
