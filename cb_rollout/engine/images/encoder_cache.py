"""Keep the features of images: what the vision tower and the projector make of their pixels.

A model computes features in a method of its own, which is replaced during a forward: of images that
are known it returns what was kept, and of the others it calls the model's own. All else (where the
features go, masks, positions) stays the model's. Called by the thread that steps the engine.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers.utils import ModelOutput

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.metrics.registry import EngineCounters

FEATURES = multimodal.IMAGE_FEATURES

# Fields of an encoder's output that no forward reads, where the features are in another one.
# Emu3's image_tokens are a list of images, of several sizes, not of layers.
UNUSED_FIELDS = ("hidden_states", "attentions", "image_tokens")
# Numbers of the tensors of one encoder call for several images: 12 images of 336 x 336 pixels.
MAX_BATCH_NUMBERS = 1 << 22

ImageKey = tuple[int, bytes]
"""Number of an encoder, and hashes of its images."""

POOLED, UNPOOLED = "pooler_output", "last_hidden_state"


class GivenImages(NamedTuple):
    """The images of one prompt that a forward computes."""

    images: PromptImages
    numbers: range
    """Numbers of the spans that it computes."""
    given: Mapping[str, torch.Tensor]
    """Their tensors by name, on the device of the forward."""


class EncoderCache:
    """Features of the images that were read last, under one policy version."""

    def __init__(self, max_bytes: int = 0, counters: EngineCounters | None = None) -> None:
        """Start empty.

        Args:
            max_bytes: bytes to keep; those read longest ago are forgotten first. 0: none are kept.
            counters: counts images encoded and reused.
        """
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.is_used = True
        """False where a model's forward differs if it reads features that are kept."""
        self.is_batched = False
        """True if new images of one shape are encoded in one call: the check of images found that
        their features are those of each alone."""
        self.outlines: dict[int, Any] = {}
        """The form of each encoder's features of one image."""
        self.is_encoding = False
        """True while a model's own method computes features."""
        self.counters = counters or EngineCounters()
        self._features: OrderedDict[ImageKey, tuple[Any, int]] = OrderedDict()

    def empty_for_trial(self) -> "EncoderCache":
        """Return an empty cache that encodes in batches, counts nowhere, and may be thrown away."""
        trial = EncoderCache(self.max_bytes)
        trial.is_used, trial.is_batched, trial.outlines = self.is_used, True, self.outlines
        return trial

    def clear(self) -> None:
        """Forget all features: they are of older weights, or their memory is wanted."""
        self._features.clear()
        self.num_bytes = 0

    @contextmanager
    def serving(
        self,
        model: torch.nn.Module,
        prompts: Sequence[GivenImages],
        given: Mapping[str, torch.Tensor],
    ) -> Iterator[None]:
        """Have the model read known features in a forward of prompts with images.

        Args:
            model: the model whose forward runs inside.
            prompts: the images of each prompt, in the order of the forward.
            given: the tensors that the forward is given, by name: those of all prompts, joined.
        """
        encoders = multimodal.image_encoders(model) if self.is_used else []
        with ExitStack() as stack:
            for index, encoder in enumerate(encoders):
                read = _Reading(self, getattr(encoder, FEATURES), index, prompts, given)
                stack.enter_context(multimodal.replacing_image_features(encoder, read))
            yield
        if not encoders:
            self.counters.images_encoded += sum(len(prompt.numbers) for prompt in prompts)

    def found(self, key: ImageKey, num_images: int, encode: Callable[[], Any]) -> Any:
        """Return the features of images by their key, computed by `encode` where not known."""
        if key in self._features:
            self._features.move_to_end(key)
            self.counters.images_reused += num_images
            return self._features[key][0]
        features = _slim(self.encoded(encode))
        if num_images == 1:
            self.outlines[key[0]] = _outline(features)
        self.keep(key, num_images, features)
        return features

    def encoded(self, encode: Callable[[], Any]) -> Any:
        """Return what a model's own method computes."""
        self.is_encoding = True
        try:
            # A packed forward replaces the attention of the language model alone.
            with hf_compat.keeping_attention():
                return encode()
        finally:
            self.is_encoding = False

    def keep(self, key: ImageKey, num_images: int, features: Any) -> None:
        """Keep features that were just computed, and forget older ones to make room."""
        self.counters.images_encoded += num_images
        num_bytes = sum(tensor.nbytes for tensor in _tensors(features))
        if num_bytes > self.max_bytes:
            return
        while self.num_bytes + num_bytes > self.max_bytes:
            _, (_, freed) = self._features.popitem(last=False)
            self.num_bytes -= freed
        self._features[key] = features, num_bytes
        self.num_bytes += num_bytes

    def __contains__(self, key: ImageKey) -> bool:
        """Return whether features are known."""
        return key in self._features


class _Part(NamedTuple):
    """Images of a prompt that are encoded together: one where they can be told apart."""

    prompt: GivenImages
    numbers: range
    key: ImageKey

    def tensor(self, name: str) -> torch.Tensor:
        """Return the images' part of a tensor, on the device of the forward."""
        prompt = self.prompt
        return prompt.images.part(name, prompt.given[name], self.numbers, prompt.numbers)

    def shape(self, names: Sequence[str]) -> Hashable:
        """Return what is the same for images that the encoder may compute as one batch.

        Pixels have the same sizes, and all other tensors, which say how to read them, the same
        values.
        """
        images = self.prompt.images
        everything = range(len(images.spans))
        parts = [images.part(n, images.tensors[n], self.numbers, everything) for n in names]
        return tuple(
            (name, part.shape, None if part.is_floating_point() else str(part.tolist()))
            for name, part in zip(names, parts, strict=True)
        )


@dataclass(slots=True)
class _Reading:
    """The replaced method of one encoder, during one forward."""

    cache: EncoderCache
    own: Callable[..., Any]
    index: int
    """Of the encoder, among the model's."""
    prompts: Sequence[GivenImages]
    given: Mapping[str, torch.Tensor]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return what the model's own method does, each image computed once.

        Where each tensor that the method is given is known to divide into images, an image that was
        not read before is computed alone or beside others of its shape; else those of a prompt are
        computed together, or those of all prompts.
        """
        if self.cache.is_encoding:
            # One encoder calls another, whose output is a part of its own.
            return self.own(*arguments, **named)
        names = {id(tensor): name for name, tensor in self.given.items()}
        tensors = [v for v in (*arguments, *named.values()) if isinstance(v, torch.Tensor)]
        is_known = all(id(tensor) in names for tensor in tensors)
        if len(self.prompts) > 1 and not is_known:
            digests = [p.images.digests[n] for p in self.prompts for n in p.numbers]
            own = partial(self.own, *arguments, **named)
            return self.cache.found((self.index, b"".join(digests)), len(digests), own)

        parts: list[_Part] = []
        for prompt in self.prompts:
            is_divided = is_known and prompt.images.divisions is not None
            numbers = prompt.numbers
            for chosen in [range(n, n + 1) for n in numbers] if is_divided else [numbers]:
                digests = b"".join(prompt.images.digests[n] for n in chosen)
                parts.append(_Part(prompt, chosen, (self.index, digests)))

        def encode(*together: _Part) -> Any:
            def chosen(value: Any) -> Any:
                if id(value) not in names or not is_known:
                    return value
                name = names[id(value)]
                tensors = [part.tensor(name) for part in together]
                return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

            return self.own(*map(chosen, arguments), **{n: chosen(v) for n, v in named.items()})

        made: dict[ImageKey, Any] = {}
        is_batched = self.cache.is_batched and self.index in self.cache.outlines
        if is_known and is_batched and len(parts) > 1:
            made = self._encoded_batches(parts, [names[id(tensor)] for tensor in tensors], encode)
            num_read = sum(part.key in made for part in parts)
            self.cache.counters.images_reused += num_read - len(made)
        features = [
            made[part.key]
            if part.key in made
            else self.cache.found(part.key, len(part.numbers), partial(encode, part))
            for part in parts
        ]
        return _joined(features)

    def _encoded_batches(
        self, parts: Sequence[_Part], names: Sequence[str], encode: Callable[..., Any]
    ) -> dict[ImageKey, Any]:
        """Return the features of new images that share a call with others of their shape.

        Where the output cannot be divided there are none, and no batch is tried again.
        """
        made: dict[ImageKey, Any] = {}
        new = {part.key: part for part in parts if part.key not in self.cache}
        batches: dict[Hashable, list[_Part]] = {}
        for part in new.values():
            if len(part.numbers) == 1:
                batches.setdefault(part.shape(names), []).append(part)
        for batch in batches.values():
            size = max(1, MAX_BATCH_NUMBERS // sum(batch[0].tensor(n).numel() for n in names))
            for first in range(0, len(batch), size):
                together = batch[first : first + size]
                if len(together) == 1 or not self.cache.is_batched:
                    continue
                output = _slim(self.cache.encoded(partial(encode, *together)))
                divided = _divided(output, self.cache.outlines[self.index], len(together))
                if divided is None:
                    self.cache.is_batched = False
                    continue
                for part, features in zip(together, divided, strict=True):
                    made[part.key] = _slim(features)
                    self.cache.keep(part.key, 1, made[part.key])
        return made


def _slim(output: Any) -> Any:
    """Return an encoder's output without what only its own layers read.

    Parts of larger tensors are copied, so that these can be freed.
    """
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


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an encoder's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, list | tuple | ModelOutput):
        values = output.values() if isinstance(output, ModelOutput) else output
        for value in values:
            yield from _tensors(value)


def _outline(output: Any) -> Any:
    """Return an encoder's output with None for each tensor."""
    if isinstance(output, ModelOutput):
        return {name: _outline(value) for name, value in output.items()}
    return [_outline(value) for value in output] if isinstance(output, list | tuple) else None


def _divided(output: Any, outline: Any, num_images: int) -> list[Any] | None:
    """Return the output for each image from the slim output for several of one shape.

    `outline`: of the output for one image. A list that is longer than its own is one of images, any
    other list is one of layers. None: the output does not divide.
    """
    if isinstance(output, torch.Tensor):
        is_whole = output.dim() > 0 and output.shape[0] % num_images == 0
        return list(output.chunk(num_images)) if is_whole and outline is None else None
    if isinstance(output, ModelOutput):
        if not isinstance(outline, dict) or outline.keys() != output.keys():
            return None
        parts = [_divided(output[name], outline[name], num_images) for name in output]
        each = _transposed(parts, num_images)
        return each and [type(output)(**dict(zip(output, one, strict=True))) for one in each]
    if not isinstance(output, list | tuple) or not isinstance(outline, list):
        return None
    if outline and len(output) == num_images * len(outline):
        size = len(outline)
        return [type(output)(output[n * size :][:size]) for n in range(num_images)]
    if len(output) != len(outline):
        return None
    pairs = zip(output, outline, strict=True)
    each = _transposed([_divided(*pair, num_images) for pair in pairs], num_images)
    return each and [type(output)(one) for one in each]


def _transposed(parts: Sequence[list[Any] | None], num_images: int) -> list[list[Any]] | None:
    """Return for each image the part that it has of every value; None: a value does not divide."""
    divided = [part for part in parts if part is not None]
    if len(divided) < len(parts):
        return None
    return [[part[n] for part in divided] for n in range(num_images)]


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
