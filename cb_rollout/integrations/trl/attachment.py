"""Attach a `RolloutGenerator` to a stock TRL trainer.

TRL 1.16 asks an object named `vllm_generation` for completions, and every switch of that path is
an attribute of the trainer, not of its arguments. So a trainer made without vLLM takes that path
once its attributes are set; `args.use_vllm` stays False and vLLM is never imported. `detach`
restores what was replaced. Called from the thread that trains, before or after training.
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
from cb_rollout.integrations.data_checks import require_renderable_prompts
from cb_rollout.integrations.trl import on_policy, upstream
from cb_rollout.integrations.trl.backend import (
    LOADED,
    GenerationBackend,
    create_sampler,
    require_backend,
    sampler_source,
    trains_split_model,
)
from cb_rollout.integrations.trl.guard import (
    loss_temperature,
    require_one_distribution,
    warn_of_bias,
)
from cb_rollout.integrations.trl.images import require_processor_for_images
from cb_rollout.integrations.trl.on_policy import GenerationSeam
from cb_rollout.integrations.trl.ordered_head import HEAD
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.scoring import (
    TokenAdvantages,
    TrainerScoring,
    require_known_ends,
)
from cb_rollout.rollout.sampler import Sampler

TESTED_VERSIONS = "trl>=1.16,<2"

# Attributes used of every trainer; then of GRPO and RLOO trainers.
USED_ATTRIBUTES = ("generation_config", "state", "accelerator", "model_wrapped")
SCORED_ATTRIBUTES = ("use_vllm", "vllm_mode", "_metrics")
SCORED_METHODS = (
    "_generate_single_turn",
    "_generate",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
    "compute_loss",
)
LOGPROBS_ARGUMENTS = ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
GENERATE_ARGUMENTS = ["self", "prompts", "images", "num_generations", "profiler"]


def attach(
    trainer: Any, config: Any = None, *, token_advantages: TokenAdvantages | None = None
) -> Sampler:
    """Make a stock on-policy trainer of TRL generate with cb_rollout.

    This covers training, evaluation, tools and environments. With a `GRPOTrainer` or `RLOOTrainer`,
    the sampled log-probabilities go into TRL's own importance-sampling correction, under TRL's own
    metric names. With `DistillationTrainer`, `GOLDTrainer`, `IWOPDTrainer`, `OnlineDPOTrainer`,
    `SDFTTrainer` and `SDPOTrainer`, only generation is replaced.

    Args:
        trainer: created with `use_vllm=False`, and not training yet.
        config: a `RolloutConfig` or a transformers `ContinuousBatchingConfig`, whose seed defaults
            to the trainer's. Or `SavedRollouts`. Or a `RolloutPool` of the trainer's checkpoint,
            which has its own config: its workers get the weights before each rollout, and `detach`
            leaves the pool open.
        token_advantages: GRPO only: a function of the batch's `LossRow`s and the trainer's
            advantages, (B,), that returns an advantage per token, float (B, T), where T is the
            length of the longest completion. None: all tokens of a row have the row's advantage.

    Returns:
        The generator; you may also call its `generate_batch` outside of training.

    Raises:
        ConfigurationError: the trainer, a setting or this TRL version is not supported.
    """
    seam = on_policy.seam_of(trainer)
    _require_supported(trainer, seam)
    is_grpo = isinstance(trainer, upstream.GRPOTrainer)
    if token_advantages is not None and not is_grpo:
        raise refused("token advantages, trainer", trainer=type(trainer).__name__)
    source = sampler_source(config)
    if seam is not None:
        return on_policy.attach_generation(trainer, source, seam)
    _require_settings(trainer)
    require_processor_for_images(trainer)
    generator = create_sampler(trainer, source)
    config = generator.config
    defaults = generator.defaults
    require_one_distribution(config, defaults)
    require_known_ends(trainer, defaults)
    if generator.routers is not None and getattr(trainer.args, "torch_compile", False):
        raise refused("router replay, compiled")
    warn_of_bias(trainer, config, defaults, loss_temperature(trainer, config, trainer.temperature))
    _warn_of_dropout(trainer, config)
    if config.numerics == Numerics.BITWISE:
        _require_whole_outputs(trainer)
    group = generator.group
    if group is not None and trains_split_model(trainer):
        # TRL 1.16 seeds each process differently, but processes that share a split model must
        # shuffle and drop out alike.
        set_seed(trainer.args.seed + group.data_parallel_rank)
    backend = GenerationBackend(trainer, generator)
    if trainer.accelerator.is_main_process:
        num_sequences = config.record_num_sequences
        records = TrainerRecords(trainer, num_sequences, generator.durations, config)
        backend.parts.append(records)
    scoring = TrainerScoring(trainer, backend, token_advantages)
    if config.numerics == Numerics.BITWISE:
        backend.installed.enter_context(bitwise(trainer.model))
        backend.installed.enter_context(HEAD.installed())
    scoring.install()
    # RLOO has no tools.
    if config.concurrent_tools and hasattr(trainer, "_tool_call_loop"):
        tools = ConcurrentTools(trainer, config.tool_timeout_seconds)
        backend.override(_tool_call_loop=tools.run)
    if generator.is_joint:
        _join_after_turns(trainer, backend)
    backend.install(LOADED)
    return generator


def detach(trainer: Any) -> None:
    """Restore a trainer to its state before `attach`, and close its generator.

    A strategy of `use_strategy` is removed too. Weights, optimizer and step count do not change.
    Raises `ConfigurationError` if nothing is attached.
    """
    require_backend(trainer, "detach").close()


def _require_supported(trainer: Any, seam: GenerationSeam | None) -> None:
    """Refuse an object that is not a trainer, or lacks attributes of TRL 1.16."""
    if seam is None and not isinstance(trainer, upstream.GRPOTrainer | upstream.RLOOTrainer):
        names = ", ".join(sorted(("GRPOTrainer", "RLOOTrainer", *on_policy.SEAMS)))
        raise ConfigurationError(
            f"attach() supports trl's {names}, not a {type(trainer).__name__}; use "
            "RolloutGenerator.generate_batch in your own loop."
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
            f"cb_rollout does not support trl {version} (missing: "
            f"{', '.join(missing) or 'nothing'}); install {TESTED_VERSIONS}."
        )
    if getattr(trainer, "use_vllm", False):
        if isinstance(getattr(trainer, "vllm_generation", None), GenerationBackend):
            raise ConfigurationError(
                "cb_rollout is already attached to this trainer; call detach(trainer) first."
            )
        raise ConfigurationError(
            "the trainer was made with use_vllm=True, so vLLM would generate; set it to False and "
            "attach again."
        )


def _require_settings(trainer: Any) -> None:
    require_renderable_prompts(trainer)
    if trainer.args.use_transformers_continuous_batching:
        raise refused("transformers' batching")
    temperature, given = trainer.args.temperature, trainer.args.generation_kwargs
    if temperature <= 0 or from_generation_config(trainer.generation_config).is_greedy:
        raise ConfigurationError(
            f"temperature={temperature}, generation_kwargs={given}: decoding is greedy, so all "
            "completions of a group would be the same; remove do_sample and temperature from "
            "generation_kwargs, and raise temperature in the trainer's config."
        )
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    mode = getattr(trainer, "vllm_importance_sampling_mode", None)
    is_by_token = mode in ("token_truncate", "token_mask")
    if getattr(trainer, "loss_type", None) == "vespo" and corrects and not is_by_token:
        raise ConfigurationError(
            f"loss_type='vespo' does not work with vllm_importance_sampling_mode={mode!r}; set "
            "'token_truncate' or 'token_mask'."
        )


def _join_after_turns(trainer: Any, backend: GenerationBackend) -> None:
    """Make a process with no conversations left join the rollouts of its engine's group."""
    generator = backend.generator

    @contextmanager
    def joining() -> Iterator[None]:
        yield
        generator.join()

    for name in ("rollout_func", "_tool_call_loop"):
        turns = getattr(trainer, name, None)
        if turns is not None:
            backend.override(**{name: joining()(turns)})


def _require_whole_outputs(trainer: Any) -> None:
    """Refuse FSDP2 settings that round the log-probabilities of TRL's forward.

    With accelerate 1.15, FSDP2 casts outputs to the dtype of the mixed precision.
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
            f"the model trains with dropout (rate {highest:g}), but rollouts are sampled without "
            "it: TRL's importance-sampling correction mistakes the difference for a policy change "
            "and drops sequences. Set disable_dropout=True in the trainer's config, and "
            "lora_dropout=0 and attention_dropout=0 where they are set.",
            stacklevel=3,
        )
