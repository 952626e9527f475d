"""A stock trainer on a tiny model, for tests and for the processes they start."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny import char_tokenizer, tiny_model
from trl import GRPOConfig, GRPOTrainer

PROBLEMS = [{"prompt": f"{i}+{j}="} for i in range(6) for j in range(6)]

# Settings under which the processes of a tensor-parallel group train on what one process would.
TENSOR_PARALLEL = {"per_device_train_batch_size": 8}


def share_of_sevens(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model gets at times."""
    return [completion.count("7") / max(1, len(completion)) for completion in completions]


def in_own_names(config_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of activation checkpointing under the names of this transformers (5.17 to 5.23)."""
    known = {field.name for field in fields(config_class)}
    renamed = {
        name: name.replace("activation_", "gradient_")
        for name in settings
        if name.startswith("activation_checkpointing") and name not in known
    }
    return {renamed.get(name, name): value for name, value in settings.items()}


def tiny_trainer(
    output_dir: Path,
    *,
    trainer_class: Any = GRPOTrainer,
    config_class: Any = GRPOConfig,
    reward: Any = share_of_sevens,
    trainer_arguments: dict[str, Any] | None = None,
    prepare_tokenizer: Any = None,
    num_hidden_layers: int = 2,
    model: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of three steps of 16 completions, eight a prompt, in float32 on the CPU."""
    tokenizer = char_tokenizer()
    if prepare_tokenizer is not None:
        prepare_tokenizer(tokenizer)
    defaults = {
        "output_dir": str(output_dir),
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "activation_checkpointing": False,
        "beta": 0.0,
    }
    data = {
        "train_dataset": Dataset.from_list(PROBLEMS[:-4]),
        "eval_dataset": Dataset.from_list(PROBLEMS[-4:]),
    }
    return trainer_class(
        model=model or tiny_model(vocab_size=len(tokenizer), num_hidden_layers=num_hidden_layers),
        reward_funcs=reward,
        args=config_class(**in_own_names(config_class, defaults | settings)),
        processing_class=tokenizer,
        **(data | (trainer_arguments or {})),
    )


def logged(trainer: Any, name: str) -> list[float]:
    """A figure wherever the trainer logged it, in order."""
    return [row[name] for row in trainer.state.log_history if name in row]
