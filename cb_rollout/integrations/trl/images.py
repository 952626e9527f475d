"""Find images in a trainer's data sets; choose rows of batches that hold images.

TRL 1.16 keeps the images of all rows in one tensor, and divides and joins them with its own
functions, which are used here. Called by the trainer, on its thread.

B: rows of a batch, P: tokens of the longest prompt, S: prompt and completion.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from cb_rollout.compat.multimodal import is_processor, placeholder_token_ids
from cb_rollout.engine.images.processor import has_image_parts, is_chat
from cb_rollout.engine.images.prompt_images import PromptImages, create_prompt_images
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl import upstream
from cb_rollout.packing.rows import PackedRow, with_images

IMAGE_COLUMNS = ("image", "images")

# Arguments that TRL passes to a forward besides ids and mask: these for each token, (B, S), and
# those of images.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Numbers of images and of tiles in each row, which no model takes.
COUNTS = ("num_images", "num_tiles")
PIXELS = "pixel_values"
IMAGE_ARGUMENTS = (
    PIXELS,
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "image_position_ids",
    *COUNTS,
    *TOKEN_TYPES,
)


def require_processor_for_images(trainer: Any) -> None:
    """Refuse a data set with image columns where the trainer has a text-only tokenizer."""
    if is_processor(trainer.processing_class):
        return
    datasets = {"train_dataset": trainer.train_dataset}
    evaluated = trainer.eval_dataset
    if isinstance(evaluated, dict):
        datasets |= evaluated
    else:
        datasets["eval_dataset"] = evaluated
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        where = images_in(dataset, name, reads_row=False)
        if where:
            raise ConfigurationError(
                f"{where}, and processing_class is a {type(trainer.processing_class).__name__}, "
                "which reads text only; pass the model's processor, or remove the images from the "
                "data set."
            )


def images_in(dataset: Any, name: str, *, reads_row: bool) -> str | None:
    """Return a phrase for images in a data set's columns or first row; None: it has none."""
    row: Mapping[str, Any] = {}
    if reads_row:
        row = next(iter(dataset), {})
    column_names = getattr(dataset, "column_names", None) or ()
    for column in IMAGE_COLUMNS:
        if column in column_names or column in row:
            return f"{name} has a column {column!r}"
    prompt: Any = row.get("prompt")
    if is_chat(prompt) and has_image_parts(prompt):
        return f"{name} has images in its prompts"
    return None


def image_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image arguments that a scored batch passes to the trainer's forward."""
    arguments = {}
    for name in IMAGE_ARGUMENTS:
        value = batch.get(name)
        if value is not None:
            arguments[name] = value
    return arguments


def of_rows(arguments: Mapping[str, Any], numbers: list[int]) -> dict[str, Any]:
    """Return a forward's arguments, with images only for the rows at `numbers`."""
    chosen = divided_images(arguments)
    for name, values in image_arguments(chosen).items():
        if isinstance(values, list):
            chosen[name] = [values[number] for number in numbers]
        else:
            chosen[name] = values[numbers]
    return joined_images(chosen)


def divided_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are in lists, with a tensor for each row."""
    present = {name: value for name, value in batch.items() if value is not None}
    return {**batch, **upstream.utils.split_pixel_values_by_grid(present)}


def joined_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose images are tensors of all rows again."""
    return upstream.utils.unsplit_pixel_values_by_grid(dict(batch))


def rows_with_images(
    model: Any,
    rows: Sequence[PackedRow],
    arguments: Mapping[str, Any],
    logits_to_keep: int,
    cuts_images: Mapping[tuple[bool, bool], bool],
) -> list[PackedRow]:
    """Return rows without padding, with their images.

    Args:
        model: the transformers model, which knows its placeholder tokens.
        rows: the rows of a batch, B, without images.
        arguments: the padded batch's `image_arguments`.
        logits_to_keep: columns of the batch that hold completions.
        cuts_images: by the kind of images, whether a forward may begin between them.
    """
    placeholders = placeholder_token_ids(model)
    divided = divided_images(arguments)
    for name in COUNTS:
        divided.pop(name, None)
    counts = arguments.get("num_images") or [1] * len(rows)
    images_of_rows: list[PromptImages | None] = []
    for number, row in enumerate(rows):
        token_ids = row.token_ids
        if placeholders.isdisjoint(token_ids):
            images_of_rows.append(None)
            continue
        images = create_prompt_images(
            _tensors_of_row(row, number, divided, logits_to_keep),
            _image_spans(token_ids, placeholders),
            num_images=counts[number],
            per_token=frozenset(TOKEN_TYPES),
            token_ids=token_ids,
        )
        images.may_be_cut = cuts_images.get(images.kind, False)
        images_of_rows.append(images)
    return with_images(model, rows, images_of_rows)


def _tensors_of_row(
    row: PackedRow, number: int, divided: Mapping[str, Any], logits_to_keep: int
) -> dict[str, torch.Tensor]:
    """Return the images' tensors of the row at `number`, without padding."""
    tensors: dict[str, torch.Tensor] = {}
    for name, values in divided.items():
        tensor = values[number] if isinstance(values, list) else values[number : number + 1]
        if name in TOKEN_TYPES:
            end = tensor.shape[1] - logits_to_keep + len(row.completion_ids)
            tensor = tensor[:, end - row.num_tokens : end]
        tensors[name] = tensor
    return tensors


def _image_spans(token_ids: Sequence[int], placeholders: Container[int]) -> list[range]:
    """Return the indices of each run of placeholder tokens."""
    spans = []
    start: int | None = None
    for index, token in enumerate(token_ids):
        is_image = token in placeholders
        if is_image and start is None:
            start = index
        if not is_image and start is not None:
            spans.append(range(start, index))
            start = None
    if start is not None:
        spans.append(range(start, len(token_ids)))
    return spans


def tokenized(trainer: Any, row: Mapping[str, Any]) -> tuple[list[int], list[Any] | None]:
    """Return a data set row's prompt as the trainer tokenizes it, and its pictures."""
    pictures = row.get("images")
    if pictures is None and row.get("image") is not None:
        pictures = [row["image"]]
    prompt = row["prompt"]
    if pictures:
        prompt = upstream.prepare_multimodal_messages(prompt, images=pictures)
    (ids,), images, _ = trainer._tokenize_prompts([prompt])
    if not images:
        return list(ids), None
    return list(ids), images[0]
