"""Choose the data set rows of a trainer's batch by a strategy.

TRL fixes a batch's prompts before it generates. A strategy either samples groups of the sampler's
next rows ahead, and the trainer scores those that complete first. Or it replaces scored groups
without an advantage, and the trainer generates and scores others.

Each data-parallel process samples ahead independently, from its share of the sampler's rows. After
scoring, surplus groups go to processes with too few. Called by the trainer, on its thread.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import OldLogps, ReleaseCache
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl import images, upstream
from cb_rollout.integrations.trl.backend import (
    VERSION,
    GenerationBackend,
    require_backend,
    trains_split_model,
)
from cb_rollout.integrations.trl.on_policy import seam_of
from cb_rollout.integrations.trl.parts import RolloutContext, TrainerPart
from cb_rollout.integrations.trl.rows.process_state import BATCH
from cb_rollout.integrations.trl.scoring import overrides_scoring
from cb_rollout.integrations.trl.strategies.row_queue import Example, RowQueue
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.distributed import deal
from cb_rollout.rollout.generator import measured
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

# Name of the strategy's part of a process's state in a checkpoint.
STATE_KEY = "strategy"

# A collector's metrics that do not hold before the trainer has scored anything.
UNSCORED = ("rollout/groups_kept", "rollout/groups_dropped", "rollout/retries")


def use_strategy(trainer: Any, strategy: Strategy) -> None:
    """Make a GRPO or RLOO trainer sample its training batches by a strategy.

    Evaluations do not change. Another call replaces the strategy; `Plain()` or `detach` removes it.
    The trainer must be attached, and not training.

    Raises:
        ConfigurationError: TRL's batch cannot hold the strategy's groups, or a setting of the
            trainer excludes the strategy.
    """
    backend = require_backend(trainer, "use_strategy")
    chosen = None
    if not isinstance(strategy, Plain):
        chosen = TrainerStrategy(trainer, strategy, backend)
    for part in list(backend.parts):
        if isinstance(part, TrainerStrategy):
            part.close()
            backend.parts.remove(part)
    backend.make_batch = None
    if chosen is not None:
        backend.parts.append(chosen)
        backend.make_batch = chosen.generate_and_score


class _Submissions(Strategy):
    """Submits as another strategy does, but drops nothing, because the trainer scores later."""

    def __init__(self, strategy: Strategy) -> None:
        self.num_extra_groups = strategy.num_extra_groups
        self.num_extra_members = strategy.num_extra_members
        self.carries = strategy.carries
        self.max_staleness = strategy.max_staleness


class TrainerStrategy(TrainerPart):
    """Builds a trainer's batches from the groups that a strategy keeps."""

    def __init__(self, trainer: Any, strategy: Strategy, backend: GenerationBackend) -> None:
        _require_place(trainer, strategy, backend)
        self._trainer = trainer
        self._strategy = strategy
        self._backend = backend
        self.rows = RowQueue(trainer)
        self.groups: GroupCollector | None = None
        """Samples ahead of the trainer; None: the strategy submits no more than the batch."""
        self._stream = RequestStream(backend.generator)
        if _samples_ahead(strategy):
            self.groups = GroupCollector(
                self._stream,
                self.rows,
                _no_rewards,
                _Submissions(strategy),
                num_generations=trainer.num_generations,
            )

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        # A training that failed may have left unfinished sequences.
        self._cancel_carried()
        checkpoint = state or {}
        own = self._usable_state(checkpoint) if "rows" in checkpoint else None
        own_rows = None if own is None else own["rows"]
        goes_on = self.rows.begin_training(step, checkpoint.get("rows"), own_rows)
        if own is None or not goes_on or self.groups is None:
            return
        groups = dict(own["groups"])
        groups["prompts"] = [self.rows.prompt(ticket) for ticket in groups["prompts"]]
        # An evaluation at this step may have synced; a resumed run repeats that sync.
        groups[VERSION] = checkpoint[VERSION]
        self.groups.load_state_dict(groups)

    def _usable_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a checkpoint's `process_state`; None if the rows in flight are sampled again.

        Warns with the reason if groups are in flight, or could be.
        """
        own = checkpoint.get(STATE_KEY)
        if own is not None and own["strategy"] == self._identity():
            if BATCH in checkpoint or not own["is_amid_generation"]:
                return own
            reason = "the batch that was in use then is not in the checkpoint"
        elif own is None:
            reason = "the checkpoint has nothing of this process that can be read"
        else:
            reason = f"the checkpoint's strategy was {own['strategy']}, and is {self._identity()}"
        if self.groups is not None or own is not None:
            warnings.warn(
                f"{reason}: the rows that were half done are sampled again, first of all.",
                stacklevel=2,
            )
        return None

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the rows that were sampled or taken, but not trained on yet."""
        return {"rows": self.rows.states()}

    def process_state(self) -> dict[str, Any]:
        """Return this process's rows, and the full state of its groups in flight."""
        if self.groups is not None and not self._stream.has_own_engine:
            return {}
        state: dict[str, Any] = {
            "strategy": self._identity(),
            "rows": self.rows.process_state(),
            "is_amid_generation": self.rows.is_amid_generation,
        }
        if self.groups is not None:
            groups = self.groups.state_dict()
            groups["prompts"] = [prompt["ticket"] for prompt in groups["prompts"]]
            state["groups"] = groups
        return {STATE_KEY: state}

    def _identity(self) -> str:
        """Return the strategy's class and settings."""
        decisions = self._strategy.decisions()
        settings = ", ".join(f"{name}={value!r}" for name, value in decisions.items())
        return f"{type(self._strategy).__name__}({settings})"

    def begin_step(self, step: int) -> None:
        self._pause_carried()

    def end_rollout(self, context: RolloutContext, metrics: Mapping[str, float]) -> None:
        self._pause_carried()

    def begin_loss(self) -> None:
        self._pause_carried()

    def end_training(self) -> None:
        self._cancel_carried()

    def close(self) -> None:
        self._cancel_carried()

    def _pause_carried(self) -> None:
        """Pause the engine with unfinished sequences, so that the weights can change."""
        if self.groups is not None and self.groups.num_in_flight:
            self._backend.generator.sleep()

    def _cancel_carried(self) -> None:
        """Cancel unfinished sequences, because no later step will use them."""
        if self.groups is not None:
            self.groups.close()
            self._backend.release()

    def generate_and_score(self, inputs: list[Example], score: Callable[..., Batch]) -> Batch:
        """Return a batch chosen by the strategy, with as many groups as the trainer's `inputs`.

        `score` is the trainer's own generation and scoring; it also accepts collected groups.
        """
        trainer = self._trainer
        size = trainer.num_generations
        if not trainer.model.training or len(inputs) % size:
            return score(inputs)
        num_wanted = len(inputs) // size
        self.rows.begin_batch()
        if not self._strategy.max_dropped_groups:
            return self._scored(num_wanted, score)
        groups = self._groups_with_advantages(num_wanted, score)
        batch = _merged(groups, trainer._tokenizer.pad_token_id)
        if NUM_ITEMS in groups[0]:
            num_items = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
            batch[NUM_ITEMS] = trainer.accelerator.gather(num_items).sum()
        return batch

    def _groups_with_advantages(self, num_wanted: int, score: Callable[..., Batch]) -> list[Batch]:
        """Score groups until enough have an advantage, or the maximum was dropped."""
        trainer = self._trainer
        with_advantage: list[Batch] = []
        without: list[Batch] = []
        num_dropped = 0
        num_more = num_wanted
        while True:
            batch = images.divided_images(self._scored(num_more, score))
            for group in upstream.utils.split_tensor_dict(batch, num_more):
                if (group["advantages"] != 0).any():
                    with_advantage.append(group)
                else:
                    without.append(group)
            with_advantage, num_missing = deal(trainer.accelerator, with_advantage, num_wanted)
            # Scoring is collective, so every process scores as many groups.
            num_each = math.ceil(num_missing / trainer.accelerator.num_processes)
            num_more = min(num_each, self._strategy.max_dropped_groups - num_dropped)
            if num_more <= 0:
                break
            num_dropped += num_more
        trainer._metrics["train"]["rollout/groups_dropped"].append(float(num_dropped))
        return (with_advantage + without)[:num_wanted]

    def _scored(self, num_groups: int, score: Callable[..., Batch]) -> Batch:
        """Score the groups of the next rows, or of the rows whose groups completed first."""
        groups = self.groups
        backend = self._backend
        if groups is None:
            return score(self._repeated(self.rows.take(num_groups)))
        backend.sync_if_changed()
        backend.follow_generation_config()
        backend.warm_up()
        self.rows.expect(num_groups, groups.prompts_held)
        try:
            with measured(backend.generator.manager) as metrics, self._stream.stepping():
                complete = groups.collect(num_groups)
        except BaseException:
            backend.release()
            self._pause_carried()
            raise
        assert len(complete) == num_groups, "the rows came to an end"
        self.rows.settle([group.prompt for group in complete], groups.prompts_held)
        group_metrics = groups.metrics()
        for name in UNSCORED:
            group_metrics.pop(name, None)
        status = status_metrics(backend.generator.manager.status())
        outputs = []
        for group in complete:
            outputs += group.outputs
        examples = self._repeated([group.prompt["row"] for group in complete])
        return score(examples, (outputs, group_metrics | metrics | status))

    def _repeated(self, rows: list[Example]) -> list[Example]:
        """Return a copy of each row for each completion of its group."""
        repeated = []
        for row in rows:
            for _ in range(self._trainer.num_generations):
                repeated.append(dict(row))
        return repeated


def _no_rewards(_: object, outputs: Sequence[object]) -> list[float]:
    """Return zeros: the trainer scores later."""
    return [0.0] * len(outputs)


def _merged(groups: Sequence[Batch], pad_token_id: int) -> Batch:
    """Join groups into one batch, each tensor padded to the widest."""
    if any(group.keys() != groups[0].keys() for group in groups):
        raise ConfigurationError(
            "dynamic sampling cannot mix rows with and without images in a batch; give every row "
            "of the data set an image, or use Plain()."
        )
    merged = {}
    for name, value in groups[0].items():
        is_scalar = getattr(value, "ndim", None) == 0
        # Scalars are counted anew.
        if not is_scalar:
            merged[name] = _stacked(name, groups, pad_token_id)
    return images.joined_images(merged)


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
            f"dynamic sampling cannot join {name} of different sizes; give every row of the data "
            "set the same number of images, or use Plain()."
        )
    if name in images.TOKEN_TYPES:
        return _stacked_token_types(rows, groups)
    fills = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    side = "left" if name in PROMPTS else "right"
    return upstream.utils.pad(rows, fills.get(name, 0), side)


def _stacked_token_types(rows: Sequence[torch.Tensor], groups: Sequence[Batch]) -> torch.Tensor:
    """Pad a column of prompt and completion, each on its own side."""
    widths = []
    for group in groups:
        for prompt_ids in group["prompt_ids"]:
            widths.append(len(prompt_ids))
    prompts = []
    completions = []
    for row, width in zip(rows, widths, strict=True):
        prompts.append(row[:width])
        completions.append(row[width:])
    padded_prompts = upstream.utils.pad(prompts, 0, "left")
    padded_completions = upstream.utils.pad(completions, 0)
    return torch.cat([padded_prompts, padded_completions], dim=1)


def _samples_ahead(strategy: Strategy) -> bool:
    return bool(strategy.num_extra_groups or strategy.num_extra_members or strategy.carries)


def _require_place(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> None:
    name = type(strategy).__name__
    generator = backend.generator
    generator.require_strategy_support()
    if seam_of(trainer) is not None:
        raise ConfigurationError(
            f"{name} under {type(trainer).__name__}: use_strategy supports GRPOTrainer and "
            "RLOOTrainer; use a GroupCollector in your own loop."
        )
    if strategy.max_retries or strategy.min_group_size is not None:
        raise refused("strategy, retried groups", name=name, trainer=type(trainer).__name__)
    if type(strategy).keeps not in (Strategy.keeps, DynamicSampling.keeps):
        raise ConfigurationError(
            f"{name}.keeps() under {type(trainer).__name__}, which can only tell whether a group "
            "has an advantage; leave keeps() to DynamicSampling, or use a GroupCollector in your "
            "own loop."
        )
    for fault in _faults(trainer, strategy, backend):
        raise refused("strategy, batch", name=name, fault=fault)
    if strategy.carries:
        corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
        if not corrects and generator.config.old_logps != OldLogps.ROLLOUT:
            raise refused("strategy, carried tokens", name=name)


def _faults(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> Iterator[str]:
    """Yield the properties of a trainer that exclude a strategy."""
    args = trainer.args
    num_generations = trainer.num_generations
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
    for setting, value in MIXES_GROUPS:
        if strategy.max_dropped_groups and getattr(trainer, setting, None) == value:
            yield f"{setting}={value!r}, which mixes groups"
    if _samples_ahead(strategy):
        yield from _faults_ahead(trainer, strategy, backend)


def _faults_ahead(trainer: Any, strategy: Strategy, backend: GenerationBackend) -> Iterator[str]:
    """Yield the properties that exclude sampling groups ahead."""
    # RLOO has no tools.
    for attribute in ("tools", "environment_factories"):
        if getattr(trainer, attribute, None):
            yield f"{attribute}, whose later turns begin when a batch is fixed"
    if getattr(trainer, "rollout_func", None) is not None:
        yield "rollout_func, which samples for itself"
    if backend.generator.group is not None:
        yield "tensor_parallel_size above 1, whose processes take their batches together"
    if strategy.carries and backend.generator.config.release_cache == ReleaseCache.WITH_WEIGHTS:
        yield "release_cache='with_weights', after which no carried sequence could be cancelled"
