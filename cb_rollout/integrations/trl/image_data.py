"""Find images in a trainer's data sets, before its first rollout.

Called by the trainer's thread, when it is attached and when it gets a strategy. Imports no trl.
"""

from typing import Any

from cb_rollout.compat.multimodal import is_processor
from cb_rollout.engine.service.image_prompts import has_image_parts, is_chat
from cb_rollout.errors import ConfigurationError

IMAGE_COLUMNS = ("image", "images")


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
        if dataset is None:
            continue
        columns = list(getattr(dataset, "column_names", None) or ())
        row = next(iter(dataset), {}) if takes_images else {}
        found = [column for column in IMAGE_COLUMNS if column in columns or column in row]
        if found:
            return f"{name} has a column {found[0]!r}"
        prompt: Any = row.get("prompt")
        if is_chat(prompt) and has_image_parts(prompt):
            return f"{name} has images in its prompts"
    return None
