"""Hold the images of a prompt one by one: their tokens, tensors, hashes and positions.

Made in the caller's thread, shared by a group, and read by the thread that steps the engine.
Tensors stay in system memory; `ImageInputs` copies them to a forward's device.
A: axes of positions, T: tokens of the prompt, N: images of the prompt.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.memory import device as devices

DIGEST_BYTES = 16

# A part of the names of tensors that hold an image's rows and columns, whose product it takes.
GRID = "grid"
MAX_GRID_AXES = 3


class Image(NamedTuple):
    """One image of a prompt, or all of them where their tensors cannot be divided."""

    tokens: range
    """Indices of the prompt's tokens that stand for it."""
    digest: bytes
    """A hash of its tensors."""
    tensors: Mapping[str, torch.Tensor]
    """Its rows of the forward's arguments by name."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    images: tuple[Image, ...]
    """In the order of the prompt; at least one."""
    num_prompt_tokens: int
    """T."""
    of_tokens: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Arguments that hold a number for each token, `[1, T, ...]`."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """Dimension along which the images' tensors are joined."""
    is_divided: bool = False
    """True if each image has tensors of its own."""
    may_be_cut: bool = False
    """True if a forward may begin before any of the images, as an engine found of its model."""
    position_offset: int | None = None
    """Position of a token after the images, less its index; None: not computed yet."""
    positions: torch.Tensor | None = None
    """int64 `[1, T]` or `[A, 1, T]`, of A axes, on the CPU: position ids of the prompt's tokens.
    None: not computed yet."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return (has several images, each has its own tensors); each pair is checked once."""
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
        """Return the most tokens, up to `num_tokens`, after which a forward cuts no image."""
        if num_tokens >= self.num_tokens:
            return num_tokens
        if not self.may_be_cut or not self.is_divided:
            return 0
        starts = (i.tokens.start for i in self.images if num_tokens in i.tokens)
        return next(starts, num_tokens)

    def after(self, start: int) -> list[Image]:
        """Return the images that a forward computes which begins at token `start`."""
        return [image for image in self.images if image.tokens.stop > start]

    def arguments(
        self,
        start: int,
        stop: int,
        names: frozenset[str],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return what a forward of tokens `[start, stop)` takes by `names`, fractions in `dtype`.

        Sampled tokens have zeros.
        """

        def moved(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
            whole = joined(tensors, dim)
            return whole.to(device, dtype if whole.is_floating_point() else whole.dtype)

        new = [image.tensors for image in self.after(start) if image.tokens.start < stop]
        given = {
            name: moved([tensors[name] for tensors in new], self.dims.get(name, 0))
            for name in (new[0] if new else ())
            if name in names
        }
        missing = max(0, stop - self.num_prompt_tokens)
        for name, tensor in self.of_tokens.items():
            if name in names:
                zeros = tensor.new_zeros(1, missing, *tensor.shape[2:])
                given[name] = moved([tensor, zeros], 1)[:, start:stop]
        return given

    def before(self, number: int) -> "PromptImages":
        stop = self.images[number].tokens.start
        of_tokens = {name: tensor[:, :stop] for name, tensor in self.of_tokens.items()}
        return PromptImages(self.images[:number], stop, of_tokens, self.dims, self.is_divided)

    def with_images_of(
        self, token_ids: Sequence[int], other: "PromptImages", other_ids: Sequence[int]
    ) -> tuple[list[int], "PromptImages"]:
        """Return this prompt with the images of another, which has as many, and their tokens."""
        T, index, images, end = self.num_prompt_tokens, [], [], 0
        for own, image in zip(self.images, other.images, strict=True):
            index += range(end, own.tokens.start)
            tokens = range(len(index), len(index) + len(image.tokens))
            images.append(image._replace(tokens=tokens))
            index += range(T + image.tokens.start, T + image.tokens.stop)
            end = own.tokens.stop
        index += range(end, T)
        pairs = ((name, [own, other.of_tokens[name]]) for name, own in self.of_tokens.items())
        of_tokens = {name: torch.cat(pair, 1)[:, index] for name, pair in pairs}
        made = PromptImages(tuple(images), len(index), of_tokens, other.dims, other.is_divided)
        return [[*token_ids[:T], *other_ids][i] for i in index], made

    def cache_keys(self, token_ids: Sequence[int], start: int, stop: int) -> list[Hashable]:
        """Return the prefix-cache keys of the tokens from `start` to `stop`.

        A token of an image has its id, a hash and its index in the image. The hash is of all images
        unless a forward may begin after this one, since the later images may be in view.
        """
        keys: list[Hashable] = list(token_ids[start:stop])
        of_all = None if self.may_be_cut else self.digest
        for tokens, own, _ in self.images:
            digest = of_all or own
            for index in range(max(start, tokens.start), min(stop, tokens.stop)):
                keys[index - start] = token_ids[index], digest, index - tokens.start
        return keys


class ImageInputs:
    """Give a model's forward the tensors of images, and the positions of prompts with images."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._names = multimodal.image_argument_names(model)
        self.casts_pixels = False
        """True if pixels are cast to the model's dtype, because its forward takes no other."""

    def are_read(self, images: PromptImages) -> bool:
        tensors = images.images[0].tensors
        return any(t.is_floating_point() and name in self._names for name, t in tensors.items())

    def arguments(self, images: PromptImages, start: int, stop: int) -> dict[str, torch.Tensor]:
        dtype = self._model.dtype if self.casts_pixels else None
        return images.arguments(start, stop, self._names, self._device, dtype)

    def positions(self, images: PromptImages, start: int, stop: int) -> torch.Tensor:
        """Return position ids, `[1, tokens]` or `[A, 1, tokens]`; after the prompt, of text."""
        assert images.positions is not None
        assert images.position_offset is not None
        of_prompt = images.positions[..., start:stop].to(self._device)
        first, offset = max(start, images.num_prompt_tokens), images.position_offset
        later = torch.arange(first + offset, max(first, stop) + offset, device=self._device)
        return torch.cat([of_prompt, later.expand(*of_prompt.shape[:-1], -1)], -1)

    def find_positions(self, prompts: Sequence[tuple[Sequence[int], PromptImages]]) -> None:
        new = [prompt for prompt in prompts if prompt[1].positions is None]
        # One more token, which is text: where the prompt ends in an image, the next position is not
        # the last one plus one.
        text_id = hf_compat.text_token_ids(self._model)[0] if new else 0
        with multimodal.keeping_position_offsets(self._model) if new else nullcontext():
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
    """Divide a processor's CPU tensors into images, as far as they tell how, and hash them.

    `spans` are the indices of each image's tokens, or one of all N images where they stand
    together. `per_token` names the tensors with a number for each of the T `token_ids`.
    """
    of_images = {name: t for name, t in tensors.items() if name not in per_token}
    divided = None
    if len(spans) == num_images > 1:
        # An image may begin and end with tokens of its own, which stand for no part of it.
        of_spans = [token_ids[span.start : span.stop] for span in spans]
        ((most, _),) = Counter(chain(*of_spans)).most_common(1)
        divided = _divided(of_images, [ids.count(most) for ids in of_spans])
    if divided is None:
        spans, divided = [range(spans[0].start, spans[-1].stop)], ({}, [of_images])
    dims, each = divided
    return PromptImages(
        tuple(Image(span, tensors_digest(own), own) for span, own in zip(spans, each, strict=True)),
        len(token_ids),
        {name: tensors[name] for name in tensors if name in per_token},
        dims,
        is_divided=len(each) == num_images,
    )


def _divided(
    tensors: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> tuple[dict[str, int], list[dict[str, torch.Tensor]]] | None:
    """Return each tensor's dimension of division, and each image's tensors; None: nothing tells."""
    dims: dict[str, int] = {}
    each: list[dict[str, torch.Tensor]] = [{} for _ in lengths]
    for name, tensor in tensors.items():
        if (division := _division(tensor, tensors, lengths)) is None:
            return None
        dims[name], sizes = division
        for own, part in zip(each, tensor.split(sizes, dims[name]), strict=True):
            own[name] = part.clone()
    return dims, each


def _division(
    tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], lengths: Sequence[int]
) -> tuple[int, list[int]] | None:
    """Return a dimension, and each image's share of its size; None: nothing tells.

    A tensor has a row, or a column of a single row, for each image; or as many rows as a tensor of
    grids or of counts says; or as many as in proportion to the tokens that the images take.
    """
    N, num_rows = len(lengths), tensor.shape[0] if tensor.dim() else 0
    if num_rows == N:
        return 0, [1] * N
    if num_rows == 1 and tensor.dim() > 1 and tensor.shape[1] == N:
        return 1, [1] * N
    whole = {n: t for n, t in tensors.items() if t.dim() and not t.is_floating_point()}
    about = {name: t for name, t in whole.items() if len(t) == N}
    tables = (t for name, t in about.items() if GRID in name and t.dim() == 2)
    grids = [t.prod(1).tolist() for t in tables if 1 < t.shape[1] <= MAX_GRID_AXES]
    counts = [t.tolist() for t in about.values() if t.dim() == 1]
    exact = [sizes for sizes in counts if sum(sizes) == num_rows]
    for sizes in (*grids, *exact, lengths):
        total = sum(sizes)
        if num_rows and total and all(size * num_rows % total == 0 for size in sizes):
            return 0, [size * num_rows // total for size in sizes]
    return None


def joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors along `dim`, without a copy of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a hash of tensors by name: their dtypes, shapes and bytes."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        hashed.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        hashed.update(values.view(torch.uint8).numpy().tobytes())
    return hashed.digest()
