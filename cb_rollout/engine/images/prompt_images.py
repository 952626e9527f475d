"""Hold the images of a prompt: the tensors that a forward takes, and what tells images apart.

Made in the caller's thread, shared by the sequences of a group, and read by the thread that steps
the engine. Tensors stay in system memory, because a preempted sequence needs them again; a forward
copies them to its device.

T: tokens of the prompt, N: images of the prompt.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

DIGEST_BYTES = 16

# A part of the names of tensors that hold an image's rows and columns, whose product it takes.
GRID = "grid"
MAX_GRID_AXES = 3


class ImageSpan(NamedTuple):
    """Tokens of a prompt that stand for one image, or for several that cannot be told apart."""

    start: int
    stop: int
    """Index after the last token."""


class Division(NamedTuple):
    """The parts of a tensor that belong to each image."""

    dim: int
    sizes: tuple[int, ...]
    """N numbers, which add up to the size of `dim`."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    tensors: Mapping[str, torch.Tensor]
    """Arguments of the model's forward by name, as its processor makes them, on the CPU."""
    spans: tuple[ImageSpan, ...]
    """In the order of the prompt; at least one. N where the images can be told apart."""
    digests: tuple[bytes, ...]
    """A hash for each span: of all that a forward is given of it."""
    divisions: Mapping[str, Division] | None
    """Of each tensor that is not of tokens; None: the tensors cannot be divided."""
    per_token: frozenset[str]
    """Names of the tensors that hold a number for each token, `[1, T, ...]`."""
    num_prompt_tokens: int
    """T."""
    may_be_cut: bool = False
    """True if a forward may begin before any of the images. An engine sets it, which found that its
    model then computes what it computes of the whole prompt."""
    may_share_prefill: bool = False
    """True if one forward may compute this prompt and others with images. An engine sets it, as
    `may_be_cut`."""
    position_offset: int | None = None
    """Position of a token after the images, less its index in the sequence; negative where an image
    takes fewer positions than tokens. None: not computed yet."""
    positions: torch.Tensor | None = None
    """int64 `[1, T]` or `[A, 1, T]`, of A axes, on the CPU: position ids of the prompt's tokens.
    None: not computed yet."""

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return what an engine checks anew: whether there are several spans, and are divided."""
        return len(self.spans) > 1, self.divisions is not None

    @property
    def prefill_key(self) -> Hashable:
        """Return what is the same for prompts that may share a prefill; None: this one may not.

        Their tensors can be joined: all sizes but the first are the same.
        """
        if not self.may_share_prefill:
            return None
        shapes = (
            (name, tensor.dtype, tensor.shape[2 if name in self.per_token else 1 :])
            for name, tensor in self.tensors.items()
        )
        return tuple(sorted(shapes, key=lambda shape: shape[0]))

    @property
    def num_tokens(self) -> int:
        """Return the tokens up to the end of the last image: one forward computes them."""
        return self.spans[-1].stop

    @property
    def digest(self) -> bytes:
        """Return a hash of all the images."""
        return hashlib.blake2b(b"".join(self.digests), digest_size=DIGEST_BYTES).digest()

    def numbers_from(self, start: int) -> range:
        """Return the numbers of the spans that a forward computes which begins at `start`."""
        return range(sum(span.stop <= start for span in self.spans), len(self.spans))

    def num_resumable(self, num_tokens: int) -> int:
        """Return the most tokens, at most `num_tokens`, after which a forward may begin.

        Such a forward computes no part of an image, but all of it or nothing.
        """
        if num_tokens >= self.num_tokens:
            return num_tokens
        if not self.may_be_cut or self.divisions is None:
            return 0
        starts = (span.start for span in self.spans if span.start < num_tokens < span.stop)
        return next(starts, num_tokens)

    def arguments(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the tensors for a forward of a sequence's tokens from `start` to `stop`.

        A tensor with a number for each prompt token is cut, or continued with zeros: sampled tokens
        are text.
        """
        numbers, everything = self.numbers_from(start), range(len(self.spans))
        return {
            name: self._of_tokens(tensor, start, stop)
            if name in self.per_token
            else self.part(name, tensor, numbers, everything)
            for name, tensor in self.tensors.items()
        }

    def part(self, name: str, tensor: torch.Tensor, numbers: range, given: range) -> torch.Tensor:
        """Return the part of a tensor that belongs to the images at `numbers`.

        `tensor` is the one of this name, of the images at `given` alone.
        """
        if numbers == given:
            return tensor
        assert self.divisions is not None, "these images cannot be told apart"
        dim, sizes = self.divisions[name]
        before = sum(sizes[given.start : numbers.start])
        return tensor.narrow(dim, before, sum(sizes[numbers.start : numbers.stop]))

    def _of_tokens(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        missing = stop - self.num_prompt_tokens
        if missing > 0:
            zeros = tensor.new_zeros(1, missing, *tensor.shape[2:])
            tensor = torch.cat([tensor, zeros], 1)
        return tensor[:, start:stop]

    def before(self, number: int) -> "PromptImages":
        """Return the images before a span, as of a prompt that ends where it begins."""
        stop, numbers = self.spans[number].start, range(number)
        assert self.divisions is not None, "these images cannot be told apart"
        divisions = {n: Division(d.dim, d.sizes[:number]) for n, d in self.divisions.items()}
        tensors = {
            name: tensor[:, :stop]
            if name in self.per_token
            else self.part(name, tensor, numbers, range(len(self.spans)))
            for name, tensor in self.tensors.items()
        }
        spans, digests = self.spans[:number], self.digests[:number]
        return PromptImages(tensors, spans, digests, divisions, self.per_token, stop)

    def cache_keys(self, token_ids: Sequence[int], start: int, stop: int) -> list[Hashable]:
        """Return what identifies the tokens from `start` to `stop`: ids, and of images the tensors.

        A token of an image is its id, a hash and its index within the image. The hash is of its own
        tensors where a forward may begin after it; otherwise a model may compute it with the later
        images in view, and the hash is of all.
        """
        keys: list[Hashable] = list(token_ids[start:stop])
        digests = self.digests if self.may_be_cut else (self.digest,) * len(self.spans)
        for span, digest in zip(self.spans, digests, strict=True):
            for index in range(max(start, span.start), min(stop, span.stop)):
                keys[index - start] = token_ids[index], digest, index - span.start
        return keys


def create_prompt_images(
    tensors: Mapping[str, torch.Tensor],
    spans: tuple[ImageSpan, ...],
    num_images: int,
    per_token: frozenset[str],
    token_ids: Sequence[int],
) -> PromptImages:
    """Divide a processor's tensors into images, as far as they tell how, and hash them.

    Args:
        tensors: arguments of the model's forward, on the CPU.
        spans: where the images stand; one, or N.
        num_images: N.
        per_token: names of the tensors that hold a number for each token.
        token_ids: T tokens of the prompt.
    """
    of_images = {name: t for name, t in tensors.items() if name not in per_token}
    divisions = None
    if len(spans) == num_images:
        # An image may begin and end with tokens of its own, which stand for no part of it.
        of_spans = [token_ids[span.start : span.stop] for span in spans]
        ((most, _),) = Counter(chain(*of_spans)).most_common(1)
        lengths = tuple(ids.count(most) for ids in of_spans)
        found = {name: _division(t, of_images, lengths) for name, t in of_images.items()}
        known = {name: division for name, division in found.items() if division is not None}
        divisions = known if len(known) == len(found) else None
    images = PromptImages(tensors, spans, (), divisions, per_token, len(token_ids))
    if divisions is None:
        images.digests = (tensors_digest(of_images),) * len(spans)
    else:
        everything = range(num_images)
        parts = [
            {n: images.part(n, t, range(i, i + 1), everything) for n, t in of_images.items()}
            for i in everything
        ]
        images.digests = tuple(map(tensors_digest, parts))
    return images


def _division(
    tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], lengths: tuple[int, ...]
) -> Division | None:
    """Return how a tensor divides into images; None: nothing tells.

    It has a row, or a column of a single row, for each image; or as many rows as a tensor of grids
    or of counts says; or as many as in proportion to the tokens that the images take.
    """
    N, num_rows = len(lengths), tensor.shape[0] if tensor.dim() else 0
    if N == 1:
        return Division(0, (num_rows,))
    if num_rows == N:
        return Division(0, (1,) * N)
    if num_rows == 1 and tensor.dim() > 1 and tensor.shape[1] == N:
        return Division(1, (1,) * N)
    about = {name: t for name, t in tensors.items() if t.dim() and len(t) == N}
    grids = [_num_cells(t) for name, t in about.items() if GRID in name and _is_grid(t)]
    counts = [t.tolist() for t in about.values() if t.dim() == 1 and not t.is_floating_point()]
    exact = [sizes for sizes in counts if sum(sizes) == num_rows]
    for sizes in (*grids, *exact, lengths):
        total = sum(sizes)
        if num_rows and total and all(size * num_rows % total == 0 for size in sizes):
            return Division(0, tuple(size * num_rows // total for size in sizes))
    return None


def _is_grid(tensor: torch.Tensor) -> bool:
    is_pairs = tensor.dim() == 2 and 1 < tensor.shape[1] <= MAX_GRID_AXES
    return is_pairs and not tensor.is_floating_point()


def _num_cells(grids: torch.Tensor) -> list[int]:
    return grids.prod(1).tolist()


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a hash of tensors by name: their dtypes, shapes and bytes."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(tensors.items()):
        hashed.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        hashed.update(values.view(torch.uint8).numpy().tobytes())
    return hashed.digest()
