"""Dynamic sampling under a stock trainer: groups without an advantage are replaced in its batch.

TRL fixes a batch's prompts before it generates, so a strategy cannot return other groups there.
What can be done is to have the trainer generate and score once more, for other prompts of its own
data set, and to put whole groups of that into the batch. Tools, environments and corrections then
work as in any batch. Knows the trainer by its attributes only.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies import DynamicSampling, Plain, Strategy

Batch = dict[str, Any]

LEFT_PADDED = ("prompt_ids", "prompt_mask")
# Every other tensor of a batch is padded on the right.


def use_strategy(trainer: Any, strategy: Strategy) -> None:
    """Have a `GRPOTrainer` sample its training batches as a strategy says; evaluation stays.

    Args:
        trainer: attached or not, not yet training.
        strategy: `DynamicSampling`, or `Plain`, which changes nothing.

    Raises:
        ConfigurationError: TRL's batch has no place for the strategy, or the trainer's settings
            have none for dynamic sampling.
    """
    if isinstance(strategy, Plain):
        return
    if type(strategy) is not DynamicSampling or strategy.num_extra_groups:
        raise ConfigurationError(
            f"{strategy} under {type(trainer).__name__}: TRL fixes the prompts of a batch before "
            "it generates, so only DynamicSampling() without extra groups has a place there; use a "
            "GroupCollector in a loop of your own, or AsyncGRPOTrainer with AsyncRollouts."
        )
    _require_settings(trainer)
    trainer._generate_and_score_completions = _replacing(
        trainer, strategy, trainer._generate_and_score_completions
    )


def _require_settings(trainer: Any) -> None:
    faults = {
        "several processes, whose batches would come to differ": trainer.accelerator.num_processes
        > 1,
        "scale_rewards='batch', which mixes groups": trainer.scale_rewards == "batch",
        "multi_objective_aggregation='normalize_then_sum', which mixes groups": (
            trainer.multi_objective_aggregation != "sum_then_normalize"
        ),
        "a train_dataset without a length": not hasattr(trainer.train_dataset, "__len__"),
    }
    for fault, is_so in faults.items():
        if is_so:
            raise ConfigurationError(
                f"dynamic sampling does not go with {fault}; use Plain(), or change that."
            )


def _replacing(
    trainer: Any, strategy: Strategy, generate_and_score: Callable[[list[Any]], Batch]
) -> Callable[[list[Any]], Batch]:
    """`generate_and_score`, called again for other rows while groups have no advantage."""
    others = _other_rows(trainer)

    def generate_and_score_and_replace(inputs: list[Any]) -> Batch:
        size = trainer.num_generations
        if not trainer.model.training or len(inputs) % size:
            return generate_and_score(inputs)
        num_wanted, num_dropped = len(inputs) // size, 0
        kept: list[Batch] = []
        spare: list[Batch] = []
        rows = inputs
        while True:
            for group in _groups(generate_and_score(rows), size):
                has_advantage = bool((group["advantages"] != 0).any())
                (kept if has_advantage else spare).append(group)
            num_missing = num_wanted - len(kept)
            num_more = min(num_missing, strategy.max_dropped_groups - num_dropped)
            if num_more <= 0:
                break
            num_dropped += num_more
            rows = [dict(row) for _ in range(num_more) for row in [next(others)] * size]
        trainer._metrics["train"]["rollout/groups_dropped"].append(float(num_dropped))
        return _merged([*kept, *spare][:num_wanted], trainer)

    return generate_and_score_and_replace


def _other_rows(trainer: Any) -> Iterator[dict[str, Any]]:
    """Rows of the trainer's data set, in an order of their own, again and again."""
    draws = random.Random(trainer.args.seed)
    while True:
        order = list(range(len(trainer.train_dataset)))
        draws.shuffle(order)
        for index in order:
            yield trainer.train_dataset[index]


def _groups(batch: Batch, size: int) -> list[Batch]:
    """A batch as one batch a group."""
    num_rows = len(batch["advantages"])
    unknown = [
        name
        for name, value in batch.items()
        if not isinstance(value, torch.Tensor) or (value.dim() and len(value) != num_rows)
    ]
    if unknown:
        raise ConfigurationError(
            f"dynamic sampling cannot divide a batch that holds {', '.join(unknown)}; use Plain()."
        )
    return [
        {k: v[i : i + size] if v.dim() else v for k, v in batch.items()}
        for i in range(0, num_rows, size)
    ]


def _merged(groups: list[Batch], trainer: Any) -> Batch:
    """Groups as one batch, each tensor padded to the widest."""
    batch = {
        name: _stacked(name, [group[name] for group in groups], trainer._tokenizer.pad_token_id)
        for name, value in groups[0].items()
        if value.dim()
    }
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return batch | {"num_items_in_batch": mask.sum()}


def _stacked(name: str, tensors: list[torch.Tensor], pad_token_id: int) -> torch.Tensor:
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    fill = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    padded = []
    for tensor in tensors:
        missing = width - tensor.shape[1]
        sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
        padded.append(torch.nn.functional.pad(tensor, sides, value=fill.get(name, 0)))
    return torch.cat(padded)
