"""Find images in a trainer's data sets; choose rows of batches that hold images.

TRL 1.16 keeps the images of all rows in one tensor, and divides and joins them by functions of its
own, which are used here. Called by the trainer, on its thread.

B: rows of a batch, P: tokens of the longest prompt, S: prompt and completion.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cb_rollout.compat.multimodal import is_processor, placeholder_token_ids
from cb_rollout.engine.images.processor import has_image_parts, is_chat
from cb_rollout.engine.images.prompt_images import PromptImages, create_prompt_images
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl import upstream
from cb_rollout.packing.batch import PackedRow, with_images

if TYPE_CHECKING:
    import torch

IMAGE_COLUMNS = ("image", "images")

# What TRL passes to a forward beside ids and mask: of images, and for each token, (B, S).
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Numbers of images and of tiles of each row, which no model takes.
COUNTS = ("num_images", "num_tiles")
PIXELS = "pixel_values"
IMAGE_ARGUMENTS = (
    *(PIXELS, "image_grid_thw", "pixel_attention_mask", "spatial_shapes"),
    *("image_sizes", "image_position_ids", *COUNTS, *TOKEN_TYPES),
)


def require_processor_for_images(trainer: Any) -> None:
    """Refuse a data set with image columns where the trainer has a text-only tokenizer."""
    if is_processor(trainer.processing_class):
        return
    evaluated = trainer.eval_dataset
    many = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
    for name, dataset in {"train_dataset": trainer.train_dataset, **many}.items():
        if dataset is not None and (where := images_in(dataset, name, reads_row=False)):
            raise ConfigurationError(
                f"{where}, and processing_class is a {type(trainer.processing_class).__name__}, "
                "which takes text alone; pass the model's processor, or take the images out of the "
                "data set."
            )


def images_in(dataset: Any, name: str, *, reads_row: bool) -> str | None:
    """Return a phrase for images in a data set's columns or first row; None: it has none."""
    row = next(iter(dataset), {}) if reads_row else {}
    columns = [*(getattr(dataset, "column_names", None) or ()), *row]
    for column in IMAGE_COLUMNS:
        if column in columns:
            return f"{name} has a column {column!r}"
    prompt: Any = row.get("prompt")
    has_images = is_chat(prompt) and has_image_parts(prompt)
    return f"{name} has images in its prompts" if has_images else None


def image_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scored batch passes to the trainer's forward for its images."""
    return {name: batch[name] for name in IMAGE_ARGUMENTS if batch.get(name) is not None}


def of_rows(arguments: Mapping[str, Any], numbers: list[int]) -> dict[str, Any]:
    """Return a forward's arguments, those of images for the rows at `numbers` alone."""
    chosen = divided_images(arguments)
    for name, value in image_arguments(chosen).items():
        is_list = isinstance(value, list)
        chosen[name] = [value[n] for n in numbers] if is_list else value[numbers]
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
    """Return rows without padding with their images, of the padded batch's `image_arguments`.

    `cuts_images` says of which kinds of images a forward may begin between them.
    """
    placeholders = placeholder_token_ids(model)
    divided = {n: v for n, v in divided_images(arguments).items() if n not in COUNTS}
    counts = arguments.get("num_images") or [1] * len(rows)
    sequences = [[*row.prompt_ids, *row.completion_ids] for row in rows]
    images = [
        None
        if placeholders.isdisjoint(sequence)
        else _images_of(row, number, counts[number], divided, logits_to_keep, placeholders)
        for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
    ]
    for own in images:
        if own is not None:
            own.may_be_cut = cuts_images.get(own.kind, False)
    return with_images(model, rows, images)


def _images_of(
    row: PackedRow,
    number: int,
    num_images: int,
    divided: Mapping[str, Any],
    logits_to_keep: int,
    placeholders: Container[int],
) -> PromptImages:
    tensors: dict[str, torch.Tensor] = {}
    for name, values in divided.items():
        own = values[number] if isinstance(values, list) else values[number : number + 1]
        if name in TOKEN_TYPES:
            end = own.shape[1] - logits_to_keep + len(row.completion_ids)
            own = own[:, end - row.num_tokens : end]
        tensors[name] = own
    ids = [*row.prompt_ids, *row.completion_ids]
    runs = groupby(range(len(ids)), lambda index: ids[index] in placeholders)
    of_images = ([*run] for is_image, run in runs if is_image)
    spans = [range(run[0], run[-1] + 1) for run in of_images]
    return create_prompt_images(tensors, spans, num_images, frozenset(TOKEN_TYPES), ids)


def tokenized(trainer: Any, row: Mapping[str, Any]) -> tuple[list[int], list[Any] | None]:
    """Return a data set row's prompt as the trainer tokenizes it, and its pictures."""
    pictures = row.get("images")
    if pictures is None and row.get("image") is not None:
        pictures = [row["image"]]
    prompt = row["prompt"]
    if pictures:
        prompt = upstream.prepare_multimodal_messages(prompt, images=pictures)
    (ids,), images, _ = trainer._tokenize_prompts([prompt])
    return list(ids), images[0] if images else None
