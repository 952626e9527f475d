"""A generator for a trainer's model, as the trainer's own settings would have it.

Knows the trainer by its attributes only.
"""

from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.generator import RolloutGenerator
from cb_rollout.transformers_config import as_trainers_config


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
    limits = generator.manager.intake.limits
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
