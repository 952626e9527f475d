"""Choose the data set rows of a trainer's batch by a strategy.

TRL fixes a batch's prompts before it generates. A strategy samples groups ahead, of the sampler's
next rows: the trainer scores those that were complete first. Or it replaces scored groups without
an advantage: the trainer generates and scores others.

Each data-parallel process samples ahead by itself, of its own share of the sampler's rows. Groups
that a process has to spare after scoring go to the processes that lack some. Called by the trainer,
on its thread.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import OldLogps, ReleaseCache
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.ray.pool import PooledGenerator
from cb_rollout.integrations.trl import images, upstream
from cb_rollout.integrations.trl.backend import (
    GenerationBackend,
    require_backend,
    trains_split_model,
)
from cb_rollout.integrations.trl.on_policy import seam_of
from cb_rollout.integrations.trl.scoring import overrides_scoring
from cb_rollout.integrations.trl.strategies.row_queue import Example, RowQueue
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.distributed import deal
from cb_rollout.rollout.generator import measured
from cb_rollout.rollout.saved import SavedRollouts
from cb_rollout.strategies import DynamicSampling, GroupCollector, Plain, RequestStream, Strategy

# The trainer's scored batch.
Batch = dict[str, Any]

# Settings of GRPO and RLOO, with the values that make an advantage depend on other groups.
MIXES_GROUPS = (
    ("scale_rewards", "batch"),
    ("multi_objective_aggregation", "normalize_then_sum"),
    ("normalize_advantages", True),
)

# GRPO's key for the completion tokens of all processes; RLOO has none.
NUM_ITEMS = "num_items_in_batch"

# Tensors of a batch that are padded on the left; those of completions are padded on the right.
PROMPTS = ("prompt_ids", "prompt_mask")

# A collector's metrics that do not hold before the trainer has scored anything.
UNSCORED = ("rollout/groups_kept", "rollout/groups_dropped", "rollout/retries")


def use_strategy(trainer: Any, strategy: Strategy) -> None:
    """Make a GRPO or RLOO trainer sample its training batches by a strategy, not its evaluations.

    A further call replaces the strategy; `Plain()` removes it, and so does `detach`. The trainer is
    attached, and not training.

    Raises:
        ConfigurationError: TRL's batch cannot hold the strategy's groups, or a setting of the
            trainer excludes it.
    """
    backend = require_backend(trainer, "use_strategy")
    is_plain = isinstance(strategy, Plain)
    chosen = None if is_plain else TrainerStrategy(trainer, strategy, backend)
    backend.cancel_carried()
    backend.collector = chosen and chosen.groups
    backend.make_batch = chosen and chosen.generate_and_score
    backend.rows = chosen and chosen.rows


class TrainerStrategy:
    """Makes a trainer's batches of the groups that a strategy keeps."""

    def __init__(self, trainer: Any, strategy: Strategy, backend: GenerationBackend) -> None:
        _require_place(trainer, strategy, backend)
        self._trainer, self._strategy, self._backend = trainer, strategy, backend
        self.rows = RowQueue(trainer)
        self.groups: GroupCollector | None = None
        """Samples ahead of the trainer; None: the strategy submits no more than the batch."""
        if _samples_ahead(strategy):
            # The trainer's scores, which come later, decide the groups to drop.
            submissions = Strategy()
            vars(submissions).update(strategy.decisions() | {"max_dropped_groups": 0})
            self.groups = GroupCollector(
                RequestStream(backend.generator),
                self.rows,
                lambda _, outputs: [0.0] * len(outputs),
                submissions,
                num_generations=trainer.num_generations,
            )

    def generate_and_score(self, inputs: list[Example], score: Callable[..., Batch]) -> Batch:
        """Return a batch of as many groups as the trainer's `inputs`, as the strategy chooses them.

        `score` is the trainer's own generation and scoring; it takes collected groups too.
        """
        trainer, size = self._trainer, self._trainer.num_generations
        if not trainer.model.training or len(inputs) % size:
            return score(inputs)
        num_wanted = num_more = len(inputs) // size
        num_dropped = 0
        self.rows.begin_batch()
        if not self._strategy.max_dropped_groups:
            return self._scored(num_wanted, score)
        kept: list[Batch] = []
        spare: list[Batch] = []
        while True:
            batch = images.divided_images(self._scored(num_more, score))
            for group in upstream.utils.split_tensor_dict(batch, num_more):
                has_advantage = bool((group["advantages"] != 0).any())
                (kept if has_advantage else spare).append(group)
            kept, num_missing = deal(trainer.accelerator, kept, num_wanted)
            # Scoring is collective, so every process scores as many groups.
            num_each = math.ceil(num_missing / trainer.accelerator.num_processes)
            num_more = min(num_each, self._strategy.max_dropped_groups - num_dropped)
            if num_more <= 0:
                break
            num_dropped += num_more
        trainer._metrics["train"]["rollout/groups_dropped"].append(float(num_dropped))
        groups = [*kept, *spare][:num_wanted]
        batch = _merged(groups, trainer._tokenizer.pad_token_id)
        if NUM_ITEMS in groups[0]:
            num_items = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
            batch[NUM_ITEMS] = trainer.accelerator.gather(num_items).sum()
        return batch

    def _scored(self, num_groups: int, score: Callable[..., Batch]) -> Batch:
        """Score groups of the next rows, or of rows whose groups were complete first."""
        groups, backend = self.groups, self._backend
        if groups is None:
            return score(self._repeated(self.rows.take(num_groups)))
        backend.sync_if_changed()
        backend.warm_up()
        self.rows.expect(num_groups, groups.prompts_held)
        try:
            with measured(backend.generator.manager) as metrics:
                complete = groups.collect(num_groups)
        except BaseException:
            backend.release()
            raise
        assert len(complete) == num_groups, "the rows came to an end"
        self.rows.settle([group.prompt for group in complete], groups.prompts_held)
        metrics = {k: v for k, v in groups.metrics().items() if k not in UNSCORED} | metrics
        metrics |= status_metrics(backend.generator.manager.status())
        outputs = [output for group in complete for output in group.outputs]
        examples = self._repeated([group.prompt["row"] for group in complete])
        return score(examples, (outputs, metrics))

    def _repeated(self, rows: list[Example]) -> list[Example]:
        return [dict(row) for row in rows for _ in range(self._trainer.num_generations)]


def _merged(groups: Sequence[Batch], pad_token_id: int) -> Batch:
    """Join groups into one batch, each tensor padded to the widest."""
    if any(group.keys() != groups[0].keys() for group in groups):
        raise ConfigurationError(
            "dynamic sampling cannot join rows with images and rows without; give every row of the "
            "data set an image, or use Plain()."
        )
    # Without scalars, which are counted anew.
    names = [name for name, value in groups[0].items() if getattr(value, "ndim", 1)]
    return images.joined_images({name: _stacked(name, groups, pad_token_id) for name in names})


def _stacked(name: str, groups: Sequence[Batch], pad_token_id: int) -> Any:
    """Return a column of all groups, padded to the widest prompt and the widest completion."""
    values = [group[name] for group in groups]
    rows = list(chain.from_iterable(values))
    if isinstance(values[0], list):
        return rows
    if values[0].dim() == 1:
        return torch.cat(values)
    if values[0].dim() > 2 and len({tensor.shape[1:] for tensor in values}) > 1:
        raise ConfigurationError(
            f"dynamic sampling cannot join {name} of other sizes; give every row of the data set "
            "as many images, or use Plain()."
        )
    fill = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}.get(name, 0)
    if name not in images.TOKEN_TYPES:
        return upstream.utils.pad(rows, fill, "left" if name in PROMPTS else "right")
    # Of prompt and completion, each padded on its own side.
    widths = [len(ids) for group in groups for ids in group["prompt_ids"]]
    both = list(zip(rows, widths, strict=True))
    prompts = upstream.utils.pad([row[:width] for row, width in both], fill, "left")
    completions = upstream.utils.pad([row[width:] for row, width in both], fill)
    return torch.cat([prompts, completions], dim=1)


def _samples_ahead(strategy: Strategy) -> bool:
    return bool(strategy.num_extra_groups or strategy.num_extra_members or strategy.carries)


def _require_place(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> None:
    name, generator = type(strategy).__name__, backend.generator
    if isinstance(generator, SavedRollouts):
        raise refused("saved rollouts, strategy")
    if isinstance(generator, PooledGenerator):
        generator.pool.require_own("a strategy")
    if seam_of(trainer) is not None:
        raise ConfigurationError(
            f"{name} under {type(trainer).__name__}: use_strategy takes a GRPOTrainer or an "
            "RLOOTrainer; use a GroupCollector in a loop of your own."
        )
    if strategy.max_retries or strategy.min_group_size is not None:
        raise refused("strategy, retried groups", name=name, trainer=type(trainer).__name__)
    if type(strategy).keeps not in (Strategy.keeps, DynamicSampling.keeps):
        raise ConfigurationError(
            f"{name}.keeps() under {type(trainer).__name__}, which tells whether a group has an "
            "advantage and no more; leave keeps() to DynamicSampling, or use a GroupCollector in a "
            "loop of your own."
        )
    for fault in _faults(trainer, strategy, backend):
        raise refused("strategy, batch", name=name, fault=fault)
    if strategy.carries:
        corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
        if not corrects and generator.config.old_logps != OldLogps.ROLLOUT:
            raise refused("strategy, carried tokens", name=name)


def _faults(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> Iterator[str]:
    """Yield what of a trainer excludes a strategy."""
    args, num_generations = trainer.args, trainer.num_generations
    num_rows = args.per_device_train_batch_size * args.steps_per_generation
    if num_rows % num_generations:
        yield (
            f"a process's {num_rows} rows of a generation (per_device_train_batch_size x "
            f"steps_per_generation), which are no multiple of num_generations={num_generations}"
        )
    if strategy.max_dropped_groups and overrides_scoring(trainer):
        yield (
            f"{type(trainer).__name__}._generate_and_score_completions, whose rows need not stand "
            "group by group"
        )
    if trains_split_model(trainer):
        yield "a tensor-parallel model, whose processes must hold equal batches"
    if not hasattr(trainer.train_dataset, "__len__"):
        yield "a train_dataset without a length"
    loader = trainer.get_train_dataloader
    if not getattr(loader, "__module__", "").startswith("trl."):
        yield (
            f"{type(trainer).__name__}'s own get_train_dataloader, whose order of rows is unknown; "
            "override _get_train_sampler instead"
        )
    for setting, value in MIXES_GROUPS if strategy.max_dropped_groups else ():
        if getattr(trainer, setting, None) == value:
            yield f"{setting}={value!r}, which mixes groups"
    if _samples_ahead(strategy):
        yield from _faults_ahead(trainer, strategy, backend)


def _faults_ahead(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> Iterator[str]:
    """Yield what excludes groups sampled ahead."""
    # RLOO has no tools.
    for attribute in ("tools", "environment_factories"):
        if getattr(trainer, attribute, None):
            yield f"{attribute}, whose later turns begin when a batch is fixed"
    if getattr(trainer, "rollout_func", None) is not None:
        yield "rollout_func, which samples for itself"
    if backend.generator.manager.group is not None:
        yield "tensor_parallel_size above 1, whose processes take their batches together"
    if strategy.carries and backend.generator.config.release_cache == ReleaseCache.WITH_WEIGHTS:
        yield "release_cache='with_weights', after which no carried sequence could be cancelled"
