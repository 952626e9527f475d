"""Reach past the public API of transformers' models and processors that read images (5.23).

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

# Suffixes of a config's names of placeholders: `image_token_id`, `video_token_index`, ...
PLACEHOLDERS = tuple(
    f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")
)


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether a checkpoint's model reads images: one that `AutoModelForImageTextToText` has.

    Some types have a model of text alone too; then the checkpoint's `architectures` decide.
    """
    reader = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if config.architectures:
        return config.architectures[0] == reader
    return reader is not None and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def is_processor(tokenizer: Any) -> bool:
    """Return whether this is a processor of images, not a tokenizer of text alone."""
    return getattr(tokenizer, "image_processor", None) is not None


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer inside a processor, or the tokenizer itself."""
    return tokenizer.tokenizer if is_processor(tokenizer) else tokenizer


def image_token_ids(processor: Any) -> frozenset[int]:
    """Return the ids that stand for images in expanded prompts; empty: the processor names none."""
    ids = list(getattr(processor, "image_token_ids", None) or ())
    marker = getattr(processor, "image_token", None)
    if not any(isinstance(token_id, int) for token_id in ids) and isinstance(marker, str):
        ids = [text_tokenizer(processor).convert_tokens_to_ids(marker)]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def image_markers(processor: Any) -> list[str]:
    """Return texts that may stand for one image in a prompt of this processor; the first that does.

    Most expand their image token; others another token in its place, or one between two marks.
    """
    names = ("image_token", "image_placeholder_token", "image_start_token", "image_end_token")
    token, other, start, end = (getattr(processor, name, None) for name in names)
    if not isinstance(token, str):
        return []
    marked = f"{start}{token}{end}" if isinstance(start, str) and isinstance(end, str) else None
    return [text for text in (token, other, marked) if isinstance(text, str)]


def image_input_names(processor: Any) -> frozenset[str]:
    """Return the names of the tensors that the processor makes of images alone."""
    return frozenset(getattr(processor.image_processor, "model_input_names", None) or ())


def placeholder_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that stand for images, videos and sounds, by the model's config."""
    ids = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return frozenset(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


def never_sampled_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the placeholders that no sequence samples unless its `logit_bias` names them.

    An id that ends sequences by default is none of them.
    """
    return tuple(sorted(placeholder_token_ids(model) - {*model_eos_token_ids(model)}))


def image_argument_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the argument names of the forward, and of the model inside that it passes them on to.

    Read from the class, as `forward_argument_names`.
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

    Of A axes the last one is of images; where there are four, the first counts tokens. Called
    inside `keeping_position_offsets`, which looks at every module: once for many prompts.
    """
    inputs = {"input_ids": input_ids_1T, "attention_mask": torch.ones_like(input_ids_1T), **tensors}
    return model._prepare_position_ids_for_generation(input_ids_1T, inputs)


@contextmanager
def keeping_position_offsets(model: torch.nn.Module) -> Iterator[None]:
    """Restore what forwards leave on modules for their next one: the offset of positions.

    Training shares the modules, and a later forward of other rows would read it.
    """
    kept = [(m, m.rope_deltas) for m in model.modules() if "rope_deltas" in vars(m)]
    try:
        yield
    finally:
        for module, offsets in kept:
            module.rope_deltas = offsets
