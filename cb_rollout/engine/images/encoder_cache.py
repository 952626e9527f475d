"""Keep the features of images: what the vision tower and the projector make of their pixels.

A model computes features in a method of its own, which is replaced during a forward: of images that
are known it returns what was kept, and each other image is computed by the model's own. All else
(where the features go, masks, positions) stays the model's. Called by the thread that steps the
engine.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.images.prompt_images import Image
from cb_rollout.metrics.registry import EngineCounters

FEATURES = multimodal.IMAGE_FEATURES

# Fields of an encoder's output that no forward reads, where the features are in another one.
# Emu3's image_tokens are a list of images, of several sizes, not of layers.
UNUSED_FIELDS = ("hidden_states", "attentions", "image_tokens")

POOLED, UNPOOLED = "pooler_output", "last_hidden_state"


class EncoderCache:
    """Features of the images that were read last, under one policy version."""

    def __init__(self, max_bytes: int = 0, counters: EngineCounters | None = None) -> None:
        """Start empty; keep at most `max_bytes`, forgetting first the features read longest ago."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.is_used = True
        """False where a model's forward differs if it reads features that are kept."""
        self.counters = counters or EngineCounters()
        self._is_encoding = False
        self._features: OrderedDict[tuple[int, bytes], tuple[Any, int]] = OrderedDict()

    def clear(self) -> None:
        self._features.clear()
        self.num_bytes = 0

    @contextmanager
    def installed(
        self, model: torch.nn.Module, images: Sequence[Image], given: Mapping[str, torch.Tensor]
    ) -> Iterator[None]:
        """Have the model read known features in a forward of prompts with images.

        `images` are the forward's, on its device; `given` its tensors of all images, joined, by
        name.
        """
        encoders = multimodal.image_encoders(model) if self.is_used else []
        with ExitStack() as stack:
            for number, encoder in enumerate(encoders):
                own = getattr(encoder, FEATURES)
                read = partial(self._read, own, number, images, given)
                stack.enter_context(multimodal.replacing_image_features(encoder, read))
            yield
        if not encoders:
            self.counters.images_encoded += len(images)

    def _read(
        self,
        own: Callable[..., Any],
        encoder: int,
        images: Sequence[Image],
        given: Mapping[str, torch.Tensor],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Return an encoder's output, image by image unless it gets other tensors than these."""
        if self._is_encoding:
            # One encoder calls another, whose output is a part of its own.
            return own(*arguments, **named)
        names = {id(given[name]): name for name in images[0].tensors}
        values = (*arguments, *named.values())
        if not all(id(v) in names for v in values if isinstance(v, torch.Tensor)):
            digest = b"".join(image.digest for image in images)
            encode = partial(own, *arguments, **named)
            return self._cached((encoder, digest), len(images), encode)

        def encode_alone(image: Image) -> Any:
            def of_image(value: Any) -> Any:
                return image.tensors[names[id(value)]] if id(value) in names else value

            return own(*map(of_image, arguments), **{n: of_image(v) for n, v in named.items()})

        return _joined(
            [self._cached((encoder, i.digest), 1, partial(encode_alone, i)) for i in images]
        )

    def _cached(self, key: tuple[int, bytes], num_images: int, encode: Callable[[], Any]) -> Any:
        if key in self._features:
            self._features.move_to_end(key)
            self.counters.images_reused += num_images
            return self._features[key][0]
        self._is_encoding = True
        try:
            # A packed forward replaces the attention of the language model alone.
            with hf_compat.keeping_attention():
                features = _slim(encode())
        finally:
            self._is_encoding = False
        self.counters.images_encoded += num_images
        leaves = pytree.tree_leaves(features)
        num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        if num_bytes <= self.max_bytes:
            while self.num_bytes + num_bytes > self.max_bytes:
                _, (_, freed) = self._features.popitem(last=False)
                self.num_bytes -= freed
            self._features[key] = features, num_bytes
            self.num_bytes += num_bytes
        return features


def _slim(output: Any) -> Any:
    """Drop what only the encoder's layers read; copy parts, so that larger tensors are freed."""
    if isinstance(output, torch.Tensor):
        is_part = output.untyped_storage().nbytes() > output.nbytes
        return output.clone() if is_part else output
    if isinstance(output, ModelOutput):
        dropped = {*UNUSED_FIELDS, *([UNPOOLED] if POOLED in output else [])}
        kept = {name: _slim(value) for name, value in output.items() if name not in dropped}
        return type(output)(**kept)
    if isinstance(output, list | tuple):
        return type(output)([_slim(value) for value in output])
    return output


def _joined(outputs: Sequence[Any], *, are_of_images: bool = False) -> Any:
    """Return the output for several images from the outputs for each.

    A list of pooled features is one of images, and grows; any other list is one of layers. Where
    that is not so, the forward differs from the plain one, and the check of images finds it.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs)) if first.dim() else first
    if isinstance(first, ModelOutput):
        fields = {
            name: _joined([output[name] for output in outputs], are_of_images=name == POOLED)
            for name in first
        }
        return type(first)(**fields)
    if isinstance(first, list | tuple):
        parts = chain(*outputs) if are_of_images else map(_joined, zip(*outputs, strict=True))
        return type(first)(parts)
    return first
