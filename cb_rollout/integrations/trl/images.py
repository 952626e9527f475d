"""Find images in a trainer's data sets; choose rows of its prompts and batches that hold images.

TRL 1.16 keeps the images of all rows in one tensor, and divides and joins them by functions of its
own, which are used here. Called by the trainer, on its thread. Imports no trl: its module is loaded
where a trainer exists.

B: rows of a batch, P: tokens of the longest prompt, S: prompt and completion.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cb_rollout.compat.multimodal import is_processor
from cb_rollout.engine.service.image_prompts import has_image_parts, is_chat
from cb_rollout.errors import ConfigurationError

TRAINER_MODULE = "trl.trainer.grpo_trainer"

IMAGE_COLUMNS = ("image", "images")

# What TRL passes to a forward beside ids and mask: of images, and for each token, (B, S).
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Numbers of images and of tiles of each row, which no model takes.
COUNTS = ("num_images", "num_tiles")
IMAGE_ARGUMENTS = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes"),
    *("image_sizes", "image_position_ids", *COUNTS, *TOKEN_TYPES),
)


def require_processor_for_images(trainer: Any) -> None:
    """Refuse a data set with images where the trainer has a text-only tokenizer.

    Raises:
        ConfigurationError: it has.
    """
    if (where := image_data(trainer)) and not is_processor(trainer.processing_class):
        raise ConfigurationError(
            f"{where}, and processing_class is a {type(trainer.processing_class).__name__}, which "
            "takes text alone; pass the model's processor, or take the images out of the data set."
        )


def image_data(trainer: Any) -> str | None:
    """Return a phrase for a data set with images, by its columns or its first chat; None: none.

    Rows are read only where a processor could take them.
    """
    takes_images = is_processor(trainer.processing_class)
    evaluated = trainer.eval_dataset
    many = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
    for name, dataset in {"train_dataset": trainer.train_dataset, **many}.items():
        if dataset is not None and (found := images_in(dataset, name, reads_row=takes_images)):
            return found
    return None


def images_in(dataset: Any, name: str, *, reads_row: bool) -> str | None:
    """Return a phrase for images in one data set, by its columns or its first row; None: none."""
    columns = list(getattr(dataset, "column_names", None) or ())
    row = next(iter(dataset), {}) if reads_row else {}
    found = [column for column in IMAGE_COLUMNS if column in columns or column in row]
    if found:
        return f"{name} has a column {found[0]!r}"
    prompt: Any = row.get("prompt")
    return (
        f"{name} has images in its prompts" if is_chat(prompt) and has_image_parts(prompt) else None
    )


def image_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scored batch passes to the trainer's forward for its images."""
    return {name: batch[name] for name in IMAGE_ARGUMENTS if batch.get(name) is not None}


def of_rows(arguments: Mapping[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Return arguments of a forward for the rows at `numbers` alone; those of no row stay."""
    divided = divided_images(arguments)
    chosen = {
        name: value
        if name not in IMAGE_ARGUMENTS or value is None
        else [value[number] for number in numbers]
        if isinstance(value, list)
        else value[list(numbers)]
        for name, value in divided.items()
    }
    return joined_images(chosen)


def divided_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are in lists, with a tensor for each row."""
    present = {name: value for name, value in batch.items() if value is not None}
    return {**batch, **_trl("split_pixel_values_by_grid")(present)}


def joined_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are tensors of all rows again."""
    return _trl("unsplit_pixel_values_by_grid")(dict(batch))


def cut_token_types(group: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose types of tokens are cut after the prompt: (B, P), left-padded."""
    num_prompt = group["prompt_ids"].shape[1]
    types = {name: group[name][:, :num_prompt] for name in TOKEN_TYPES if name in group}
    return group | types


def whole_token_types(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch whose types of tokens are those of completions too, (B, S): text."""
    zeros_BT = torch.zeros_like(batch["completion_ids"])
    names = [name for name in TOKEN_TYPES if name in batch]
    return batch | {name: torch.cat([batch[name], zeros_BT], dim=1) for name in names}


def tokenized(trainer: Any, row: Mapping[str, Any]) -> tuple[list[int], list[Any] | None]:
    """Return a data set row's prompt as the trainer tokenizes it, and its pictures."""
    pictures = row.get("images")
    if pictures is None and row.get("image") is not None:
        pictures = [row["image"]]
    prompt = row["prompt"]
    if pictures:
        prompt = _trl("prepare_multimodal_messages")(prompt, images=pictures)
    (ids,), images, _ = trainer._tokenize_prompts([prompt])
    return list(ids), images[0] if images else None


def _trl(name: str) -> Any:
    return getattr(sys.modules[TRAINER_MODULE], name)
