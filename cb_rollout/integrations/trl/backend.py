"""Generate a trainer's completions in place of TRL's `VLLMGeneration`.

Owns the generator of an attached trainer, the context of the rollout in progress, and every
change made on the trainer, so that `close` undoes them all. Called by the trainer, on its thread.
Reads the trainer's attributes and imports no trl.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from cb_rollout.compat.transformers import tensor_parallel_group, unwrap
from cb_rollout.compat.zero3 import shards_models
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import ReleaseCache
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.memory.plan import TrainingBytes
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.integrations.ray.pool import RolloutPool
from cb_rollout.integrations.ray.pooled_generator import PooledGenerator
from cb_rollout.integrations.trl.context import RolloutContext
from cb_rollout.integrations.trl.packed_loss import LossTokens
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.metrics.run_records import Mode
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.integrations.trl.strategies import TrainerStrategy
    from cb_rollout.strategies import GroupCollector

# Any word but TRL's own "server" and "colocate", each of which has code of its own.
GENERATION_MODE = "cb_rollout"

_ABSENT = object()


class Overrides:
    """Attributes set on an object, and the values they replaced."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before: dict[str, Any] = {}

    def set(self, **values: Any) -> None:
        """Set attributes of the object."""
        own = vars(self._owner)
        for name, value in values.items():
            self._before.setdefault(name, own.get(name, _ABSENT))
            setattr(self._owner, name, value)

    def restore(self) -> None:
        """Put every attribute back, and delete those that the object did not have."""
        for name, value in self._before.items():
            if value is _ABSENT:
                vars(self._owner).pop(name, None)
            else:
                setattr(self._owner, name, value)
        self._before.clear()


def _require_whole_model(accelerator: Any) -> None:
    """Refuse a pool where processes shard the model: a pool takes whole weights from one."""
    if accelerator.num_processes > 1 and shards_models(accelerator):
        raise refused("pool, sharded trainer", num_processes=accelerator.num_processes)


def create_generator(trainer: Any, config: Any) -> RolloutGenerator | PooledGenerator:
    """Create a generator of the trainer's model, tokenizer, seed and sampling settings.

    Args:
        trainer: an on-policy trainer of TRL.
        config: what `attach` takes.

    Raises:
        ConfigurationError: a setting of the trainer, or of `config`, cannot be honoured.
    """
    count = getattr(trainer.generation_config, "num_return_sequences", None)
    if count not in (None, 1):
        raise ConfigurationError(
            f"generation_kwargs={{'num_return_sequences': {count!r}}}: the trainer repeats each "
            "prompt itself, num_generations times; take it out."
        )
    if isinstance(config, RolloutPool):
        _require_whole_model(trainer.accelerator)
        generator = PooledGenerator(config, trainer.model, trainer.generation_config)
    else:
        generator = RolloutGenerator(
            trainer.model,
            as_trainers_config(config, trainer.args.seed),
            tokenizer=trainer.processing_class,
            generation_config=trainer.generation_config,
            accelerator=trainer.accelerator,
            optimizer=_optimizer(trainer),
        )
    limits = generator.manager.limits
    name = (
        "max_completion_length"
        if hasattr(trainer.args, "max_completion_length")
        else "max_new_tokens"
    )
    length = getattr(trainer.args, name)
    for limit, holder in (
        (limits.max_positions, "the model takes"),
        (limits.max_cached_tokens(), "the KV cache holds"),
    ):
        if limit is not None and length >= limit:
            raise ConfigurationError(
                f"{name}={length} leaves no room for a prompt: {holder} at most "
                f"{limit} tokens of one sequence; lower it in the trainer's config."
            )
    return generator


def _optimizer(trainer: Any) -> Any:
    """Return the trainer's optimizer, or its class or name, which tell its memory, before it is."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    chosen = getattr(trainer, "optimizer_cls_and_kwargs", None)
    return trainer.args.optim if chosen is None else chosen[0]


def joined(generator: RolloutGenerator, turns: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one, then `generator.join()`."""

    @wraps(turns)
    def call(*arguments: Any, **named: Any) -> Any:
        result = turns(*arguments, **named)
        generator.join()
        return result

    return call


def trains_split_model(trainer: Any) -> bool:
    """Return whether the trainer's model is split over processes by tensor parallelism."""
    return tensor_parallel_group(unwrap(trainer.model)) is not None


def training_bytes(trainer: Any, config: RolloutConfig) -> TrainingBytes:
    """Return the memory that the trainer's model, gradients and optimizer hold and will take."""
    reserve = config.training_reserve_gib
    model, device = trainer.model, trainer.accelerator.device
    return TrainingMemory(model, model, device, _optimizer(trainer), reserve).bytes_now()


class GenerationBackend(TrainerCallback):
    """The trainer's `vllm_generation`: samples its completions and logs its rollout metrics.

    As a callback it follows the trainer's steps.
    """

    def __init__(
        self,
        trainer: Any,
        generator: RolloutGenerator | PooledGenerator,
        records: TrainerRecords | None = None,
        synced_step: str = "_last_loaded_step",
    ) -> None:
        """Serve a trainer.

        Args:
            trainer: changed by the caller, through `overrides`.
            generator: closed with the backend; a pool stays open.
            records: None: this process keeps none.
            synced_step: the trainer's attribute with the step at which it synced last.
        """
        self._trainer, self.generator, self.records = trainer, generator, records
        self._synced_step = synced_step
        self.overrides = Overrides(trainer)
        self.installed = ExitStack()
        """Contexts that end when the trainer is detached, beside `overrides` of its attributes."""
        self.context = RolloutContext(self._mode)
        """Of the rollout in progress, or of the last one."""
        self.strategy: TrainerStrategy | None = None
        self._is_training = False
        self._step_began = time.perf_counter()
        self._seconds_this_step = 0.0
        self._loss_began: float | None = None
        self._loss_seconds = 0.0

    @property
    def collector(self) -> "GroupCollector | None":
        """Return the collector of a strategy that samples ahead of the trainer."""
        return None if self.strategy is None else self.strategy.groups

    @property
    def _mode(self) -> Any:
        return "train" if self._trainer.model.training else "eval"

    def begin_rollout(self, **known: Any) -> RolloutContext:
        """Start the context of another rollout, with the fields that are known already."""
        self.context = RolloutContext(self._mode, **known)
        return self.context

    def log(self, metrics: Mapping[str, float], mode: Mode) -> None:
        """Log values beside the trainer's own."""
        for name, value in metrics.items():
            self._trainer._metrics[mode][name].append(value)

    def end_rollout(self) -> None:
        """Log the rollout's metrics, and release the KV memory."""
        metrics = self.context.metrics()
        self.log(metrics, self.context.mode)
        if self.context.mode == "train":
            self._seconds_this_step += metrics.get("rollout/seconds", 0.0)
        self.release()

    def forget_synced_step(self) -> None:
        """Make the trainer sync before it generates next, whatever its step count says."""
        setattr(self._trainer, self._synced_step, -1)

    def sync_weights(self) -> None:
        """Sync the trainer's weights; TRL calls this once per optimizer step."""
        self.generator.follow(self._trainer.model_wrapped)
        self.generator.sync_weights()

    def sync_once_a_step(self) -> None:
        """Sync as the trainer does before it generates (trl 1.16), unless it has already."""
        step = self._trainer.state.global_step
        if step != getattr(self._trainer, self._synced_step):
            self.sync_weights()
            setattr(self._trainer, self._synced_step, step)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Generate one completion of every prompt, in order.

        Args:
            prompts: token ids; TRL has repeated each `num_generations` times already. Equal prompts
                are prefilled once.
            images: pictures of each prompt, None or empty for one without; None: there are none.
            num_generations: not needed.
            profiler: entered while generating.

        Returns:
            Prompt ids; completion ids; for each token a list with the sampled one's
            log-probability, and a list with its id.
        """
        inputs: list[Any] = prompts if images is None else _with_images(prompts, images)
        with profiler or nullcontext():
            outputs = self.sample(inputs)
        for output, pictures in zip(outputs, images or (), strict=False):
            if pictures:
                self.context.images[output.request_id] = pictures
        completions = [output.generated_tokens for output in outputs]
        logprobs = [[[logprob] for logprob in output.logprobs] for output in outputs]
        return prompts, completions, logprobs, [[[t] for t in tokens] for tokens in completions]

    def sample(
        self, prompts: list[Any], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Sample one completion of every prompt, in order, as a part of the current rollout.

        Args:
            prompts: inputs of `generate_batch`.
            sampling_params: settings of the sampling; None: the trainer's.
        """
        context = self.context
        if context.collected is not None:
            (_, outputs, metrics), context.collected = context.collected, None
            ids = [p["prompt"] if isinstance(p, Mapping) else p for p in prompts]
            assert [output.prompt_ids for output in outputs] == ids, "collected for others"
        else:
            outputs = self._generated(prompts, sampling_params)
            metrics = self.generator.metrics()
        context.outputs += outputs
        context.turn_metrics.append(metrics)
        return outputs

    def sample_rollout(
        self, prompts: list[list[int]], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Sync, and sample a rollout of its own, for a trainer that is not attached."""
        self.sync_once_a_step()
        self.begin_rollout()
        try:
            return self.sample(prompts, sampling_params)
        finally:
            self.end_rollout()

    def _generated(
        self, prompts: list[Any], sampling_params: SamplingParams | None
    ) -> list[GenerationOutput]:
        try:
            batch = self.generator.generate_batch(prompts, sampling_params=sampling_params)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{error} Filter such prompts out of the data set; max_new_tokens is the trainer's "
                "max_completion_length."
            ) from error
        return list(batch.values())

    def release(self) -> None:
        """Hold the engine, release the KV memory if the config asks for it, pause carried ones."""
        if self._is_training:
            self.generator.lend_to_trainer()
        if self.generator.config.release_cache == ReleaseCache.BETWEEN_STEPS:
            self.generator.sleep()
        self.pause_carried()

    def pause_carried(self) -> None:
        """Pause the engine while unfinished sequences wait; the weights may change."""
        if self.collector is not None and self.collector.num_in_flight:
            self.generator.sleep()

    def cancel_carried(self) -> None:
        """Cancel carried sequences: no step will come for them."""
        if self.collector is not None:
            self.collector.close()
            self.release()

    def begin_loss(self) -> None:
        """Start the clock of a micro-batch's forward and backward pass."""
        self._loss_began = time.perf_counter()

    def log_loss(self, tokens: LossTokens, router_disagreement: float | None) -> None:
        """Log what one forward of the loss computed.

        Args:
            tokens: its tokens.
            router_disagreement: how often routers would have chosen other experts; None: they were
                never asked.
        """
        metrics = {f"rollout/{name}": float(value) for name, value in asdict(tokens).items()}
        if router_disagreement is not None:
            metrics["rollout/router_disagreement"] = router_disagreement
        self.log(metrics, self._mode)

    def close(self) -> None:
        """Put the trainer back as it was, and close the generator."""
        if self.records is not None:
            self.records.flush()
        self.cancel_carried()
        self._trainer.remove_callback(self)
        self.overrides.restore()
        self.installed.close()
        self.generator.close()

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Sync anew: the step count starts over, or goes on from a checkpoint's."""
        self.forget_synced_step()
        if self.records is not None:
            self.records.begin_training(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Sync anew, for the best weights may have been loaded at an unchanged step count.

        And cancel carried sequences, and let a server's clients be answered again.
        """
        self.forget_synced_step()
        self._is_training = False
        self.cancel_carried()
        if self.generator.config.release_cache == ReleaseCache.NEVER:
            self.generator.wake()
        if self.records is not None:
            self.records.flush()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Hold the engine until the step's rollout."""
        self._step_began = time.perf_counter()
        self._is_training = True
        self.generator.lend_to_trainer()
        self.pause_carried()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Stop the loss's clock, after the backward pass."""
        if self._loss_began is not None:
            self._loss_seconds += time.perf_counter() - self._loss_began
        self._loss_began = None

    # The last micro-batch of a step has no substep.
    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Log the share of an optimizer step that rollouts took, and the seconds of its losses."""
        seconds = time.perf_counter() - self._step_began
        metrics = {"rollout/step_share": min(1.0, self._seconds_this_step / seconds)}
        if self._loss_seconds:
            metrics["rollout/loss_seconds"] = self._loss_seconds
        self.log(metrics, "train")
        self._seconds_this_step = self._loss_seconds = 0.0

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Record the trainer's log."""
        if self.records is not None:
            self.records.write_log(state.global_step, logs or {})


def _with_images(prompts: list[list[int]], images: list[Any]) -> list[Any]:
    """Return inputs of `generate_batch`; equal neighbours are one object, which is encoded once."""
    inputs: list[Any] = []
    for index, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
        is_repeated = index and prompt == prompts[index - 1]
        if is_repeated and _are_same(pictures or [], images[index - 1] or []):
            inputs.append(inputs[-1])
        else:
            inputs.append({"prompt": prompt, "images": pictures} if pictures else prompt)
    return inputs


def _are_same(pictures: list[Any], others: list[Any]) -> bool:
    """Return whether PIL images have the same pixels; of other types only one object is the same.

    A data set decodes a picture anew for each repeat of its row.
    """
    return len(pictures) == len(others) and all(
        one is other or (hasattr(one, "mode") and one == other)
        for one, other in zip(pictures, others, strict=True)
    )
