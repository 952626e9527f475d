"""A trainer's scored batch, taken apart into groups and put together from groups.

Knows the names of TRL 1.16's tensors, and nothing of where they come from.

Groups sampled ahead of a trainer's batch, by a strategy that submits more than it keeps.

The trainer asks for completions of prompts that it chose; here the prompts are chosen by which
groups were complete first. Owns where prompts come from: the trainer's batch, then other rows of
its data set. Called by the trainer, on its thread; knows it by its attributes only.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.run import measured, standing
from cb_rollout.strategies import GroupCollector, RequestStream, Strategy
from cb_rollout.types import GenerationOutput

Batch = dict[str, Any]

LEFT_PADDED = ("prompt_ids", "prompt_mask")
# Every other tensor of a batch is padded on the right.


def groups_of(batch: Batch, size: int) -> list[Batch]:
    """A batch as one batch a group."""
    num_rows = len(batch["advantages"])
    unknown = [
        name
        for name, value in batch.items()
        if not (_is_scalar(value) or _has_rows(value, num_rows))
    ]
    if unknown:
        raise ConfigurationError(
            f"dynamic sampling cannot divide a batch that holds {', '.join(unknown)}; use Plain()."
        )
    return [
        {k: v if _is_scalar(v) else v[i : i + size] for k, v in batch.items()}
        for i in range(0, num_rows, size)
    ]


def merged(groups: Sequence[Batch], pad_token_id: int) -> Batch:
    """Groups as one batch, each tensor padded to the widest."""
    batch = {
        name: _stacked(name, [group[name] for group in groups], pad_token_id)
        for name, value in groups[0].items()
        if not _is_scalar(value)
    }
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return batch | {"num_items_in_batch": mask.sum()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor | list) and len(value) == num_rows


def _stacked(name: str, values: list[Any], pad_token_id: int) -> Any:
    if isinstance(values[0], list):
        return [row for rows in values for row in rows]
    if values[0].dim() == 1:
        return torch.cat(values)
    width = max(tensor.shape[1] for tensor in values)
    fill = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    padded = []
    for tensor in values:
        missing = width - tensor.shape[1]
        sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
        padded.append(torch.nn.functional.pad(tensor, sides, value=fill.get(name, 0)))
    return torch.cat(padded)


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
            RequestStream(generator),
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
