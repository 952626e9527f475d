"""Attach a `RolloutGenerator` to a stock TRL trainer.

TRL 1.16 asks an object named `vllm_generation` for completions, and every switch of that path is
an attribute of the trainer, not of its arguments. So a trainer made without vLLM takes that path
once its attributes are set; `args.use_vllm` stays False and vLLM is never imported. `detach`
restores what is replaced. Called from the thread that trains, before or after training.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from transformers import set_seed

from cb_rollout.compat.torch import dropout_rate
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import Numerics
from cb_rollout.config.hf import from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.numerics.bitwise import bitwise
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.concurrent_tools import ConcurrentTools
from cb_rollout.integrations.ray.pool import RolloutPool
from cb_rollout.integrations.trl import on_policy, upstream
from cb_rollout.integrations.trl.backend import (
    GENERATION_MODE,
    AttachedGenerator,
    GenerationBackend,
    create_generator,
    require_backend,
    trains_split_model,
)
from cb_rollout.integrations.trl.guard import require_one_distribution, warn_of_bias
from cb_rollout.integrations.trl.images import require_processor_for_images
from cb_rollout.integrations.trl.on_policy import GenerationSeam
from cb_rollout.integrations.trl.ordered_head import HEAD
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.scoring import (
    TokenAdvantages,
    TrainerScoring,
    require_known_ends,
)
from cb_rollout.rollout.distributed import create_failure_watch
from cb_rollout.rollout.saved import SavedRollouts

TESTED_VERSIONS = "trl>=1.16,<2"

# Of every trainer; then of GRPO and RLOO.
USED_ATTRIBUTES = ("generation_config", "state", "accelerator", "model_wrapped")
SCORED_ATTRIBUTES = ("use_vllm", "vllm_mode", "_metrics")
SCORED_METHODS = (
    *("_generate_single_turn", "_generate", "_generate_and_score_completions"),
    *("_calculate_rewards", "_get_per_token_logps_and_entropies", "compute_loss"),
)
LOGPROBS_ARGUMENTS = ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
GENERATE_ARGUMENTS = ["self", "prompts", "images", "num_generations", "profiler"]


def attach(
    trainer: Any, config: Any = None, *, token_advantages: TokenAdvantages | None = None
) -> AttachedGenerator:
    """Make a stock on-policy trainer of TRL generate through cb_rollout.

    Training, evaluation, tools and environments all use it. With a `GRPOTrainer` or `RLOOTrainer`
    the sampled log-probabilities go into TRL's own importance-sampling correction, under TRL's own
    metric names. Of `DistillationTrainer`, `GOLDTrainer`, `IWOPDTrainer`, `OnlineDPOTrainer`,
    `SDFTTrainer` and `SDPOTrainer` it replaces generation alone.

    Args:
        trainer: constructed with `use_vllm=False`, not yet training.
        config: a `RolloutConfig` or a transformers `ContinuousBatchingConfig`; its seed defaults to
            the trainer's. Or a `RolloutPool` of the trainer's checkpoint, which has a config and
            stays open: its workers get the weights before each rollout. Or `SavedRollouts`.
        token_advantages: under GRPO, called with the batch's `LossRow`s and the trainer's
            advantages, (B,); returns advantages of tokens, (B, T), with T tokens of the longest
            completion. None: a row's tokens have its own.

    Returns:
        The generator; its `generate_batch` may also be called outside of training.

    Raises:
        ConfigurationError: the trainer, a setting or this TRL release is not supported.
    """
    seam = on_policy.seam_of(trainer)
    _require_supported(trainer, seam)
    is_grpo = isinstance(trainer, upstream.GRPOTrainer)
    if token_advantages is not None and not is_grpo:
        raise refused("token advantages, trainer", trainer=type(trainer).__name__)
    if seam is not None:
        return _attach_generation(trainer, config, seam)
    _require_settings(trainer)
    require_processor_for_images(trainer)
    generator = create_generator(trainer, config)
    config = generator.config
    defaults = generator.manager.defaults
    require_one_distribution(config, defaults)
    require_known_ends(trainer, defaults)
    if generator.manager.routers is not None and getattr(trainer.args, "torch_compile", False):
        raise refused("router replay, compiled")
    warn_of_bias(trainer, config, defaults)
    _warn_of_dropout(trainer, config)
    if config.numerics == Numerics.BITWISE:
        _require_whole_outputs(trainer)
    if (group := generator.manager.group) is not None and trains_split_model(trainer):
        # TRL 1.16 seeds each process apart; those of one split model must shuffle and drop alike.
        set_seed(trainer.args.seed + group.data_parallel_rank)
    is_main = trainer.accelerator.is_main_process
    records = TrainerRecords(trainer, config.record_num_sequences) if is_main else None
    backend = GenerationBackend(trainer, generator, records)
    scoring = TrainerScoring(trainer, backend, token_advantages)
    if config.numerics == Numerics.BITWISE:
        backend.installed.enter_context(bitwise(trainer.model))
        backend.installed.enter_context(HEAD.installed())
    backend.override(
        vllm_generation=backend,
        vllm_mode=GENERATION_MODE,
        use_vllm=True,
        _last_loaded_step=-1,
        _generate=scoring.generate,
        _generate_and_score_completions=scoring.generate_and_score,
        _calculate_rewards=scoring.calculate_rewards,
        _get_per_token_logps_and_entropies=scoring.logprobs,
        compute_loss=scoring.compute_loss,
    )
    # RLOO has no tools.
    if config.concurrent_tools and hasattr(trainer, "_tool_call_loop"):
        tools = ConcurrentTools(trainer, config.tool_timeout_seconds)
        backend.override(_tool_call_loop=tools.run)
    _join_after_turns(trainer, backend)
    _watch(trainer, backend)
    return generator


def _attach_generation(trainer: Any, config: Any, seam: GenerationSeam) -> AttachedGenerator:
    """Attach a trainer whose loss needs nothing from the rollout but its tokens."""
    own = config.config if isinstance(config, RolloutPool | SavedRollouts) else config
    on_policy.require_generation_alone(trainer, own, seam)
    generator = create_generator(trainer, config)
    backend = GenerationBackend(trainer, generator, synced_step=seam.synced_step)
    on_policy.install_generation(trainer, backend, seam)
    _watch(trainer, backend)
    return generator


def _watch(trainer: Any, backend: GenerationBackend) -> None:
    watch = create_failure_watch()
    if watch is not None:
        backend.override(
            train=watch.watched()(trainer.train), evaluate=watch.watched()(trainer.evaluate)
        )
    trainer.add_callback(backend)


def detach(trainer: Any) -> None:
    """Put a trainer back as it was before `attach`, and close its generator.

    A strategy of `use_strategy` is removed too. Weights, optimizer and step count stay as they are.
    Raises `ConfigurationError` if nothing is attached.
    """
    require_backend(trainer, "detach").close()


def _require_supported(trainer: Any, seam: GenerationSeam | None) -> None:
    """Refuse an object that is no trainer, or whose attributes are not those of TRL 1.16."""
    if seam is None and not isinstance(trainer, upstream.GRPOTrainer | upstream.RLOOTrainer):
        names = ", ".join(sorted(("GRPOTrainer", "RLOOTrainer", *on_policy.SEAMS)))
        raise ConfigurationError(
            f"attach() takes one of trl's {names}; not a {type(trainer).__name__}; use "
            "RolloutGenerator.generate_batch in a loop of your own."
        )
    used = seam.methods if seam else (*SCORED_ATTRIBUTES, *SCORED_METHODS)
    missing = [name for name in (*USED_ATTRIBUTES, *used) if not hasattr(trainer, name)]
    arguments = list(inspect.signature(upstream.VLLMGeneration.generate).parameters)
    if not missing and seam is None:
        taken = list(inspect.signature(trainer._get_per_token_logps_and_entropies).parameters)
        if taken[: len(LOGPROBS_ARGUMENTS)] != LOGPROBS_ARGUMENTS:
            missing = ["_get_per_token_logps_and_entropies as it was"]
    version = upstream.trl.__version__
    if missing or arguments != GENERATE_ARGUMENTS or Version(version) < Version("1.16"):
        raise ConfigurationError(
            f"trl {version} generates in another way than cb_rollout knows (missing: "
            f"{', '.join(missing) or 'nothing'}); install {TESTED_VERSIONS}."
        )
    if getattr(trainer, "use_vllm", False):
        if isinstance(getattr(trainer, "vllm_generation", None), GenerationBackend):
            raise ConfigurationError(
                "cb_rollout is attached to this trainer already; call detach(trainer) before."
            )
        raise ConfigurationError(
            "the trainer was made with use_vllm=True; leave it False and attach again."
        )


def _require_settings(trainer: Any) -> None:
    if trainer.args.use_transformers_continuous_batching:
        raise refused("transformers' batching")
    temperature, given = trainer.args.temperature, trainer.args.generation_kwargs
    if temperature <= 0 or from_generation_config(trainer.generation_config).is_greedy:
        raise ConfigurationError(
            f"temperature={temperature}, generation_kwargs={given}: decoding is greedy, and the "
            "completions of a group would all be the same; take do_sample and temperature out of "
            "generation_kwargs, and raise temperature in the trainer's config."
        )
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    mode = getattr(trainer, "vllm_importance_sampling_mode", None)
    is_by_token = mode in ("token_truncate", "token_mask")
    if getattr(trainer, "loss_type", None) == "vespo" and corrects and not is_by_token:
        raise ConfigurationError(
            "loss_type='vespo' needs vllm_importance_sampling_mode to be one of token_truncate, "
            f"token_mask, not {mode!r}."
        )


def _join_after_turns(trainer: Any, backend: GenerationBackend) -> None:
    """Let a process whose conversations are over roll out with those that share its engine."""
    generator = backend.generator

    @contextmanager
    def joining() -> Iterator[None]:
        yield
        generator.join()

    for name in ("rollout_func", "_tool_call_loop") if generator.is_joint else ():
        if turns := getattr(trainer, name, None):
            backend.override(**{name: joining()(turns)})


def _require_whole_outputs(trainer: Any) -> None:
    """Refuse FSDP2's rounding of log-probabilities, the outputs of TRL's forward.

    accelerate 1.15 has FSDP2 cast outputs to the dtype of the mixed precision.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    dtype = getattr(policy, "output_dtype", None)
    if dtype not in (None, torch.float32):
        raise refused("bitwise, rounded outputs", dtype=dtype)


def _warn_of_dropout(trainer: Any, config: RolloutConfig) -> None:
    """Warn that the importance-sampling correction counts dropout as a change of policy."""
    highest = dropout_rate(trainer.model)
    if highest > 0 and config.numerics == Numerics.BITWISE:
        raise refused("bitwise, dropout", rate=f"{highest:g}")
    if highest > 0 and getattr(trainer, "vllm_importance_sampling_correction", False):
        warnings.warn(
            f"the model trains with dropout (rate {highest:g}), and rollouts are sampled without: "
            "TRL's importance-sampling correction takes the difference for a change of policy and "
            "drops sequences. Set disable_dropout=True in the trainer's config, and lora_dropout=0 "
            "and attention_dropout=0 where they are set.",
            stacklevel=3,
        )
