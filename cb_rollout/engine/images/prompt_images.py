"""Hold the images of a prompt one by one: their tokens, tensors, hashes and positions.

Made in the caller's thread, shared by a group, and read by the thread that steps the engine.
Tensors stay in system memory; `ImageInputs` copies them to a forward's device.
A: axes of positions, T: tokens of the prompt, N: images of the prompt.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory import device as devices

DIGEST_BYTES = 16

# Part of the names of tensors with an image's rows and columns; their product counts its patches.
GRID = "grid"
MAX_GRID_AXES = 3


class Image(NamedTuple):
    """One image of a prompt, or all images if their tensors cannot be divided."""

    tokens: range
    """Range of the image's tokens in the prompt."""
    digest: bytes
    """A hash of its tensors."""
    tensors: Mapping[str, torch.Tensor]
    """Its rows of the forward's arguments, by name."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    images: tuple[Image, ...]
    """In the order of the prompt; at least one."""
    num_prompt_tokens: int
    """T."""
    of_tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Per-token arguments of the forward, `[1, T, ...]`."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Dimension along which the images' tensors are concatenated."""
    is_divided: bool = False
    """True if each image has separate tensors."""
    may_be_cut: bool = False
    """True if a forward may begin before any image, as the engine's check of its model showed."""
    position_offset: int | None = None
    """Position of a token after the images, minus its index; None: not computed yet."""
    positions: torch.Tensor | None = None
    """int64 `[1, T]` or `[A, 1, T]`, of A axes, on the CPU: position ids of the prompt's tokens.
    None: not computed yet."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return (has several images, images have separate tensors); each pair is checked once."""
        return len(self.images) > 1, self.is_divided

    @property
    def num_tokens(self) -> int:
        """Return the tokens up to the end of the last image: one forward computes them."""
        return self.images[-1].tokens.stop

    @property
    def digest(self) -> bytes:
        joined = b"".join(image.digest for image in self.images)
        return hashlib.blake2b(joined, digest_size=DIGEST_BYTES).digest()

    def num_resumable(self, num_tokens: int) -> int:
        """Return the length of the longest prefix up to `num_tokens` that ends outside an image."""
        if num_tokens >= self.num_tokens:
            return num_tokens
        if not self.may_be_cut or not self.is_divided:
            return 0
        for image in self.images:
            if num_tokens in image.tokens:
                return image.tokens.start
        return num_tokens

    def after(self, start: int) -> list[Image]:
        """Return the images of a forward that begins at token `start`."""
        return [image for image in self.images if image.tokens.stop > start]

    def arguments(
        self,
        start: int,
        stop: int,
        names: frozenset[str],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of images for a forward of some tokens.

        Args:
            start: the first token.
            stop: the end of the tokens; those after the prompt are sampled, and have zeros.
            names: arguments that the model's forward takes.
            device: device of the returned tensors.
            dtype: dtype of floating-point tensors; None: unchanged.
        """
        tensors = self._tensors_of_images(start, stop, names)
        tensors |= self._tensors_of_tokens(start, stop, names)
        arguments: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            cast_to = dtype if tensor.is_floating_point() else tensor.dtype
            arguments[name] = tensor.to(device, cast_to)
        return arguments

    def _tensors_of_images(
        self, start: int, stop: int, names: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of the images that a forward of these tokens computes."""
        computed = [image for image in self.after(start) if image.tokens.start < stop]
        if not computed:
            return {}
        tensors: dict[str, torch.Tensor] = {}
        for name in computed[0].tensors:
            if name in names:
                of_each_image = [image.tensors[name] for image in computed]
                tensors[name] = joined(of_each_image, self.dims.get(name, 0))
        return tensors

    def _tensors_of_tokens(
        self, start: int, stop: int, names: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Return the slice of the per-token tensors for these tokens."""
        num_sampled = max(0, stop - self.num_prompt_tokens)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.of_tokens.items():
            if name in names:
                zeros = tensor.new_zeros(1, num_sampled, *tensor.shape[2:])
                tensors[name] = joined([tensor, zeros], 1)[:, start:stop]
        return tensors

    def before(self, number: int) -> "PromptImages":
        """Return the images of the prompt's prefix that ends where image `number` begins."""
        stop = self.images[number].tokens.start
        of_tokens = {name: tensor[:, :stop] for name, tensor in self.of_tokens.items()}
        return PromptImages(
            images=self.images[:number],
            num_prompt_tokens=stop,
            of_tokens=of_tokens,
            dims=self.dims,
            is_divided=self.is_divided,
        )

    def with_images_of(
        self, token_ids: Sequence[int], other: "PromptImages", other_ids: Sequence[int]
    ) -> tuple[list[int], "PromptImages"]:
        """Return this prompt with the images, and their tokens, of another with as many images.

        Args:
            token_ids: this prompt; what follows its T tokens is left out.
            other: the images to take.
            other_ids: the tokens of their prompt.
        """
        T = self.num_prompt_tokens
        # For each token of the new prompt: its index in this prompt followed by the other prompt.
        index: list[int] = []
        images: list[Image] = []
        end_of_last = 0
        for image, other_image in zip(self.images, other.images, strict=True):
            index += range(end_of_last, image.tokens.start)
            first = len(index)
            index += range(T + other_image.tokens.start, T + other_image.tokens.stop)
            images.append(other_image._replace(tokens=range(first, len(index))))
            end_of_last = image.tokens.stop
        index += range(end_of_last, T)

        of_tokens: dict[str, torch.Tensor] = {}
        for name, tensor in self.of_tokens.items():
            both = torch.cat([tensor, other.of_tokens[name]], 1)
            of_tokens[name] = both[:, index]
        both_ids = [*token_ids[:T], *other_ids]
        with_others = PromptImages(
            images=tuple(images),
            num_prompt_tokens=len(index),
            of_tokens=of_tokens,
            dims=other.dims,
            is_divided=other.is_divided,
        )
        return [both_ids[i] for i in index], with_others

    def cache_keys(self, token_ids: Sequence[int], start: int, stop: int) -> list[Hashable]:
        """Return the prefix-cache keys of the tokens from `start` to `stop`.

        An image token's key is its id, a hash and its index in the image. The hash covers all
        images, unless a forward may begin after this one, because the token may attend to later
        images.
        """
        keys: list[Hashable] = list(token_ids[start:stop])
        digest_of_all = self.digest
        for image in self.images:
            digest = image.digest if self.may_be_cut else digest_of_all
            first = image.tokens.start
            for index in range(max(start, first), min(stop, image.tokens.stop)):
                keys[index - start] = (token_ids[index], digest, index - first)
        return keys


class ImageInputs:
    """Provide a model's forward with image tensors, and with positions of prompts with images."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._names = multimodal.image_argument_names(model)
        self.casts_pixels = False
        """True if pixels are cast to the model's dtype, because its forward takes no other."""

    @contextmanager
    def casting_pixels(self, casts_pixels: bool) -> Iterator[None]:
        """Cast pixels to the model's dtype during the block, or leave them unchanged."""
        before = self.casts_pixels
        self.casts_pixels = casts_pixels
        try:
            yield
        finally:
            self.casts_pixels = before

    def are_read(self, images: PromptImages) -> bool:
        """Return whether the model's forward accepts the images' pixels."""
        for name, tensor in images.images[0].tensors.items():
            if name in self._names and tensor.is_floating_point():
                return True
        return False

    def arguments(self, images: PromptImages, start: int, stop: int) -> dict[str, torch.Tensor]:
        dtype = self._model.dtype if self.casts_pixels else None
        return images.arguments(start, stop, self._names, self._device, dtype)

    def positions(self, images: PromptImages, start: int, stop: int) -> torch.Tensor:
        """Return position ids, `[1, tokens]` or `[A, 1, tokens]`; beyond the prompt, of text."""
        assert images.positions is not None
        assert images.position_offset is not None
        of_prompt = images.positions[..., start:stop].to(self._device)
        offset = images.position_offset
        first_later = max(start, images.num_prompt_tokens)
        end = max(first_later, stop)
        later = torch.arange(first_later + offset, end + offset, device=self._device)
        later_on_each_axis = later.expand(*of_prompt.shape[:-1], -1)
        return torch.cat([of_prompt, later_on_each_axis], -1)

    def find_positions(self, prompts: Sequence[tuple[Sequence[int], PromptImages]]) -> None:
        """Compute the missing positions of prompts with images."""
        new = [(ids, images) for ids, images in prompts if images.positions is None]
        if not new:
            return
        # One more token, which is text: after a prompt that ends in an image, the next position is
        # not the last one plus one.
        text_id = hf_compat.text_token_ids(self._model)[0]
        with multimodal.keeping_position_offsets(self._model):
            for prompt_ids, images in new:
                num_tokens = len(prompt_ids)
                input_ids_1T = devices.to_device([[*prompt_ids, text_id]], self._device)
                arguments = self.arguments(images, 0, num_tokens + 1)
                positions = multimodal.prompt_positions(self._model, input_ids_1T, arguments)
                images.position_offset = int(positions.flatten()[-1]) - num_tokens
                images.positions = positions[..., :num_tokens].cpu()


def create_prompt_images(
    tensors: Mapping[str, torch.Tensor],
    spans: Sequence[range],
    num_images: int,
    per_token: frozenset[str],
    token_ids: Sequence[int],
) -> PromptImages:
    """Divide a processor's tensors among the images if possible, and hash them.

    Args:
        tensors: by name, on the CPU.
        spans: range of each image's tokens, or one span for all N images if they are adjacent.
        num_images: N.
        per_token: names of the tensors with one value per token.
        token_ids: the T tokens of the prompt.
    """
    of_images: dict[str, torch.Tensor] = {}
    of_tokens: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in per_token:
            of_tokens[name] = tensor
        else:
            of_images[name] = tensor
    division = None
    if num_images > 1 and len(spans) == num_images:
        division = _divided(of_images, _num_placeholders(spans, token_ids))
    if division is None:
        whole = range(spans[0].start, spans[-1].stop)
        spans = [whole]
        division = _Division(dims={}, tensors=[of_images])
    images = []
    for span, of_image in zip(spans, division.tensors, strict=True):
        images.append(Image(span, tensors_digest(of_image), of_image))
    return PromptImages(
        images=tuple(images),
        num_prompt_tokens=len(token_ids),
        of_tokens=of_tokens,
        dims=division.dims,
        is_divided=len(images) == num_images,
    )


def _num_placeholders(spans: Sequence[range], token_ids: Sequence[int]) -> list[int]:
    """Return how often the most frequent token of all spans occurs in each span.

    An image may begin and end with marker tokens, which do not stand for any part of it.
    """
    of_spans = [token_ids[span.start : span.stop] for span in spans]
    counts: Counter[int] = Counter()
    for ids in of_spans:
        counts.update(ids)
    placeholder, _ = counts.most_common(1)[0]
    return [ids.count(placeholder) for ids in of_spans]


class _Division(NamedTuple):
    """The tensors of a prompt, divided into those of its images."""

    dims: dict[str, int]
    """The dimension along which each tensor was divided."""
    tensors: list[dict[str, torch.Tensor]]
    """The tensors of each image."""


def _divided(tensors: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> _Division | None:
    """Divide tensors among the images by their token counts; None if that is impossible."""
    division = _Division({}, [{} for _ in lengths])
    for name, tensor in tensors.items():
        shares = _shares(tensor, tensors, lengths)
        if shares is None:
            return None
        division.dims[name] = shares.dim
        parts = tensor.split(shares.sizes, shares.dim)
        for of_image, part in zip(division.tensors, parts, strict=True):
            of_image[name] = part.clone()
    return division


class _Shares(NamedTuple):
    """The share of a tensor that belongs to each image."""

    dim: int
    sizes: list[int]


def _shares(
    tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> _Shares | None:
    """Return each image's share of a tensor; None: it cannot be determined.

    A share is one row, or one column of a single row, if there are as many as images. Otherwise,
    rows are divided as a tensor of grids or counts says, or in proportion to the token counts.

    Args:
        tensor: the tensor to divide.
        tensors: all tensors of the prompt's images, by name.
        lengths: tokens that each image takes.
    """
    N = len(lengths)
    if not tensor.dim():
        return None
    num_rows = tensor.shape[0]
    if num_rows == N:
        return _Shares(0, [1] * N)
    if num_rows == 1 and tensor.dim() > 1 and tensor.shape[1] == N:
        return _Shares(1, [1] * N)
    if not num_rows:
        return None
    weights_of_images = _grid_products(tensors, N)
    weights_of_images += _counts(tensors, N, num_rows)
    weights_of_images.append(list(lengths))
    for weights in weights_of_images:
        sizes = _in_proportion(num_rows, weights)
        if sizes is not None:
            return _Shares(0, sizes)
    return None


def _in_proportion(num_rows: int, weights: Sequence[int]) -> list[int] | None:
    """Divide a number of rows in proportion to weights; None if a share is not an integer."""
    total = sum(weights)
    if not total:
        return None
    sizes: list[int] = []
    for weight in weights:
        size, remainder = divmod(weight * num_rows, total)
        if remainder:
            return None
        sizes.append(size)
    return sizes


def _about_images(tensors: Mapping[str, torch.Tensor], N: int) -> dict[str, torch.Tensor]:
    """Return integer tensors with one row per image."""
    about: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() and len(tensor) == N and not tensor.is_floating_point():
            about[name] = tensor
    return about


def _grid_products(tensors: Mapping[str, torch.Tensor], N: int) -> list[list[int]]:
    """Return each image's number of patches, from each tensor that holds rows and columns."""
    products = []
    for name, tensor in _about_images(tensors, N).items():
        if GRID in name and tensor.dim() == 2 and 1 < tensor.shape[1] <= MAX_GRID_AXES:
            products.append(tensor.prod(1).tolist())
    return products


def _counts(tensors: Mapping[str, torch.Tensor], N: int, num_rows: int) -> list[list[int]]:
    """Return per-image counts that add up to `num_rows`, from each tensor that has them."""
    counts = []
    for tensor in _about_images(tensors, N).values():
        if tensor.dim() == 1 and int(tensor.sum()) == num_rows:
            counts.append(tensor.tolist())
    return counts


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors along `dim`, without a copy of a single tensor."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors), dim)


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a hash of tensors by name: their dtypes, shapes and bytes."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        hashed.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        hashed.update(values.view(torch.uint8).numpy().tobytes())
    return hashed.digest()
