"""What was changed on a trainer, so that it can be put back.

Owns nothing of what the changes mean.

A generator for a trainer's model, as the trainer's own settings would have it.

Knows the trainer by its attributes only.

A trainer's generation backend, and the figures of what it rolled out.

Called by the trainer, on its thread. Knows the trainer by its attributes only.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cb_rollout.config.enums import ReleaseCache
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.metrics.run_records import Mode
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.strategies import GroupCollector

_ABSENT = object()


class TrainerHooks:
    """Attributes of a trainer that stand in for its own, and what they stand in for."""

    def __init__(self, trainer: Any) -> None:
        """Change nothing yet."""
        self._trainer = trainer
        self._before: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Set an attribute of the trainer; of several values for one name, the last stands."""
        own = vars(self._trainer)
        self._before.setdefault(name, own.get(name, _ABSENT))
        setattr(self._trainer, name, value)

    def restore(self) -> None:
        """Give the trainer back every attribute that it had, and none that it had not."""
        for name, value in self._before.items():
            if value is _ABSENT:
                vars(self._trainer).pop(name, None)
            else:
                setattr(self._trainer, name, value)
        self._before.clear()


def create_generator(trainer: Any, config: Any) -> RolloutGenerator:
    """A generator of the trainer's model, tokenizer, seed and sampling.

    Raises:
        ConfigurationError: the trainer's settings, or these, cannot be honoured.
    """
    generator = RolloutGenerator(
        trainer.model,
        as_trainers_config(config, trainer.args.seed),
        tokenizer=trainer.processing_class,
        generation_config=trainer.generation_config,
        accelerator=trainer.accelerator,
        optimizer=_optimizer(trainer),
    )
    _require_room(trainer, generator)
    return generator


def _optimizer(trainer: Any) -> Any:
    """What will step the model: the optimizer, where it exists, or its name."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    chosen = getattr(trainer, "optimizer_cls_and_kwargs", None)
    return trainer.args.optim if chosen is None else chosen[0].__name__


def _require_room(trainer: Any, generator: RolloutGenerator) -> None:
    """Refuse completions that leave the model, or the cache, no room for a prompt."""
    limits = generator.manager.input_processor.limits
    length = trainer.args.max_completion_length
    for limit, holder in (
        (limits.max_positions, "the model takes"),
        (limits.max_cached_tokens(), "the KV cache holds"),
    ):
        if limit is not None and length >= limit:
            raise ConfigurationError(
                f"max_completion_length={length} leaves no room for a prompt: {holder} at most "
                f"{limit} tokens of one sequence; lower it in the trainer's config."
            )


class TrainerRollouts:
    """What the trainer takes for its generation backend."""

    def __init__(self, trainer: Any, generator: RolloutGenerator) -> None:
        """Stand between the two."""
        self._trainer, self.generator = trainer, generator
        self.outputs: list[GenerationOutput] = []
        """Everything sampled for the rollout in progress, or the last one, tool turns included."""
        self.collector: GroupCollector | None = None
        """Of a strategy that samples ahead of the trainer; None: its prompts, as it asks."""
        self._collected: tuple[list[GenerationOutput], dict[str, float]] | None = None
        self._turns: list[dict[str, float]] = []
        self._seconds_this_step = 0.0

    @property
    def mode(self) -> Mode:
        """What the trainer is doing."""
        return "train" if self._trainer.model.training else "eval"

    def forget_synced_step(self) -> None:
        """Have the trainer sync before it generates next, whatever its step count says."""
        self._trainer._last_loaded_step = -1

    def sync_weights(self) -> None:
        """Called by the trainer once per optimizer step, before it generates."""
        self.generator.follow(self._trainer.model_wrapped)
        self.generator.sync_weights()

    def sync_once_a_step(self) -> None:
        """Sync as the trainer does before it generates (trl 1.16), where it has not yet."""
        step = self._trainer.state.global_step
        if step != self._trainer._last_loaded_step:
            self.sync_weights()
            self._trainer._last_loaded_step = step

    @contextmanager
    def collected(
        self, outputs: list[GenerationOutput], figures: dict[str, float]
    ) -> Iterator[None]:
        """Give `outputs`, sampled already, for the prompts that the trainer asks for inside."""
        self._collected = outputs, figures
        try:
            yield
        finally:
            self._collected = None

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion of every prompt, in order.

        Args:
            prompts: token ids; TRL has repeated each `num_generations` times already, and equal
                ones are computed once.
            images: must be None.
            num_generations: not needed.
            profiler: entered while generating.

        Returns:
            Prompt ids, completion ids, and for each token a list with the sampled one's
            log-probability, and a list with its id.
        """
        if images is not None:
            raise InvalidRequestError("images are not supported; train on text, or use vLLM.")
        with profiler or nullcontext():
            outputs = self.sample(prompts)
        completions = [output.generated_tokens for output in outputs]
        logprobs = [[[logprob] for logprob in output.logprobs] for output in outputs]
        return prompts, completions, logprobs, [[[t] for t in tokens] for tokens in completions]

    def sample(
        self, prompts: list[list[int]], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """One completion of every prompt, in order, as a part of the rollout in progress."""
        if self._collected is not None:
            (outputs, figures), self._collected = self._collected, None
            assert [output.prompt_ids for output in outputs] == prompts, "collected for others"
        else:
            outputs, figures = self._generated(prompts, sampling_params), self.generator.metrics()
        self.outputs += outputs
        self._turns.append(figures)
        return outputs

    def sample_alone(
        self, prompts: list[list[int]], sampling_params: SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """As `sample`, for a trainer that does not know of this: a rollout of its own, synced."""
        self.sync_once_a_step()
        self.begin_rollout()
        try:
            return self.sample(prompts, sampling_params)
        finally:
            self.end_rollout()

    def _generated(
        self, prompts: list[list[int]], sampling_params: SamplingParams | None
    ) -> list[GenerationOutput]:
        try:
            batch = self.generator.generate_batch(prompts, sampling_params=sampling_params)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{error} Filter such prompts out of the data set; max_new_tokens is the trainer's "
                "max_completion_length."
            ) from error
        return list(batch.values())

    def begin_rollout(self) -> None:
        """Another rollout starts, of one turn or, with tools, several."""
        self.outputs.clear()
        self._turns.clear()

    def end_rollout(self) -> None:
        """Log the figures where the trainer's own are; give the KV memory back where wanted."""
        if self._turns:
            figures = _combined(self._turns)
            for name, value in figures.items():
                self._trainer._metrics[self.mode][name].append(value)
            if self.mode == "train":
                self._seconds_this_step += figures["rollout/seconds"]
        self.release()

    def release(self) -> None:
        """Give the KV memory back where wanted, and keep what is carried from running on."""
        if self.generator.config.release_cache == ReleaseCache.BETWEEN_STEPS:
            self.generator.sleep()
        self.hold_carried()

    def hold_carried(self) -> None:
        """Keep sequences that are carried into the next step still: their weights may change."""
        if self.collector is not None and self.collector.num_in_flight:
            self.generator.sleep()

    def end_carried(self) -> None:
        """Cancel sequences that are carried: no step will come for them."""
        if self.collector is not None:
            self.collector.close()
            self.release()

    def end_step(self, seconds: float) -> None:
        """Log which share of an optimizer step of `seconds` went into rollouts."""
        self._trainer._metrics["train"]["rollout/step_share"].append(
            min(1.0, self._seconds_this_step / seconds)
        )
        self._seconds_this_step = 0.0


SUMMED = (
    *("seconds", "tokens", "prefill_tokens", "prefill_tokens_saved", "preemptions"),
    *("drafted_tokens", "accepted_tokens"),
)
AVERAGED = ("log_kept_mass", "kept_tokens")
# How the figures of a rollout's turns make those of the rollout; of the others the largest counts.


def _combined(turns: list[dict[str, float]]) -> dict[str, float]:
    """The figures of a rollout, by metric name, from those of its turns."""
    figures: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.items():
            figures[name] = max(value, figures.get(name, value))
    for name in SUMMED:
        figures[f"rollout/{name}"] = sum(turn[f"rollout/{name}"] for turn in turns)
    num_tokens, seconds = figures["rollout/tokens"], figures["rollout/seconds"]
    figures["rollout/tokens_per_second"] = num_tokens / seconds if seconds else 0.0
    for name in (f"rollout/{name}" for name in AVERAGED):
        if name in figures:
            weighed = sum(turn[name] * turn["rollout/tokens"] for turn in turns)
            figures[name] = weighed / num_tokens
    return figures
