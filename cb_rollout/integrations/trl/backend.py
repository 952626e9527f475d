"""Generate a trainer's completions in place of TRL's `VLLMGeneration`.

Owns the generator of an attached trainer, the context of the rollout in progress, and every
change made on the trainer, so that `close` undoes them all. Called by the trainer, on its thread.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import require_launched_together
from cb_rollout.compat.patching import replacing
from cb_rollout.config.compilation import trainer_settings
from cb_rollout.config.enums import Numerics, ReleaseCache
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.service.input_processor import ServingLimits
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.integrations.announcements import announce
from cb_rollout.integrations.interruption import ending_in_few_lines
from cb_rollout.integrations.trl.packed_loss import LossTokens
from cb_rollout.integrations.trl.parts import (
    Collected,
    FewerThreads,
    RolloutContext,
    SavingPart,
    StepTimer,
    TrainerPart,
)
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.integrations.trl.rows.process_state import (
    read_process_state,
    restore_batch,
    saved_batch,
    skip_passes,
    write_process_state,
)
from cb_rollout.metrics.observer import ObservedSpan
from cb_rollout.metrics.run_records import Mode
from cb_rollout.rollout.distributed import create_failure_watch, largest_of_all
from cb_rollout.rollout.sampler import EngineSource, Sampler, SamplerSource, TrainingRun
from cb_rollout.rollout.saved import RolloutSaver
from cb_rollout.types import GenerationOutput
from cb_rollout.weights.state import model_state

# Any word but TRL's "server" and "colocate", for each of which TRL has its own code.
GENERATION_MODE = "cb_rollout"

# Attributes with which TRL 1.16's trainers ask an engine in their process for completions.
LOADED = {"use_vllm": True, "vllm_mode": GENERATION_MODE}

# The step of the last sync, in a trainer that must sync before it generates.
NEVER_SYNCED = -1
# Metrics that are logged only from the first rollout in which they are not 0.
OF_SOME_TRAININGS = (
    "rollout/images_encoded",
    "rollout/offloaded_sequences",
    "rollout/restored_sequences",
)

# Key in a checkpoint's trainer_state.json; its value has the form of transformers' own callbacks.
DRAWS = "cb_rollout"
# Key in a sampler's `process_state`: the number of the weights that sample.
VERSION = "policy_version"


def sampler_source(config: Any) -> SamplerSource:
    """Return the source of samplers that `attach` was given, or make one from engine settings."""
    return config if hasattr(config, "sampler_for") else EngineSource(config)


def create_sampler(trainer: Any, source: SamplerSource) -> Sampler:
    """Create a sampler with the trainer's model, tokenizer, seed and sampling settings.

    Raises:
        ConfigurationError: a setting of the trainer, or of `attach`'s `config`, cannot be honoured,
            or the trainer counts fewer processes than were to be launched.
    """
    require_launched_together(trainer.accelerator.num_processes)
    count = getattr(trainer.generation_config, "num_return_sequences", None)
    if count not in (None, 1):
        raise ConfigurationError(
            f"generation_kwargs={{'num_return_sequences': {count!r}}}: the trainer itself repeats "
            "each prompt num_generations times; remove it."
        )
    name = _length_setting(trainer)
    length = getattr(trainer.args, name)
    if length is None:
        raise ConfigurationError(
            f"{name}=None leaves completions unlimited; set a number in the trainer's config."
        )
    sampler = source.sampler_for(training_run(trainer))
    if sampler.limits is not None:
        _require_room_for_prompts(name, length, sampler.limits)
    return sampler


def _length_setting(trainer: Any) -> str:
    """Return the name of the trainer's setting for the most tokens of a completion."""
    name = "max_completion_length"
    return name if hasattr(trainer.args, name) else "max_new_tokens"


def _num_decode_steps(trainer: Any) -> int | None:
    """Return the most decode steps of a training; None: epochs or a loader decide its length."""
    length = getattr(trainer.args, _length_setting(trainer), None)
    num_rollouts = getattr(trainer.args, "max_steps", None)
    if not length or num_rollouts is None or num_rollouts <= 0:
        return None
    return num_rollouts * length


def training_run(trainer: Any) -> TrainingRun:
    """Return the settings and objects of a trainer that a sampler may use."""
    return TrainingRun(
        model=trainer.model,
        tokenizer=trainer.processing_class,
        generation_config=generation_config_of(trainer),
        accelerator=trainer.accelerator,
        seed=trainer.args.seed,
        optimizer=_optimizer(trainer),
        compile_settings=trainer_settings(trainer.args),
        num_steps=_num_decode_steps(trainer),
    )


def _require_room_for_prompts(name: str, length: int, limits: ServingLimits) -> None:
    """Refuse a completion length that leaves no room for a prompt; `name` is its setting."""
    holders = {
        "the model takes": limits.max_positions,
        "the KV cache holds": limits.max_cached_tokens(),
    }
    for holder, limit in holders.items():
        if limit is not None and length >= limit:
            raise ConfigurationError(
                f"{name}={length} leaves no room for a prompt: {holder} at most {limit} tokens per "
                "sequence; lower it in the trainer's config. For a larger cache, raise num_blocks "
                "or max_memory_percent."
            )


def generation_config_of(trainer: Any) -> Any:
    """Return the trainer's generation config, with unset values taken from the model's.

    As in `model.generate`, except that `max_length` and `max_time` stay the trainer's.
    """
    config = copy.deepcopy(trainer.generation_config)
    of_model = hf_compat.generation_config_of(trainer.model)
    if of_model is None:
        return config
    settings = of_model.to_dict()
    # Lengths are the trainer's.
    for name in ("max_length", "max_time"):
        settings.pop(name, None)
    config.update(**settings, defaults_only=True)
    return config


def _optimizer(trainer: Any) -> Any:
    """Return the trainer's optimizer, or its class or name, which suffice to plan its memory."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    class_and_arguments = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if class_and_arguments is None:
        return trainer.args.optim
    optimizer_class, _ = class_and_arguments
    return optimizer_class


def require_backend(trainer: Any, caller: str) -> "GenerationBackend":
    """Return the backend of a trainer, or raise `ConfigurationError` if nothing is attached."""
    backend = getattr(trainer, "vllm_generation", None)
    if isinstance(backend, GenerationBackend):
        return backend
    raise ConfigurationError(
        f"{caller}: cb_rollout is not attached to this trainer; call cb_rollout.attach(trainer) "
        "first."
    )


def trains_split_model(trainer: Any) -> bool:
    """Return whether the trainer's model is split over processes by tensor parallelism."""
    return ModelFacts.of(trainer.model).is_split


def add_part(trainer: Any, part: TrainerPart) -> None:
    """Make an attached trainer send its events to a part, until it is detached.

    Call it after `attach` and before `trainer.train()`, also in a resumed run.

    Raises:
        ConfigurationError: nothing is attached to the trainer.
    """
    require_backend(trainer, "add_part").parts.append(part)


def log_metrics(trainer: Any, metrics: Mapping[str, float], mode: Mode = "train") -> None:
    """Add values to the next log of an attached trainer.

    For each name, the log has the mean of its values since the last log. Values that a part adds in
    `end_step` are in the log of that step.

    Args:
        trainer: an attached trainer.
        metrics: values by name.
        mode: the log of training, or of the evaluation in progress (`RolloutContext.mode`).

    Raises:
        ConfigurationError: nothing is attached to the trainer.
    """
    require_backend(trainer, "log_metrics").log(metrics, mode)


class GenerationBackend(TrainerCallback):
    """The trainer's `vllm_generation`: samples its completions and logs its rollout metrics.

    As a callback it follows the trainer's steps.
    """

    def __init__(
        self,
        trainer: Any,
        generator: Sampler,
        synced_step: str = "_last_loaded_step",
    ) -> None:
        """Serve a trainer, whose attribute `synced_step` holds the step at which it synced last."""
        self._trainer = trainer
        self.generator = generator
        self._synced_step = synced_step
        self.made_at_temperature: float = getattr(trainer, "temperature", 1.0)
        """The trainer's temperature when it was attached."""
        self.installed = ExitStack()
        self.context = RolloutContext(self._mode)
        """Context of the rollout in progress, or of the last rollout."""
        self.make_batch: Callable[..., dict[str, Any]] | None = None
        """Makes a batch as a strategy decides; None: the trainer's own scoring makes it."""
        self._timer = StepTimer(self.log, generator.durations)
        self.parts: list[TrainerPart] = [self._timer]
        """The parts that receive the trainer's events, in this order."""
        self._threads = FewerThreads()
        if self._may_vary_threads:
            self.parts.append(self._threads)
        folder = generator.config.save_rollouts
        if folder is not None:
            accelerator = trainer.accelerator
            saver = RolloutSaver(folder, accelerator.process_index, accelerator.num_processes)
            self.parts.append(SavingPart(saver))
        self._generation_settings = generation_config_of(trainer).to_dict()
        """Settings of the trainer's generation config in the last rollout."""
        self._has_new_settings = False
        """True: the settings changed, and the rollout that checks them has not begun."""
        self._synced_model: list[object] = []
        """State of the training model at the last sync."""
        self._used: set[str] = set()
        """Metrics of `OF_SOME_TRAININGS` that were not always 0."""
        self._is_training = False
        self._steps_to_come = 0
        self._process_state: dict[str, Any] = {}
        """This process's state in the checkpoint to resume from, until the training begins."""

    @property
    def _mode(self) -> Any:
        return "train" if self._trainer.model.training else "eval"

    @property
    def step_span(self) -> ObservedSpan:
        """Return the trainer's step in progress, as the observer sees it."""
        return self._timer.span

    def install(self, attributes: Mapping[str, Any]) -> None:
        """Become the trainer's `vllm_generation`, and follow its steps, until it is detached.

        Args:
            attributes: the trainer's attributes, with the values that make it ask its
                `vllm_generation`.
        """
        self.override(vllm_generation=self, **attributes)
        self.override(**{self._synced_step: NEVER_SYNCED})
        self._follow_checkpoints()
        if self._may_vary_threads:
            self.override(train=self._threads.restored_after(self._trainer.train))
        watch = create_failure_watch()
        if watch is not None:
            self.override(
                train=watch.watched()(self._trainer.train),
                evaluate=watch.watched()(self._trainer.evaluate),
            )
        if self._trainer.accelerator.is_main_process:
            train = ending_in_few_lines(self._trainer, self._trainer.train, self.write_records)
            self.override(train=train)
            announce(self._trainer, self.generator)
        self._trainer.add_callback(self)

    @property
    def _may_vary_threads(self) -> bool:
        is_bitwise = self.generator.config.numerics == Numerics.BITWISE
        return self._trainer.accelerator.device.type == "cpu" and not is_bitwise

    def _follow_checkpoints(self) -> None:
        """Write a file of each process into a checkpoint, and read it before a training resumes.

        transformers 5.23 saves and loads the states of random generators, and of the optimizer, on
        every process, before `trainer_state.json` is written and before `on_train_begin`.
        """
        trainer = self._trainer
        save, load = trainer._save_rng_state, trainer._load_optimizer_and_scheduler

        def save_with_process_state(output_dir: str) -> None:
            save(output_dir)
            self._keep_state(trainer.state)
            state = self.generator.process_state() | saved_batch(trainer)
            if VERSION in state and self._is_synced:
                # A resumed run syncs these weights again, under the same number.
                state[VERSION] -= 1
            for part in self.parts:
                _add_state(state, part.process_state(), part)
            write_process_state(output_dir, trainer, state)

        def load_with_process_state(checkpoint: str | None) -> None:
            load(checkpoint)
            if checkpoint is not None:
                self._process_state = read_process_state(checkpoint, trainer)

        self.override(
            _save_rng_state=save_with_process_state,
            _load_optimizer_and_scheduler=load_with_process_state,
        )

    def override(self, **attributes: Any) -> None:
        """Set attributes of the trainer until it is detached."""
        values = [(self._trainer, name, value) for name, value in attributes.items()]
        self.installed.enter_context(replacing(values))

    def begin_rollout(self, collected: Collected | None = None) -> RolloutContext:
        """Begin a rollout of the trainer; all processes call it together.

        `collected`: completions that a strategy sampled for this rollout, after its own sync.
        """
        if collected is None:
            self._forget_sync_of_another_model()
        self.follow_generation_config()
        has_new_settings = self._has_new_settings
        self._has_new_settings = False
        step = self._trainer.state.global_step
        if self._mode == "train":
            step += 1
        self.context = RolloutContext(
            mode=self._mode,
            step=step,
            collected=collected,
            has_new_settings=has_new_settings,
        )
        for part in self.parts:
            part.begin_rollout(self.context)
        return self.context

    def follow_generation_config(self) -> None:
        """Sample with the trainer's current generation config.

        TRL's own path reads it in each rollout: a callback may anneal the temperature, and a user's
        `evaluate` may decode greedily.
        """
        config = generation_config_of(self._trainer)
        settings = config.to_dict()
        if settings == self._generation_settings:
            return
        self._generation_settings = settings
        self.generator.set_generation_config(config)
        self._has_new_settings = True

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

    def _without_unused(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Leave out metrics that have been 0 in every rollout because their feature is unused."""
        logged: dict[str, float] = {}
        for name, value in metrics.items():
            if value and name in OF_SOME_TRAININGS:
                self._used.add(name)
            if name not in OF_SOME_TRAININGS or name in self._used:
                logged[name] = value
        return logged

    def warm_up(self) -> None:
        """Trace or compile the model before the first rollout of a training that is long enough."""
        num_steps = self._steps_to_come
        self._steps_to_come = 0
        if num_steps:
            self.generator.warm_up(num_steps)

    def end_rollout(self) -> None:
        metrics = self.context.metrics()
        self.log(self._without_unused(metrics), self.context.mode)
        self.release()
        for part in self.parts:
            part.end_rollout(self.context, metrics)

    def forget_synced_step(self) -> None:
        setattr(self._trainer, self._synced_step, NEVER_SYNCED)

    @property
    def _is_synced(self) -> bool:
        """True if the trainer will not sync again before it generates."""
        return self._trainer.state.global_step == getattr(self._trainer, self._synced_step)

    def _forget_sync_of_another_model(self) -> None:
        """Make the trainer sync again if its model changed since this step's sync.

        A callback may swap weights for an evaluation, the evaluation may run inside
        `disable_adapter()`, and a checkpoint may be loaded before it.
        """
        if not self._is_synced:
            return
        has_changed = model_state(self._trainer.model_wrapped) != self._synced_model
        # All processes must take part in the sync of a sharded model.
        if largest_of_all(self._trainer.accelerator, float(has_changed)):
            self.forget_synced_step()

    def sync_weights(self) -> None:
        """Sync the trainer's weights; TRL calls this if its step is not that of the last sync."""
        with self.step_span.within():
            self.generator.follow(self._trainer.model_wrapped)
            self.generator.sync_weights()
        self._synced_model = model_state(self._trainer.model_wrapped)

    def sync_once_a_step(self) -> None:
        """Sync as the trainer does before it generates (trl 1.16)."""
        if not self._is_synced:
            self.sync_weights()
            setattr(self._trainer, self._synced_step, self._trainer.state.global_step)

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
        completions = []
        logprobs = []
        token_ids = []
        for output in outputs:
            completions.append(list(output.generated_tokens))
            logprobs.append([[logprob] for logprob in output.logprobs])
            token_ids.append([[token] for token in output.generated_tokens])
        return prompts, completions, logprobs, token_ids

    def sample(
        self, prompts: list[Any], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Sample one completion of every input of `generate_batch`, in the current rollout."""
        context = self.context
        if context.collected is None:
            outputs = self._sampled_now(prompts, sampling_params)
            metrics = self.generator.metrics()
        else:
            outputs, metrics = context.collected
            context.collected = None
            for prompt, output in zip(prompts, outputs, strict=True):
                ids = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
                assert output.prompt_ids == ids, "collected for others"
        context.calls.append(outputs)
        if metrics:
            context.turn_metrics.append(metrics)
        return outputs

    def _sampled_now(
        self, prompts: list[Any], sampling_params: SamplingParams | None
    ) -> list[GenerationOutput]:
        trainer = self._trainer
        # None: a bar in a terminal or a notebook.
        progress_bar = None
        if trainer.args.disable_tqdm or not trainer.accelerator.is_main_process:
            progress_bar = False
        self.warm_up()
        try:
            with self.step_span.within(), self._stepping():
                batch = self.generator.generate_batch(
                    prompts,
                    sampling_params=sampling_params,
                    num_return_sequences=1,
                    progress_bar=progress_bar,
                )
                if self._is_training:
                    self.generator.lend_to_trainer()
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{error} Filter such prompts out of the data set; max_new_tokens is the "
                "trainer's max_completion_length."
            ) from error
        return list(batch.values())

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let only this thread step the engine: sequences of a strategy may be carried.

        Their progress then depends only on the rollout.
        """
        generator = self.generator.local_generator
        if generator is None:
            yield
            return
        with generator.manager.loop.stepping():
            yield

    def release(self) -> None:
        """Hold the engine, and release the memory that the config says."""
        with self.step_span.within():
            self._release()

    def _release(self) -> None:
        if self._is_training:
            self.generator.lend_to_trainer()
        release_cache = self.generator.config.release_cache
        if release_cache == ReleaseCache.WITH_WEIGHTS:
            self.generator.sleep(level=2)
            # The next rollout needs a sync, though it may be of the same step.
            self.forget_synced_step()
        elif release_cache == ReleaseCache.BETWEEN_STEPS:
            self.generator.sleep()

    def scored(self, rows: Sequence[LossRow], batch: Mapping[str, Any]) -> None:
        """Pass a batch that has its advantages to the parts; see `TrainerPart.scored`."""
        for part in self.parts:
            part.scored(self.context, rows, batch)

    def begin_loss(self) -> None:
        for part in self.parts:
            part.begin_loss()

    def computed(
        self, rows: Sequence[LossRow], logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor
    ) -> None:
        """Pass the results of a loss to the parts; see `TrainerPart.computed`."""
        for part in self.parts:
            part.computed(rows, logprobs_BT, entropies_BT)

    def log_loss(self, tokens: LossTokens, router_disagreement: float | None) -> None:
        """Log the counts of a forward of the loss, and the share of experts that differ."""
        metrics = {}
        for name, count in asdict(tokens).items():
            metrics[f"rollout/{name}"] = float(count)
        if router_disagreement is not None:
            metrics["rollout/router_disagreement"] = router_disagreement
        self.log(metrics, self._mode)

    def write_records(self) -> None:
        """Make every part write its unsaved data when a training ends before its last step."""
        for part in self.parts:
            part.interrupted()

    def close(self) -> None:
        """Close every part, give the trainer its own attributes back, and close the sampler."""
        with ExitStack() as stack:
            stack.callback(self.generator.close)
            stack.callback(self.installed.close)
            stack.callback(self._trainer.remove_callback, self)
            # The stack calls the last callback first, and all of them if one raises.
            for part in reversed(self.parts):
                stack.callback(part.close)

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **given: Any) -> None:
        """Sync again: the step count starts over, or goes on from a checkpoint's.

        A training of many decode steps traces the model in its first rollout, not in its second.
        """
        self.forget_synced_step()
        num_rollouts = state.max_steps - state.global_step
        length = self.generator.defaults.max_new_tokens or 0
        self._steps_to_come = num_rollouts * length
        saved: Any = state.stateful_callbacks
        process_state = self._process_state
        self._process_state = {}
        checkpoint_state = None
        if state.global_step > 0 and DRAWS in saved:
            checkpoint_state = saved[DRAWS]["attributes"] | process_state
        self.generator.begin_training(state.global_step, checkpoint_state)
        for part in self.parts:
            part.begin_training(state.global_step, checkpoint_state)
        if checkpoint_state is not None:
            restore_batch(self._trainer, checkpoint_state)
        if state.global_step > 0:
            skip_passes(self._trainer, given.get("train_dataloader"))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Sync again, for the best weights may have been loaded at an unchanged step count."""
        self.forget_synced_step()
        self._is_training = False
        for part in self.parts:
            part.end_training()
        if self.generator.config.release_cache == ReleaseCache.NEVER:
            # Go on answering a server's clients.
            self.generator.wake()

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._is_training = True
        self.generator.lend_to_trainer()
        for part in self.parts:
            part.begin_step(state.global_step + 1)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        for part in self.parts:
            part.end_loss()

    # The last micro-batch of a step has no substep.
    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self.step_span.set(policy_version=self.generator.policy_version)
        for part in self.parts:
            part.end_step(state.global_step)
        # With `save_only_model`, a checkpoint asks for this state only.
        self._keep_state(state)

    def on_evaluate(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        """Make a checkpoint after an evaluation continue where the evaluation ended."""
        if self._is_training:
            self._keep_state(state)

    def _keep_state(self, state: TrainerState) -> None:
        """Copy the state of the sampler and the parts into the next checkpoint."""
        attributes = dict(self.generator.checkpoint_state())
        for part in self.parts:
            _add_state(attributes, part.checkpoint_state(), part)
        saved: Any = state.stateful_callbacks
        saved[DRAWS] = {"args": {}, "attributes": copy.deepcopy(attributes)}

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        for part in self.parts:
            part.log(state.global_step, logs or {})


def _add_state(state: dict[str, Any], of_part: Mapping[str, Any], part: TrainerPart) -> None:
    """Add a part's state for a checkpoint to that of others; raise if a name is taken."""
    taken = sorted(state.keys() & of_part.keys())
    if taken:
        raise ConfigurationError(
            f"{type(part).__name__} keeps {', '.join(taken)} in a checkpoint, a name that another "
            "part or the sampler uses; choose another."
        )
    state.update(of_part)


def _with_images(prompts: list[list[int]], images: list[Any]) -> list[Any]:
    """Return inputs of `generate_batch`; equal neighbours are one object, which is encoded once."""
    inputs: list[Any] = []
    previous_prompt: list[int] = []
    previous_pictures: list[Any] = []
    for prompt, pictures_or_none in zip(prompts, images, strict=True):
        pictures = pictures_or_none or []
        is_repeated = bool(inputs) and prompt == previous_prompt
        if is_repeated and _are_same(pictures, previous_pictures):
            inputs.append(inputs[-1])
        elif pictures:
            inputs.append({"prompt": prompt, "images": pictures})
        else:
            inputs.append(prompt)
        previous_prompt = prompt
        previous_pictures = pictures
    return inputs


def _are_same(pictures: list[Any], others: list[Any]) -> bool:
    """Compare objects, or pixels: a data set decodes a PIL image for each repeat of its row."""
    if len(pictures) != len(others):
        return False
    for picture, other in zip(pictures, others, strict=True):
        has_equal_pixels = hasattr(picture, "mode") and picture == other
        if picture is not other and not has_equal_pixels:
            return False
    return True
