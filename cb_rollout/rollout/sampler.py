"""Define the port between a trainer and its sampler.

`attach(trainer, source)` asks `source.sampler_for(run)` for a `Sampler`, and depends on nothing
else of the source. There are three samplers: `AttachedGenerator`, an engine in this process;
`PooledGenerator`, workers on Ray; and `SavedRollouts`, files of an earlier training. To write
another, implement the methods of `Sampler`, and a source with `config` and `sampler_for`. The
trainer calls it on its own thread; with several processes, all call each method together.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.compilation import CompileSettings, with_compile_settings
from cb_rollout.config.enums import Numerics
from cb_rollout.config.hf import as_rollout_config, as_trainers_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.cuda_graphs.selection import COMPILED_DEVICES
from cb_rollout.engine.memory.training import OptimizerOrName
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.service.input_processor import ServingLimits
from cb_rollout.engine.service.lockstep import EngineGroup
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.packing.logprobs import packing_obstacle
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.prompts import Prompt
from cb_rollout.types import GenerationOutput, SyncReport

# A training with at least this many decode steps is traced at once. On a CPU that pays off sooner.
STEPS_WORTH_TRACE = 256

# On a GPU a compiled step saves 2 to 4 ms of a model of 0.6 to 8 billion parameters (modelled, see
# `cb-rollout bench gpu_compiled`), and compiling takes about a minute (estimated).
STEPS_WORTH_COMPILING = 20_000

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The settings and objects of a trainer that a sampler may use."""

    model: torch.nn.Module
    """The module in training, wrapped or not."""
    tokenizer: Any
    """The trainer's tokenizer, or processor."""
    generation_config: Any
    """Defaults of every request: the trainer's, then the model's own."""
    accelerator: Any
    """accelerate's `Accelerator`: rank, number of processes and precision."""
    seed: int
    """The trainer's seed, for a config without one."""
    optimizer: OptimizerOrName | None = None
    """The optimizer, its class or its name, for the memory of its states."""
    compile_settings: CompileSettings | None = None
    """Settings of the trainer's `torch_compile=True`; None: it does not compile."""
    num_steps: int | None = None
    """Largest number of decode steps in the training; None: unknown before it begins."""


class PackingFacts(NamedTuple):
    """The layouts of rows that a packed loss of a model may use."""

    obstacle: str
    """The reason why rows cannot be concatenated into one row of the input; "": they can."""
    cuts_images: Mapping[tuple[bool, bool], bool]
    """For each kind of images, whether a forward may begin between two of them."""


class Sampler(Protocol):
    """A trainer's source of completions, as the trainer sees it.

    Derive your own class from this one and override the methods that it needs. Methods without a
    described default do nothing, which is right for a sampler without its own memory or processes.
    """

    samples_current_policy: ClassVar[bool] = True
    """False if tokens may come from weights that this run never had."""

    @property
    @abstractmethod
    def config(self) -> RolloutConfig:
        """Settings of the rollout and of the loss."""

    @property
    @abstractmethod
    def defaults(self) -> SamplingParams:
        """Sampling parameters of requests that pass none."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the current weights; each `sync_weights` adds 1."""

    @property
    @abstractmethod
    def durations(self) -> Durations:
        """Durations and timeline of the run, by the clock of this process."""

    @abstractmethod
    def set_generation_config(self, generation_config: Any) -> None:
        """Set the defaults of all requests from now on."""

    @abstractmethod
    def follow(self, model: torch.nn.Module) -> None:
        """Read the weights of later syncs from `model`, which was wrapped again."""

    @abstractmethod
    def sync_weights(self) -> SyncReport:
        """Sample with the model's current weights from now on, under a new policy version."""

    @abstractmethod
    def generate_batch(
        self,
        inputs: Iterable[Prompt],
        *,
        sampling_params: SamplingParams | None = None,
        num_return_sequences: int | None = None,
        progress_bar: bool | None = False,
    ) -> Mapping[str, GenerationOutput]:
        """Sample one completion per input; TRL repeats a prompt for each member of its group.

        Args:
            inputs: token ids, or `{"prompt": token ids, "images": [...]}`.
            sampling_params: parameters of this call; None: `defaults`.
            num_return_sequences: completions per input; the trainer always asks for 1.
            progress_bar: draw a bar; None: in a terminal or a notebook.

        Returns:
            The outputs by request id, in the order of the inputs. The trainer reads their
            `prompt_ids`, `generated_tokens`, `logprobs` (natural logarithms under the policy that
            sampled), `policy_versions`, `finish_reason` and `temperature`.
        """

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout, by name."""
        return {}

    @property
    def local_generator(self) -> RolloutGenerator | None:
        """The generator of this process; None: sampling happens elsewhere."""
        return None

    @property
    def limits(self) -> ServingLimits | None:
        """Limits of a sequence's length; None: there is no limit."""
        return None

    @property
    def group(self) -> EngineGroup | None:
        """The processes that share the layers of one engine; None: layers are not split."""
        return None

    @property
    def is_joint(self) -> bool:
        """True if the other processes must roll out whenever this one does."""
        return False

    @property
    def routers(self) -> Routers | None:
        """Routers whose choices each output records, for `router_replay`; None: not recorded."""
        return None

    def packing_facts(self, model: torch.nn.Module) -> PackingFacts:
        """Return the layouts that a packed loss of `model` may use."""
        return PackingFacts(packing_obstacle(unwrap(model)), {})

    @property
    def manager(self) -> Any:
        """The manager that takes a strategy's requests one by one; None: there is none."""
        return None

    def require_strategy_support(self) -> None:
        """Raise `ConfigurationError` if no strategy can decide what is sampled."""
        if self.manager is None:
            raise ConfigurationError(
                f"a {type(self).__name__} samples whole batches alone, and a strategy single "
                "requests; use Plain(), or attach a RolloutConfig."
            )

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Begin a training, or resume it.

        Args:
            step: optimizer steps done; 0: none.
            state: the `checkpoint_state` and the `process_state` of that step; None: there is no
                checkpoint.
        """

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the sampler's state for a checkpoint, as JSON values."""
        return {}

    def process_state(self) -> dict[str, Any]:
        """Return this process's state for a checkpoint, for `torch.save`."""
        return {}

    def warm_up(self, num_steps: int) -> None:
        """Trace or compile now if that pays off within the training's `num_steps` decode steps."""

    def join(self) -> None:
        """Roll out with the other processes until all have called this."""

    def lend_to_trainer(self) -> None:
        """Hold an engine that runs the module in training until the next rollout."""

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the cache, and with level 2 that of weights and graphs."""

    def wake(self) -> None:
        """Resume after `sleep` or `lend_to_trainer`."""

    def close(self) -> None:
        """Release the resources that the sampler holds for this trainer."""


class SamplerSource(Protocol):
    """The argument of `attach`: makes the sampler once the trainer is known."""

    @property
    def config(self) -> RolloutConfig:
        """Settings of the rollout and of the loss."""
        ...

    def sampler_for(self, run: TrainingRun) -> Sampler:
        """Return the sampler of a trainer.

        Raises:
            ConfigurationError: a setting of the trainer, or of `config`, cannot be honoured.
        """
        ...


class SamplesByManager:
    """Implements the methods of a sampler that pass calls on to an engine's or a pool's manager."""

    manager: Any

    @property
    def defaults(self) -> SamplingParams:
        return self.manager.defaults

    @property
    def limits(self) -> ServingLimits:
        return self.manager.limits

    @property
    def routers(self) -> Routers | None:
        return self.manager.routers

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the number of sequences so far, which seeds the next draws."""
        return {"num_sequences": self.manager.input_processor.num_sequences}

    def process_state(self) -> dict[str, Any]:
        """Return the random state, the request ids and the policy version of this process."""
        return {
            "draws": self.manager.input_processor.state_dict(),
            "policy_version": self.manager.policy_version,
        }

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Continue with the random draws of a checkpoint."""
        if state is None:
            return
        processor = self.manager.input_processor
        processor.num_sequences = state.get("num_sequences", 0)
        if "draws" in state:
            processor.go_on(state["draws"])


class AttachedGenerator(SamplesByManager, RolloutGenerator):
    """The sampler of a trainer that uses an engine in the trainer's process."""

    samples_current_policy: ClassVar[bool] = True

    @property
    def local_generator(self) -> RolloutGenerator:
        return self

    @property
    def group(self) -> EngineGroup | None:
        return self.manager.group

    @property
    def durations(self) -> Durations:
        return self.manager.durations

    def packing_facts(self, model: torch.nn.Module) -> PackingFacts:
        """Return the layouts that the engine's check of the model found."""
        engine = self.manager.engine
        return PackingFacts(
            engine.paged_model.layout.packing_obstacle, engine.request_checks.images.cuts
        )

    def require_strategy_support(self) -> None:
        """Do nothing: an engine samples what a strategy asks for."""

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Continue with the random draws and the policy version of a checkpoint."""
        super().begin_training(step, state)
        if state is not None and "policy_version" in state:
            self.manager.raise_policy_version(state["policy_version"])

    def warm_up(self, num_steps: int) -> None:
        if num_steps >= STEPS_WORTH_TRACE:
            _LOGGER.warning(
                "the first step takes longer than the others: decode steps are compiled, and "
                "compared with the model's plain forward."
            )
            self.wake()
            self.manager.warmup(num_steps)


class EngineSource:
    """An engine in the trainer's process, which `attach` creates by default."""

    def __init__(self, config: Any = None) -> None:
        """Keep a `RolloutConfig`, a transformers `ContinuousBatchingConfig`, or None."""
        self._given = config

    @property
    def config(self) -> RolloutConfig:
        return as_rollout_config(self._given)

    def sampler_for(self, run: TrainingRun) -> AttachedGenerator:
        config = as_trainers_config(self._given, run.seed, run.generation_config)
        config = with_trainers_compilation(config, run)
        return AttachedGenerator(
            run.model,
            with_worthwhile_compilation(config, run),
            tokenizer=run.tokenizer,
            generation_config=run.generation_config,
            accelerator=run.accelerator,
            optimizer=run.optimizer,
        )


def with_trainers_compilation(config: RolloutConfig, run: TrainingRun) -> RolloutConfig:
    """Compile prefill with the trainer's `torch_compile=True` settings, unless it is configured.

    A rollout does not run the module that the trainer compiled, but the model inside it. Decode
    steps are compiled in the engine's own way.
    """
    resolved = with_compile_settings(config, run.generation_config)
    is_set = resolved.varlen_compile_config is not None
    is_excluded = config.router_replay or config.numerics == Numerics.BITWISE
    if run.compile_settings is None or is_set or is_excluded:
        return config
    return replace(config, varlen_compile_config=run.compile_settings)


def with_worthwhile_compilation(config: RolloutConfig, run: TrainingRun) -> RolloutConfig:
    """Leave a GPU's decode steps uncompiled if the training is too short to repay compilation.

    On a CPU, this is decided later, when the number of coming steps is known.
    """
    is_set = config.use_default_compile_configs is not None or config.default_compile_level
    if is_set or run.accelerator.device.type not in COMPILED_DEVICES:
        return config
    if run.num_steps is None or run.num_steps >= STEPS_WORTH_COMPILING:
        return config
    _LOGGER.info(
        "decode steps are not compiled: the training has at most %d of them, and compiling pays "
        "off after about %d; use_default_compile_configs=True compiles them",
        run.num_steps,
        STEPS_WORTH_COMPILING,
    )
    return replace(config, use_default_compile_configs=False)
