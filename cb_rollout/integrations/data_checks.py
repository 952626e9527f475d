"""Refuse data that a trainer cannot render, before it trains: chats without a template.

Reads the first row of each data set. Called by `attach`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cb_rollout.errors import ConfigurationError


def require_renderable_prompts(trainer: Any) -> None:
    """Raise `ConfigurationError` if prompts are chats and the tokenizer has no chat template.

    Also raise it if the first row has no prompt at all. Data sets that cannot be indexed, such as
    streamed ones, are not checked, and neither are those of a trainer with a `rollout_func`, which
    renders prompts itself.
    """
    if getattr(trainer, "rollout_func", None) is not None:
        return
    is_stock = type(trainer).__module__.startswith("trl.")
    for name, row in _first_rows(trainer):
        if "prompt" not in row:
            # A user's own trainer class may read other columns.
            if not is_stock:
                continue
            raise ConfigurationError(
                f"the first row of {name} has no 'prompt', only {_listed(row)}; rename the column "
                "of the prompts to 'prompt'."
            )
        is_chat = _is_chat(row["prompt"])
        if is_chat and not _has_template(trainer):
            raise ConfigurationError(
                f"the prompts of {name} are chats (lists of messages), but "
                f"{type(trainer.processing_class).__name__} has no chat template to render them, "
                "as is usual for a base model; load an instruct model's tokenizer, set "
                "tokenizer.chat_template, or pass prompts as text."
            )


def _first_rows(trainer: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the first row of each data set that can be indexed."""
    data: Any = getattr(trainer, "train_dataset", None)
    if _has_rows(data):
        yield "train_dataset", data[0]
    evaluated: Any = getattr(trainer, "eval_dataset", None)
    if not isinstance(evaluated, Mapping):
        evaluated = {"": evaluated}
    for key, data in evaluated.items():
        if _has_rows(data):
            yield f"eval_dataset[{key!r}]" if key else "eval_dataset", data[0]


def _has_rows(data: Any) -> bool:
    has_numbers = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has_numbers and len(data) > 0 and isinstance(data[0], Mapping)


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and bool(prompt) and isinstance(prompt[0], Mapping)


def _has_template(trainer: Any) -> bool:
    processor = trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)
    # For tools, TRL replaces some templates by its own.
    holders = (trainer, processor, tokenizer)
    return any(getattr(holder, "chat_template", None) is not None for holder in holders)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "no column"
