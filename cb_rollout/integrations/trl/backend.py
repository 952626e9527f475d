"""Generate a trainer's completions in place of TRL's `VLLMGeneration`.

Owns the generator of an attached trainer, the context of the rollout in progress, and every
change made on the trainer, so that `close` undoes them all. Called by the trainer, on its thread.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState

from cb_rollout.compat.patching import replacing
from cb_rollout.compat.transformers import tensor_parallel_group, unwrap
from cb_rollout.config.enums import ReleaseCache
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.integrations.ray.pool import PooledGenerator, RolloutPool
from cb_rollout.integrations.trl.packed_loss import LossTokens
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import Mode
from cb_rollout.packing.logprobs import routers_of
from cb_rollout.rollout.distributed import largest_of_all
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.saved import RolloutSaver, SavedRollouts
from cb_rollout.types import GenerationOutput
from cb_rollout.weights.state import model_state

if TYPE_CHECKING:
    from cb_rollout.integrations.trl.strategies.row_queue import RowQueue
    from cb_rollout.strategies import GroupCollector

# Any word but TRL's own "server" and "colocate", each of which has code of its own.
GENERATION_MODE = "cb_rollout"

# Decode steps of a training from which on a trace is made at once. On a CPU it pays off sooner.
STEPS_WORTH_TRACE = 256

# In a checkpoint's trainer_state.json, in the form of transformers' own callbacks.
DRAWS = "cb_rollout"

# Of the metrics of a rollout's turns some are added up, some averaged over the turns' tokens; of
# the others the largest counts.
SUMMED = (
    *("rollout/seconds", "rollout/tokens", "rollout/prefill_tokens", "rollout/preemptions"),
    *("rollout/prefill_tokens_saved", "rollout/images_encoded"),
)
AVERAGED = ("rollout/log_kept_mass", "rollout/kept_tokens")

Collected = tuple[list[GenerationOutput], dict[str, float]]
"""Groups that a strategy sampled before the trainer asked for them, and their metrics."""

AttachedGenerator = RolloutGenerator | PooledGenerator | SavedRollouts
"""The generators of attached trainers."""


def create_generator(trainer: Any, config: Any) -> AttachedGenerator:
    """Create a generator of the trainer's model, tokenizer, seed and sampling settings.

    Raises:
        ConfigurationError: a setting of the trainer, or of `attach`'s `config`, cannot be honoured.
    """
    count = getattr(trainer.generation_config, "num_return_sequences", None)
    if count not in (None, 1):
        raise ConfigurationError(
            f"generation_kwargs={{'num_return_sequences': {count!r}}}: the trainer repeats each "
            "prompt itself, num_generations times; take it out."
        )
    names = "max_completion_length", "max_new_tokens"
    name = next(name for name in names if hasattr(trainer.args, name))
    length = getattr(trainer.args, name)
    if length is None:
        raise ConfigurationError(f"{name}=None sets no end; give the trainer's config a number.")
    generation_config = generation_config_of(trainer)
    if isinstance(config, SavedRollouts):
        replays = config.config.router_replay
        routers = routers_of(unwrap(trainer.model)) if replays else None
        config.open(trainer.accelerator.process_index, generation_config, routers)
        return config
    if isinstance(config, RolloutPool):
        generator = PooledGenerator(config, trainer.model, generation_config)
    else:
        generator = RolloutGenerator(
            trainer.model,
            as_trainers_config(config, trainer.args.seed),
            tokenizer=trainer.processing_class,
            generation_config=generation_config,
            accelerator=trainer.accelerator,
            optimizer=_optimizer(trainer),
        )
    limits = generator.manager.limits
    holders = ("the model takes", limits.max_positions), ("a cache has", limits.max_cached_tokens())
    for holder, limit in holders:
        if limit is not None and length >= limit:
            raise ConfigurationError(
                f"{name}={length} leaves no room for a prompt: {holder} at most {limit} "
                "tokens of one sequence; lower it in the trainer's config; a cache grows with "
                "num_blocks or max_memory_percent."
            )
    return generator


def generation_config_of(trainer: Any) -> Any:
    """Return the trainer's config; what it leaves open the model's says, as in `model.generate`."""
    config = copy.deepcopy(trainer.generation_config)
    if (own := getattr(unwrap(trainer.model), "generation_config", None)) is not None:
        # Lengths are the trainer's.
        settings = {n: v for n, v in own.to_dict().items() if n not in ("max_length", "max_time")}
        config.update(**settings, defaults_only=True)
    return config


def _optimizer(trainer: Any) -> Any:
    """Return the trainer's optimizer, or its class or name, which tell its memory too."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    chosen = getattr(trainer, "optimizer_cls_and_kwargs", None)
    return trainer.args.optim if chosen is None else chosen[0]


def require_backend(trainer: Any, caller: str) -> "GenerationBackend":
    """Return the backend of a trainer, or raise `ConfigurationError` if nothing is attached."""
    if isinstance(backend := getattr(trainer, "vllm_generation", None), GenerationBackend):
        return backend
    raise ConfigurationError(
        f"{caller}: cb_rollout is not attached to this trainer; call cb_rollout.attach(trainer) "
        "first."
    )


def trains_split_model(trainer: Any) -> bool:
    """Return whether the trainer's model is split over processes by tensor parallelism."""
    return tensor_parallel_group(unwrap(trainer.model)) is not None


@dataclass
class RolloutContext:
    """State of a rollout."""

    mode: Mode
    collected: Collected | None = None
    """Completions for the next prompts that the trainer asks for; None: sample them."""
    images: dict[str, list[Any]] = field(default_factory=dict)
    """Pictures of the prompts that have any, by the request's id."""
    # Of each call of the engine.
    calls: list[list[GenerationOutput]] = field(default_factory=list)
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    has_new_settings: bool = False
    """True: the trainer's generation config is not that of the rollout before."""
    step: int = 0
    """The trainer's global step after it trained on the rollout; in evaluation, at the time."""
    rows: list[LossRow] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """One for each row, weighted and summed over the reward functions; empty: not scored."""
    all_rewards: list[float] = field(default_factory=list)
    """Those of the rows of every process, in the order of the processes."""

    @property
    def outputs(self) -> list[GenerationOutput]:
        """Everything sampled, tool turns included, in the order of the trainer's prompts."""
        return list(chain(*self.calls))

    def metrics(self) -> dict[str, float]:
        turns = self.turn_metrics
        combined: dict[str, float] = {}
        for name in dict.fromkeys(chain.from_iterable(turns)):
            having = [turn for turn in turns if name in turn]
            values = [turn[name] for turn in having]
            combined[name] = sum(values) if name in SUMMED else max(values)
            if name in AVERAGED:
                weighted = sum(turn[name] * turn["rollout/tokens"] for turn in having)
                combined[name] = weighted / sum(turn["rollout/tokens"] for turn in having)
        if seconds := combined.get("rollout/seconds"):
            combined["rollout/tokens_per_second"] = combined["rollout/tokens"] / seconds
        return combined


class GenerationBackend(TrainerCallback):
    """The trainer's `vllm_generation`: samples its completions and logs its rollout metrics.

    As a callback it follows the trainer's steps.
    """

    def __init__(
        self,
        trainer: Any,
        generator: AttachedGenerator,
        records: TrainerRecords | None = None,
        synced_step: str = "_last_loaded_step",
    ) -> None:
        """Serve a trainer, whose attribute `synced_step` holds the step at which it synced last."""
        self._trainer, self.generator, self.records = trainer, generator, records
        self._synced_step = synced_step
        self._saver: RolloutSaver | None = None
        folder, accelerator = generator.config.save_rollouts, trainer.accelerator
        if folder is not None:
            rank, num_processes = accelerator.process_index, accelerator.num_processes
            self._saver = RolloutSaver(folder, rank, num_processes)
        self.installed = ExitStack()
        self.context = RolloutContext(self._mode)
        """Of the rollout in progress, or of the last rollout."""
        self.collector: GroupCollector | None = None
        """Samples groups ahead of the trainer; None: no strategy does."""
        self.make_batch: Callable[..., dict[str, Any]] | None = None
        """Makes a batch as a strategy decides; None: the trainer's own scoring does."""
        self._generation_settings = generation_config_of(trainer).to_dict()
        """Of the trainer's generation config in the last rollout."""
        self._synced_model: list[object] = []
        """State of the training model at the last sync."""
        self.rows: RowQueue | None = None
        """The rows that a strategy takes; None: the trainer's loader hands them over."""
        self._is_training = False
        self._steps_to_come = 0
        self._step_began = time.perf_counter()
        self._seconds_this_step = 0.0
        self._loss_began: float | None = None
        self._loss_seconds = 0.0
        # A pool's engines run elsewhere, by other clocks.
        has_engine = isinstance(generator, RolloutGenerator)
        self._durations = generator.manager.durations if has_engine else Durations()

    @property
    def _mode(self) -> Any:
        return "train" if self._trainer.model.training else "eval"

    def override(self, **attributes: Any) -> None:
        """Set attributes of the trainer until it is detached."""
        values = [(self._trainer, name, value) for name, value in attributes.items()]
        self.installed.enter_context(replacing(values))

    def begin_rollout(self, collected: Collected | None = None) -> RolloutContext:
        """Begin a rollout of the trainer; all processes call it together.

        `collected`: completions that a strategy sampled for it, after a sync of its own.
        """
        self._save_rollout()
        if self._saver is not None:
            self._saver.require_own_folder()
        if collected is None:
            self._forget_sync_of_another_model()
        has_new_settings = self._follow_generation_config()
        step = self._trainer.state.global_step + (self._mode == "train")
        self.context = RolloutContext(
            self._mode, step=step, collected=collected, has_new_settings=has_new_settings
        )
        return self.context

    def _follow_generation_config(self) -> bool:
        """Sample by what the trainer's generation config says now; return whether it changed.

        TRL's own path reads it in each rollout: a callback may anneal the temperature, and an
        `evaluate` of one's own may decode greedily.
        """
        config = generation_config_of(self._trainer)
        settings = config.to_dict()
        if settings == self._generation_settings:
            return False
        self._generation_settings = settings
        if not isinstance(self.generator, SavedRollouts):
            self.generator.set_generation_config(config)
        return True

    def _save_rollout(self) -> None:
        """Save the last rollout, which the trainer has scored by now."""
        context = self.context
        if self._saver is not None and context.calls:
            rewards = {}
            # Outputs of a rollout that failed before its rewards, or that nobody scores, have none.
            if context.rewards:
                named = zip(context.rows, context.rewards, strict=True)
                rewards = {row.name: reward for row, reward in named}
            self._saver.save(context.step, context.mode, context.calls, rewards)
            context.calls = []

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Begin and end a rollout; also decorates a function, whose every call is a rollout."""
        self.begin_rollout()
        try:
            yield
        finally:
            self.end_rollout()

    def log(self, metrics: Mapping[str, float], mode: Mode) -> None:
        for name, value in metrics.items():
            self._trainer._metrics[mode][name].append(value)

    def warm_up(self) -> None:
        """Trace or compile the model before the first rollout of a training that is long enough."""
        num_steps, self._steps_to_come = self._steps_to_come, 0
        if num_steps >= STEPS_WORTH_TRACE and isinstance(self.generator, RolloutGenerator):
            self.generator.wake()
            self.generator.manager.warmup(num_steps)

    def end_rollout(self) -> None:
        metrics = self.context.metrics()
        self.log(metrics, self.context.mode)
        if self.context.mode == "train":
            self._seconds_this_step += metrics.get("rollout/seconds", 0.0)
        self.release()

    def forget_synced_step(self) -> None:
        setattr(self._trainer, self._synced_step, -1)

    def _forget_sync_of_another_model(self) -> None:
        """Have the trainer sync again if its model computes otherwise than at this step's sync.

        A callback may swap weights for an evaluation, `disable_adapter()` may stand around it, and
        a checkpoint may be loaded before it.
        """
        if self._trainer.state.global_step != getattr(self._trainer, self._synced_step):
            return
        has_changed = model_state(self._trainer.model_wrapped) != self._synced_model
        # A sync of a sharded model is of all processes.
        if largest_of_all(self._trainer.accelerator, float(has_changed)):
            self.forget_synced_step()

    def sync_weights(self) -> None:
        """Sync the trainer's weights; TRL calls it where its step is not that of the last sync."""
        self.generator.follow(self._trainer.model_wrapped)
        self.generator.sync_weights()
        self._synced_model = model_state(self._trainer.model_wrapped)

    def sync_once_a_step(self) -> None:
        """Sync as the trainer does before it generates (trl 1.16)."""
        step = self._trainer.state.global_step
        if step != getattr(self._trainer, self._synced_step):
            self.sync_weights()
            setattr(self._trainer, self._synced_step, step)

    def sync_if_changed(self) -> None:
        """Sync before a strategy samples for a rollout that begins later."""
        self._forget_sync_of_another_model()
        self.sync_once_a_step()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Generate one completion of every prompt, which TRL repeats `num_generations` times.

        Returns prompt ids; completion ids; for each token a list with the sampled one's
        log-probability, and a list with its id.
        """
        inputs: list[Any] = prompts if images is None else _with_images(prompts, images)
        with profiler or nullcontext():
            outputs = self.sample(inputs)
        if images is not None:
            for output, pictures in zip(outputs, images, strict=True):
                if pictures:
                    self.context.images[output.request_id] = pictures
        # Copies: a reward function may write into the lists that it gets.
        completions = [list(output.generated_tokens) for output in outputs]
        logprobs = [[[logprob] for logprob in output.logprobs] for output in outputs]
        return prompts, completions, logprobs, [[[t] for t in tokens] for tokens in completions]

    def sample(
        self, prompts: list[Any], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Sample one completion of every input of `generate_batch`, in the current rollout."""
        context = self.context
        if context.collected is not None:
            (outputs, metrics), context.collected = context.collected, None
            ids = [p["prompt"] if isinstance(p, Mapping) else p for p in prompts]
            assert [output.prompt_ids for output in outputs] == ids, "collected for others"
        else:
            is_main = self._trainer.accelerator.is_main_process
            bar = None if is_main and not self._trainer.args.disable_tqdm else False
            self.warm_up()
            try:
                batch = self.generator.generate_batch(
                    prompts, sampling_params=sampling_params, progress_bar=bar
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"{error} Filter such prompts out of the data set; max_new_tokens is the "
                    "trainer's max_completion_length."
                ) from error
            outputs, metrics = list(batch.values()), self.generator.metrics()
        context.calls.append(outputs)
        if metrics:
            context.turn_metrics.append(metrics)
        return outputs

    def release(self) -> None:
        """Hold the engine, and release the memory that the config says."""
        if self._is_training:
            self.generator.lend_to_trainer()
        release_cache = self.generator.config.release_cache
        if release_cache == ReleaseCache.WITH_WEIGHTS:
            self.generator.sleep(level=2)
            # The next rollout needs a sync, though it may be of the same step.
            self.forget_synced_step()
        elif release_cache == ReleaseCache.BETWEEN_STEPS:
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
        self._loss_began = time.perf_counter()

    def log_loss(self, tokens: LossTokens, router_disagreement: float | None) -> None:
        """Log the counts of a forward of the loss, and the share of experts that differ."""
        metrics = {f"rollout/{name}": float(value) for name, value in asdict(tokens).items()}
        if router_disagreement is not None:
            metrics["rollout/router_disagreement"] = router_disagreement
        self.log(metrics, self._mode)

    def close(self) -> None:
        if self.records is not None:
            self.records.flush()
        try:
            self._save_rollout()
        finally:
            self.cancel_carried()
            self._trainer.remove_callback(self)
            self.installed.close()
            self.generator.close()

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Sync again: the step count starts over, or goes on from a checkpoint's.

        A training of many decode steps traces the model in its first rollout, not in its second.
        """
        self.forget_synced_step()
        num_rollouts = state.max_steps - state.global_step
        length = self.generator.manager.defaults.max_new_tokens or 0
        self._steps_to_come = num_rollouts * length
        saved: Any = state.stateful_callbacks
        if state.global_step and DRAWS in saved:
            inputs = self.generator.manager.input_processor
            inputs.num_sequences = saved[DRAWS]["attributes"]["num_sequences"]
        if self.rows is not None:
            # A training that failed may have left some.
            self.cancel_carried()
            attributes = saved[DRAWS]["attributes"] if DRAWS in saved else {}
            self.rows.begin_training(state.global_step, attributes.get("rows"))
        if isinstance(self.generator, SavedRollouts):
            self.generator.begin_training(state.global_step)
        for recorder in (self.records, self._saver):
            if recorder is not None:
                recorder.begin_training(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Sync again, for the best weights may have been loaded at an unchanged step count."""
        self.forget_synced_step()
        self._is_training = False
        self.cancel_carried()
        if self.generator.config.release_cache == ReleaseCache.NEVER:
            # A server's clients are answered.
            self.generator.wake()
        if self.records is not None:
            self.records.flush()
        self._save_rollout()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_began = time.perf_counter()
        self._is_training = True
        self.generator.lend_to_trainer()
        self.pause_carried()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        if self._loss_began is not None:
            self._loss_seconds += self._durations.add_span("loss", self._loss_began)
        self._loss_began = None

    # The last micro-batch of a step has no substep.
    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Log the share of an optimizer step that rollouts took, and the seconds of its losses.

        A checkpoint of this step keeps the number of sequences, from which draws go on, and the
        rows that a strategy still has to train.
        """
        number = self.generator.manager.input_processor.num_sequences
        attributes: dict[str, Any] = {"num_sequences": number}
        if self.rows is not None:
            attributes["rows"] = self.rows.states()
        saved: Any = state.stateful_callbacks
        saved[DRAWS] = {"args": {}, "attributes": attributes}
        seconds = self._durations.add_span("step", self._step_began, state.global_step)
        metrics = {"rollout/step_share": min(1.0, self._seconds_this_step / seconds)}
        if self._loss_seconds:
            metrics["rollout/loss_seconds"] = self._loss_seconds
        self.log(metrics, "train")
        self._seconds_this_step = self._loss_seconds = 0.0

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        if self.records is not None:
            self.records.write_log(state.global_step, logs or {}, self._durations)


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
    """Compare objects, or pixels: a data set decodes a PIL image for each repeat of its row."""
    return len(pictures) == len(others) and all(
        picture is other or (hasattr(picture, "mode") and picture == other)
        for picture, other in zip(pictures, others, strict=True)
    )
