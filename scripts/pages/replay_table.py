"""List the settings under which a training is replayed in a stock trainer, with what comes out.

`tests/training/test_replay.py` replays each; `docs/replay.md` is written from this table.
"""

from dataclasses import dataclass, field
from typing import Any

FAST = 5
"""The first settings of the table are tested every time, the others by the slow tests."""

SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.3}

# Two generations, each of which trains four steps: ratios of old and new differ from 1.
SEVERAL_STEPS = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}

EVALUATION = {"eval_strategy": "steps", "eval_steps": 1}

TOOL_TURNS = {
    "max_completion_length": 70,
    "max_tool_calling_iterations": 2,
    "generation_kwargs": {"max_new_tokens": 6},
}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A setting."""

    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    """Fields of the trainer's config."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Fields of `RolloutConfig`."""
    parts: tuple[str, ...] = ()
    """Other arguments, by their names in `tests/training/replay.py`."""
    refused: str | None = None
    """A part of the error by which `attach` refuses it; None: it trains."""
    differs: str | None = None
    """The reason why the two trainings differ; None: they are equal."""
    is_coarse: bool = False
    """True: rounding is amplified, and the trainings are as near as padding leaves them."""


REPLAYS = (
    # Tested every time.
    Replay(name="dapo, several steps a rollout", trainer=SEVERAL_STEPS),
    Replay(name="KL with a reference model", trainer={"beta": 0.2, "loss_type": "grpo"}),
    Replay(
        name="truncated completions masked, accumulated gradients",
        trainer={"mask_truncated_completions": True, "gradient_accumulation_steps": 2},
    ),
    Replay(name="RLOO", trainer=SEVERAL_STEPS, parts=("rloo",)),
    Replay(name="LoRA with KL", trainer={"beta": 0.2}, parts=("lora",)),
    # Losses.
    *(
        Replay(
            name=f"{loss}, several steps a rollout", trainer={"loss_type": loss, **SEVERAL_STEPS}
        )
        for loss in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo")
    ),
    Replay(
        name="vespo, several steps a rollout",
        trainer={
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "token_truncate",
            **SEVERAL_STEPS,
        },
    ),
    Replay(
        name="vespo, corrected by sequences",
        trainer={"loss_type": "vespo"},
        refused="loss_type='vespo' does not work with vllm_importance_sampling_mode",
    ),
    Replay(
        name="cispo, a bound above 1",
        trainer={"loss_type": "cispo", "epsilon_high": 5.0, **SEVERAL_STEPS},
    ),
    Replay(
        name="luspo of sequences",
        trainer={"loss_type": "luspo", "importance_sampling_level": "sequence", **SEVERAL_STEPS},
    ),
    Replay(name="luspo of tokens", trainer={"loss_type": "luspo", **SEVERAL_STEPS}),
    Replay(
        name="GSPO",
        trainer={
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            **SEVERAL_STEPS,
        },
    ),
    Replay(name="epsilon_high", trainer={"epsilon_high": 0.28, **SEVERAL_STEPS}),
    Replay(name="delta", trainer={"delta": 1.3, **SEVERAL_STEPS}),
    Replay(name="top_entropy_quantile", trainer={"top_entropy_quantile": 0.3, **SEVERAL_STEPS}),
    Replay(name="entropy bonus", trainer={"entropy_coef": 0.05}),
    Replay(
        name="adaptive entropy bonus",
        trainer={
            "use_adaptive_entropy": True,
            "entropy_coef": 0.02,
            "entropy_target": 5.0,
            "gradient_accumulation_steps": 2,
        },
    ),
    Replay(
        name="off_policy_mask_threshold",
        trainer={"off_policy_mask_threshold": 1e-4, **SEVERAL_STEPS},
    ),
    Replay(
        name="KL, bias corrected",
        trainer={"beta": 0.2, "use_bias_correction_kl": True, **SEVERAL_STEPS},
    ),
    Replay(
        name="KL with a reference that follows",
        trainer={
            "beta": 0.2,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "ref_model_mixup_alpha": 0.5,
        },
    ),
    # The correction, whose ratios are 1.
    *(
        Replay(
            name=f"correction by {mode}",
            trainer={"vllm_importance_sampling_mode": mode, **SEVERAL_STEPS},
            rollout={"old_logps": "trainer"},
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    Replay(
        name="no correction",
        trainer={"vllm_importance_sampling_correction": False, **SEVERAL_STEPS},
    ),
    Replay(
        name="no correction, one step a rollout",
        trainer={"vllm_importance_sampling_correction": False},
    ),
    # Advantages.
    *(
        Replay(name=f"scale_rewards={scale!r}", trainer={"scale_rewards": scale})
        for scale in ("none", "batch", "group")
    ),
    Replay(
        name="weighted rewards, some None",
        trainer={"reward_weights": [1.0, -0.5, 2.0]},
        parts=("three rewards",),
    ),
    Replay(
        name="rewards normalized before they are added",
        trainer={"multi_objective_aggregation": "normalize_then_sum"},
        parts=("three rewards",),
    ),
    Replay(name="completions that nothing scores", parts=("unscorable",)),
    Replay(name="no reward anywhere", parts=("no advantage",)),
    # Batches.
    Replay(name="4 accumulated batches", trainer={"gradient_accumulation_steps": 4}),
    Replay(
        name="4 accumulated batches, each generated by itself",
        trainer={"gradient_accumulation_steps": 4, "steps_per_generation": 1},
    ),
    Replay(
        name="4 batches a generation, 2 a step",
        trainer={"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4},
    ),
    Replay(
        name="3 batches a generation, 2 a step",
        trainer={"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 5},
    ),
    Replay(
        name="groups that batches divide",
        trainer={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    ),
    Replay(
        name="num_iterations with accumulation",
        trainer={"gradient_accumulation_steps": 2, "num_iterations": 3, "max_steps": 5},
    ),
    Replay(name="pad_to_multiple_of", trainer={"pad_to_multiple_of": 16}),
    Replay(
        name="all completions truncated and masked",
        trainer={"mask_truncated_completions": True},
        parts=("no end",),
    ),
    Replay(
        name="truncated completions masked, several steps a rollout",
        trainer={"mask_truncated_completions": True, **SEVERAL_STEPS},
    ),
    Replay(name="prompts of 3 to 60 tokens", parts=("long prompts",)),
    Replay(name="an iterable data set", parts=("iterable",)),
    Replay(name="columns for the reward", parts=("columns",)),
    Replay(name="chats", parts=("chats",)),
    # Evaluation.
    Replay(name="evaluation in each step", trainer=EVALUATION),
    Replay(
        name="evaluation with groups of 2",
        trainer={"num_generations_eval": 2, "per_device_eval_batch_size": 6, **EVALUATION},
    ),
    Replay(name="evaluation of two data sets", trainer=EVALUATION, parts=("two evaluations",)),
    Replay(
        name="evaluation with KL, several steps a rollout",
        trainer={"beta": 0.2, **EVALUATION, **SEVERAL_STEPS},
    ),
    Replay(
        name="averaged weights swapped in for evaluation",
        trainer=EVALUATION,
        parts=("averaged",),
    ),
    *(
        Replay(
            name=f"averaged weights swapped in, a copy samples, old_logps={old!r}",
            trainer={**EVALUATION, **steps},
            rollout={"old_logps": old, "weight_sync": "copy"},
            parts=("averaged",),
        )
        for old, steps in (("rollout", {}), ("trainer", {}), ("auto", SEVERAL_STEPS))
    ),
    Replay(
        name="averaged weights swapped in, prompts of the evaluation come again",
        trainer={"per_device_eval_batch_size": 20, **EVALUATION},
        rollout={"old_logps": "rollout", "release_cache": "never", "block_size": 1},
        parts=("averaged", "one prompt"),
    ),
    # Sampling.
    Replay(name="temperature=0.7", trainer={"temperature": 0.7, **SEVERAL_STEPS}),
    Replay(name="top_p", trainer={"top_p": 0.8, **SEVERAL_STEPS}),
    Replay(name="top_k", trainer={"top_k": 10, **SEVERAL_STEPS}),
    Replay(name="min_p", trainer={"min_p": 0.05, **SEVERAL_STEPS}),
    Replay(name="repetition_penalty", trainer={"repetition_penalty": 1.2, **SEVERAL_STEPS}),
    Replay(
        name="greedy",
        trainer={"temperature": 0.0},
        refused="decoding is greedy",
    ),
    # Precision and memory.
    Replay(name="activation checkpointing", trainer={"activation_checkpointing": True}),
    Replay(
        name="activation checkpointing, reentrant",
        trainer={
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
            **SEVERAL_STEPS,
        },
    ),
    Replay(name="bf16", trainer={"bf16": True, **SEVERAL_STEPS}, is_coarse=True),
    Replay(name="the head in float32", trainer={"cast_lm_head_to_fp32": True}),
    Replay(
        name="dropout, disabled",
        trainer={"disable_dropout": True, **SEVERAL_STEPS},
        parts=("lora dropout",),
    ),
    Replay(
        name="dropout",
        parts=("dropout",),
        differs="a packed batch draws other random masks",
    ),
    Replay(
        name="dropout, TRL's forward, no correction",
        trainer={"vllm_importance_sampling_correction": False},
        rollout={"loss_forward": "trainer", "verify_every_steps": 0},
        parts=("dropout",),
    ),
    Replay(
        name="AdamW, warm-up, weight decay",
        trainer={
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "lr_scheduler_type": "linear",
        },
        is_coarse=True,
    ),
    Replay(name="no gradient clipping", trainer={"max_grad_norm": 0.0, "learning_rate": 0.1}),
    # The rollout's own settings.
    *(
        Replay(
            name=f"old_logps={old!r}, loss_forward={forward!r}",
            trainer=SEVERAL_STEPS,
            rollout={"old_logps": old, "loss_forward": forward},
        )
        for old in ("auto", "rollout", "trainer")
        for forward in ("packed", "trainer")
    ),
    Replay(
        name="old_logps='rollout', one step a rollout",
        rollout={"old_logps": "rollout"},
    ),
    Replay(name="a loss in forwards of 40 tokens", rollout={"loss_tokens_per_forward": 40}),
    Replay(
        name="a loss in forwards of 40 tokens, with KL",
        trainer={"beta": 0.2},
        rollout={"loss_tokens_per_forward": 40},
    ),
    *(
        Replay(
            name=f"release_cache={value!r}", trainer=EVALUATION, rollout={"release_cache": value}
        )
        for value in ("never", "between_steps")
    ),
    Replay(
        name="release_cache='with_weights', of the training module",
        rollout={"release_cache": "with_weights"},
        refused="the rollout uses the training module's own weights",
    ),
    Replay(
        name="a copy of the weights",
        trainer=EVALUATION,
        rollout={"weight_sync": "copy", "release_cache": "with_weights"},
    ),
    Replay(name="numerics='bitwise'", trainer=SEVERAL_STEPS, rollout={"numerics": "bitwise"}),
    # Models.
    Replay(name="LoRA", trainer=SEVERAL_STEPS, parts=("lora",)),
    Replay(
        name="LoRA, with a merged copy",
        trainer={"beta": 0.2},
        rollout={"weight_sync": "copy"},
        parts=("lora",),
    ),
    Replay(name="experts", trainer=SEVERAL_STEPS, parts=("experts",)),
    Replay(
        name="experts with a router loss",
        trainer={"router_aux_loss_coef": 0.1, "gradient_accumulation_steps": 2},
        parts=("experts",),
    ),
    Replay(name="sliding windows", trainer=SEVERAL_STEPS, parts=("mistral", "long prompts")),
    Replay(name="position biases", trainer=SEVERAL_STEPS, parts=("bloom",)),
    # RLOO.
    Replay(name="RLOO with KL", trainer={"beta": 0.2, **SEVERAL_STEPS}, parts=("rloo",)),
    Replay(
        name="RLOO, advantages normalized, rewards clipped",
        trainer={"normalize_advantages": True, "reward_clip_range": (0.0, 7.0)},
        parts=("rloo",),
    ),
    Replay(
        name="RLOO, truncated completions masked",
        trainer={"mask_truncated_completions": True, "beta": 0.2},
        parts=("rloo",),
    ),
    Replay(
        name="RLOO, evaluation, accumulated gradients",
        trainer={"gradient_accumulation_steps": 2, **EVALUATION},
        parts=("rloo", "three rewards"),
    ),
    # Turns.
    Replay(name="tools", trainer={**TOOL_TURNS, **SEVERAL_STEPS}, parts=("tools",)),
    Replay(
        name="tools, one after the other",
        trainer=TOOL_TURNS,
        rollout={"concurrent_tools": False},
        parts=("tools",),
    ),
    Replay(name="an environment", trainer=TOOL_TURNS, parts=("environment",)),
    Replay(
        name="tools, truncated completions masked",
        trainer={"mask_truncated_completions": True, **TOOL_TURNS},
        parts=("tools",),
    ),
    Replay(name="a rollout_func", trainer=SEVERAL_STEPS, parts=("rollout_func",)),
    Replay(
        name="a rollout_func, truncated completions masked",
        trainer={"mask_truncated_completions": True},
        parts=("rollout_func",),
    ),
    Replay(name="use_strategy(Plain())", trainer=SEVERAL_STEPS, parts=("plain",)),
    # Runs.
    Replay(
        name="resumed from a checkpoint",
        trainer={"save_strategy": "steps", "save_steps": 2, **SEVERAL_STEPS},
        parts=("resumed",),
    ),
    Replay(name="trained twice", trainer={"max_steps": 2}, parts=("twice",)),
    Replay(name="logged every 2 steps", trainer={"logging_steps": 2, "max_steps": 4}),
    Replay(
        name="whole epochs",
        trainer={"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3},
        parts=("few",),
    ),
    Replay(name="data in order", trainer={"shuffle_dataset": False}),
    Replay(name="generation_batch_size", trainer={"generation_batch_size": 16, "max_steps": 4}),
    Replay(
        name="evaluation of single completions", trainer={"num_generations_eval": 1, **EVALUATION}
    ),
    Replay(
        name="the best weights loaded at the end",
        trainer={
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_reward",
            **EVALUATION,
        },
        parts=("twice",),
    ),
    Replay(name="a reward that logs", trainer={"log_completions": True}, parts=("logging",)),
    Replay(name="a reward that is awaited", parts=("awaited",)),
    Replay(name="a reward model", trainer=EVALUATION, parts=("reward model",)),
    Replay(name="a rollout_func of two turns", trainer=SEVERAL_STEPS, parts=("branching columns",)),
    Replay(name="two environments", trainer=TOOL_TURNS, parts=("two environments",)),
    Replay(
        name="KL, truncated completions masked",
        trainer={"mask_truncated_completions": True, "beta": 0.2, **SEVERAL_STEPS},
    ),
    Replay(
        name="GSPO with KL, truncated completions masked",
        trainer={
            "mask_truncated_completions": True,
            "beta": 0.2,
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            **SEVERAL_STEPS,
        },
    ),
    Replay(
        name="entropy bonus of some tokens",
        trainer={"entropy_coef": 0.05, "top_entropy_quantile": 0.5, **SEVERAL_STEPS},
    ),
    Replay(
        name="experts with a router loss, truncated completions masked",
        trainer={
            "router_aux_loss_coef": 0.1,
            "mask_truncated_completions": True,
            **SEVERAL_STEPS,
        },
        parts=("experts", "long prompts"),
    ),
    Replay(
        name="experts, checkpointed, with KL",
        trainer={"activation_checkpointing": True, "beta": 0.2, **SEVERAL_STEPS},
        parts=("experts",),
    ),
    Replay(name="tied embeddings", trainer={"beta": 0.2, **SEVERAL_STEPS}, parts=("tied",)),
    Replay(
        name="tied embeddings, the head in float32",
        trainer={"cast_lm_head_to_fp32": True},
        parts=("tied",),
    ),
    Replay(
        name="capped logits",
        trainer={"beta": 0.2, **SEVERAL_STEPS},
        parts=("gemma2", "long prompts"),
    ),
    Replay(name="divided logits", trainer=SEVERAL_STEPS, parts=("granite",)),
    Replay(name="scaled logits", trainer=SEVERAL_STEPS, parts=("cohere",)),
    Replay(name="attention sinks", trainer=SEVERAL_STEPS, parts=("gpt_oss", "long prompts")),
    Replay(name="DoRA", trainer={"beta": 0.2, **SEVERAL_STEPS}, parts=("dora",)),
    Replay(
        name="LoRA and the whole head",
        trainer={"beta": 0.2, **SEVERAL_STEPS},
        parts=("lora and head",),
    ),
    Replay(name="LoRA of embeddings", trainer={"beta": 0.2}, parts=("lora of embeddings",)),
    Replay(name="LoRA trained further", trainer={"beta": 0.2, **SEVERAL_STEPS}, parts=("adapted",)),
    Replay(
        name="LoRA, checkpointed, evaluated",
        trainer={"activation_checkpointing": True, "beta": 0.2, **EVALUATION},
        parts=("lora",),
    ),
    Replay(name="bf16, one step a rollout", trainer={"bf16": True}, is_coarse=True),
    Replay(
        name="weights in bfloat16",
        trainer={"bf16": True, "learning_rate": 3.0},
        parts=("bfloat16",),
        is_coarse=True,
    ),
    Replay(
        name="a callback that moves the weights around each step",
        trainer={"optim": "adamw_torch", "learning_rate": 1e-3, **SEVERAL_STEPS},
        rollout={"weight_sync": "copy", "old_logps": "rollout"},
        parts=("moved",),
        is_coarse=True,
    ),
    Replay(name="saved rollouts", trainer={**EVALUATION, **SEVERAL_STEPS}, parts=("saved",)),
    Replay(
        name="saved rollouts, of tools",
        trainer={**TOOL_TURNS, **SEVERAL_STEPS},
        parts=("saved", "tools"),
    ),
)
