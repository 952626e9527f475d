"""Use private APIs of transformers' models and processors that read images (5.23).

T: tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from cb_rollout.compat.transformers import (
    forward_argument_names,
    forward_passes_on,
    model_eos_token_ids,
)

# Attributes of a config that have the ids of placeholders.
PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether `AutoModelForImageTextToText` loads this checkpoint, so that it reads images.

    Some types also have a text-only model; then the checkpoint's `architectures` decide.
    """
    reader = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if config.architectures:
        return config.architectures[0] == reader
    return reader is not None and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def is_processor(tokenizer: Any) -> bool:
    """Return whether this is an image processor, not a text tokenizer."""
    return getattr(tokenizer, "image_processor", None) is not None


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer inside a processor, or the tokenizer itself."""
    return tokenizer.tokenizer if is_processor(tokenizer) else tokenizer


def image_token_ids(processor: Any) -> frozenset[int]:
    """Return the ids that stand for images in expanded prompts, if the processor names any."""
    named_ids = getattr(processor, "image_token_ids", None) or ()
    ids = frozenset(token_id for token_id in named_ids if isinstance(token_id, int))
    marker = getattr(processor, "image_token", None)
    if ids or not isinstance(marker, str):
        return ids
    token_id = text_tokenizer(processor).convert_tokens_to_ids(marker)
    return frozenset([token_id]) if isinstance(token_id, int) else frozenset()


def image_markers(processor: Any) -> list[str]:
    """Return texts that may stand for one image in this processor's prompts, to try in order.

    Most processors expand their image token; others expand a different token, or one between two
    marks.
    """
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str):
        return []
    markers = [token]
    other = getattr(processor, "image_placeholder_token", None)
    if isinstance(other, str):
        markers.append(other)
    start = getattr(processor, "image_start_token", None)
    end = getattr(processor, "image_end_token", None)
    if isinstance(start, str) and isinstance(end, str):
        markers.append(f"{start}{token}{end}")
    return markers


def image_input_names(processor: Any) -> frozenset[str]:
    """Return the names of the tensors that the processor makes from images alone."""
    return frozenset(getattr(processor.image_processor, "model_input_names", None) or ())


def placeholder_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that stand for images, videos and sounds in the model's config."""
    ids = set()
    for name in PLACEHOLDERS:
        token_id = getattr(model.config, name, None)
        if isinstance(token_id, int) and token_id >= 0:
            ids.add(token_id)
    return frozenset(ids)


def never_sampled_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the placeholders that no sequence samples unless its `logit_bias` names them.

    Ids that end sequences by default are excluded.
    """
    return tuple(sorted(placeholder_token_ids(model).difference(model_eos_token_ids(model))))


def image_argument_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the argument names of the forward, and of the inner model if it passes them on.

    Read from the class, like `forward_argument_names`.
    """
    names = forward_argument_names(model)
    inside = model.base_model
    if inside is not model and forward_passes_on(model):
        names |= frozenset(inspect.signature(type(inside).forward).parameters)
    return names


def prompt_positions(
    model: Any, input_ids_1T: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the position ids that `generate` gives a prompt with images, `[1, T]` or `[A, 1, T]`.

    The last of A axes is for images; if there are four, the first counts tokens. Call it inside
    `keeping_position_offsets`, entered once for many prompts because it visits every module.
    """
    inputs = {"input_ids": input_ids_1T, "attention_mask": torch.ones_like(input_ids_1T), **tensors}
    return model._prepare_position_ids_for_generation(input_ids_1T, inputs)


@contextmanager
def keeping_position_offsets(model: torch.nn.Module) -> Iterator[None]:
    """Restore the position offsets that forwards store on modules for the next forward.

    Training shares the modules, and a later forward of other rows would read the offsets.
    """
    kept = []
    for module in model.modules():
        if "rope_deltas" in vars(module):
            kept.append((module, module.rope_deltas))
    try:
        yield
    finally:
        for module, offsets in kept:
            module.rope_deltas = offsets
