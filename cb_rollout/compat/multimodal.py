"""Reach past the public API of transformers' models and processors that read images (5.23).

T: tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat.transformers import forward_argument_names, forward_passes_on

# Suffixes of a config's names of placeholders: `image_token_id`, `video_token_index`, ...
PLACEHOLDERS = tuple(
    f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")
)


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


def placeholder_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that stand for images, videos and sounds, by the model's config."""
    ids = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return frozenset(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


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

    Of A axes the last one is of images; where there are four, the first counts tokens.
    """
    inputs = {"input_ids": input_ids_1T, "attention_mask": torch.ones_like(input_ids_1T), **tensors}
    with keeping_position_offsets(model):
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
