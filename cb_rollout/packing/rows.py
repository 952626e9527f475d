"""Describe the sequences that a packed forward scores, with their images and rotary lengths.

Owns the keys that decide which tokens two rows can share. Lays nothing out and runs no layer; the
model computes the positions of images. Called by the thread that trains.

T: tokens of a row, A: axes of positions.
"""

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.images.prompt_images import ImageInputs, PromptImages


class RowPath(NamedTuple):
    """The computation of a row, token by token.

    Two rows of equal compatibility compute the same values for a common prefix of equal keys.
    """

    compatibility: tuple[int, bool]
    """Rows that differ here share nothing."""
    token_keys: list[Any]
    """One key per token that a forward computes: all but the completion's last token."""


class RowImages(NamedTuple):
    """The images of a row, and its positions."""

    images: PromptImages | None
    """None: a row without images in a batch where other rows have some."""
    positions_AT: torch.Tensor
    """Position ids of prompt and completion, int64."""

    def token_keys(self, token_ids: Sequence[int]) -> list[Hashable]:
        """Return one key per token, which differs between tokens of different images."""
        if self.images is None:
            return [(token_id,) for token_id in token_ids]
        keys: list[Hashable] = []
        for key in self.images.cache_keys(token_ids, 0, len(token_ids)):
            is_of_image = isinstance(key, tuple)
            if not is_of_image:
                key = (key,)
            keys.append(key)
        return keys


class PackedRow(NamedTuple):
    """One sequence to score."""

    prompt_ids: Sequence[int]
    """At least one token."""
    completion_ids: Sequence[int]
    routes: Any = None
    """Experts that the first tokens took, an array of `[tokens, L, K]`; None: not recorded."""
    images: RowImages | None = None
    """None: no row of the batch has images."""
    rope_side: int = 0
    """`RowRope.side` of its length: a prompt has different keys on different sides."""
    sampling_mask: Sequence[Any] | None = None
    """An `array("i")` of the ids that each completion token was sampled from; None: the whole
    vocabulary."""
    labels: Sequence[int] | None = None
    """Token ids to score in place of the completion's, one for each; None: the completion's own."""
    temperature: float = 1.0
    """Temperature that divides its logits in `packed_logprobs`."""
    max_shared: int | None = None
    """Maximum number of tokens to share with other rows; None: no limit."""

    @property
    def scored_ids(self) -> Sequence[int]:
        """Token ids to score: `labels`, or else the completion's."""
        if self.labels is None:
            return self.completion_ids
        return self.labels

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion_ids]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def path(self) -> RowPath:
        """Return a compatibility key, and one cache key for each token that is computed."""
        keys: list[Any] = [*self.prompt_ids, *self.completion_ids[:-1]]
        if self.images is not None:
            keys = self.images.token_keys(keys)
        has_routes = self.routes is not None
        if has_routes:
            keys = _with_routes(keys, self.routes)
        return RowPath((self.rope_side, has_routes), keys)

    def num_shareable(self, num_tokens: int) -> int:
        """Return the longest prefix, up to `num_tokens` tokens, that ends outside of an image."""
        if self.images is None or self.images.images is None:
            return num_tokens
        return self.images.images.num_resumable(num_tokens)


def _with_routes(keys: Sequence[Any], routes: Any) -> list[tuple[Any, bytes]]:
    """Pair each token's key with a digest of its experts, empty where none were recorded.

    Args:
        keys: one for each token.
        routes: an array of `[tokens, L, K]`, of the first tokens.
    """
    digests = []
    for experts in routes[: len(keys)]:
        digests.append(hashlib.blake2b(experts.tobytes(), digest_size=16).digest())
    num_missing = len(keys) - len(digests)
    digests.extend([b""] * num_missing)
    return list(zip(keys, digests, strict=True))


def with_images(
    model: Any, rows: Sequence[PackedRow], images: Sequence[PromptImages | None]
) -> list[PackedRow]:
    """Return the rows with their images and positions.

    Args:
        model: the transformers model.
        rows: rows without images.
        images: each row's images; None: a row of text.
    """
    inputs = ImageInputs(model)
    device = next(model.parameters()).device
    prompts = []
    for row, prompt_images in zip(rows, images, strict=True):
        if prompt_images is not None:
            prompt_ids = row.token_ids[: prompt_images.num_prompt_tokens]
            prompts.append((prompt_ids, prompt_images))
    inputs.find_positions(prompts)

    positions: list[torch.Tensor] = []
    for row, prompt_images in zip(rows, images, strict=True):
        if prompt_images is None:
            positions_AT = torch.arange(row.num_tokens, device=device)[None]
        else:
            positions_AT = inputs.positions(prompt_images, 0, row.num_tokens).flatten(0, -2)
        positions.append(positions_AT)
    # A row of text has one axis, which stands for all axes.
    num_axes = max(map(len, positions))

    rows_with_images = []
    for row, prompt_images, positions_AT in zip(rows, images, positions, strict=True):
        row_images = RowImages(prompt_images, positions_AT.expand(num_axes, -1))
        rows_with_images.append(row._replace(images=row_images))
    return rows_with_images


def with_rope_sides(model: torch.nn.Module, rows: Sequence[PackedRow]) -> list[PackedRow]:
    """Return the rows with their `rope_side` under a model."""
    rope = RowRope(model)
    return [row._replace(rope_side=rope.side(row.num_tokens)) for row in rows]
