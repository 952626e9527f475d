"""Lay prompts and completions out as packed batches of a token budget.

In a packed batch all tokens stand in one row of the model's input. A prompt is one segment; each
of its completions is another, which attends to the prompt and to itself. Where a model cannot take
that, rows of similar length are padded on the right instead.

N: tokens of a packed batch, K: completion tokens of a batch, B: rows, S: longest row, T: tokens of
a row, A: axes of positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.packed import Segment
from cb_rollout.engine.images.prompt_images import ImageInputs, PromptImages, joined
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.model.routers import joined_routes

# A padded batch holds at most this many times its tokens: a wider one costs more than two forwards.
MAX_PADDING = 1.25

# Rows that are computed both ways before a layout is used.
NUM_COMPARED = 4


class RowImages(NamedTuple):
    """The images of a row, and its positions."""

    images: PromptImages | None
    """None: it is a row of text beside others with images."""
    positions_AT: torch.Tensor
    """int64, of prompt and completion."""
    are_of_prompt: bool = True
    """False: some are of the completion, so that no other row shares the prompt's forward."""

    @property
    def digest(self) -> bytes | None:
        return None if self.images is None else self.images.digest

    def arguments(self, names: frozenset[str], num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the arguments of images in a forward of the row's first tokens."""
        taken = self.images and self.images.taken(names, self.positions_AT.device)
        return taken.arguments(0, num_tokens) if taken else {}


def row_images(
    model: Any, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None]
) -> list[RowImages]:
    """Return the images and positions of sequences; None: a sequence of text alone."""
    inputs, device, rows = ImageInputs(model), next(model.parameters()).device, []
    pairs = list(zip(sequences, images, strict=True))
    inputs.find_positions([(ids[: own.num_prompt_tokens], own) for ids, own in pairs if own])
    for ids, own in pairs:
        positions = torch.arange(len(ids), device=device)[None]
        if own is not None:
            positions = inputs.positions(own, 0, len(ids)).flatten(0, -2)
        rows.append(RowImages(own, positions))
    num_axes = max(len(row.positions_AT) for row in rows)
    return [row._replace(positions_AT=row.positions_AT.expand(num_axes, -1)) for row in rows]


def _joined_images(
    positions_ABS: torch.Tensor,
    rows: Sequence[tuple[RowImages, int]],
    names: frozenset[str],
    dim: int,
) -> dict[str, torch.Tensor]:
    """Return a forward's positions, `[A, 1, N]` or `[A, B, S]`, and its arguments of images.

    Tensors of images are joined end to end, those of tokens along `dim`, with zeros for a row of
    text: 1 in a packed batch, 0 in a padded batch. Each of the `rows` has its number of tokens.
    """
    of_rows = [row.arguments(names, num_tokens) for row, num_tokens in rows]
    per_token = frozenset(name for row, _ in rows if row.images for name in row.images.of_tokens)
    arguments: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(chain(*of_rows)):
        tensors = [own[name] for own in of_rows if name in own]
        if name in per_token:
            shape = tensors[0].shape[2:]
            zeros = [tensors[0].new_zeros(1, num_tokens, *shape) for _, num_tokens in rows]
            tensors = [own.get(name, zero) for own, zero in zip(of_rows, zeros, strict=True)]
        arguments[name] = joined(tensors, dim if name in per_token else 0)
    # A model without axes takes (1, N) or (B, S).
    has_axes = len(positions_ABS) > 1
    return arguments | {"position_ids": positions_ABS if has_axes else positions_ABS[0]}


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
    """`RowRope.side` of its length: rows of different sides have different keys of a prompt."""
    sampling_mask: Sequence[Any] | None = None
    """Ids that each completion token was sampled from; None: the whole vocabulary."""

    @property
    def prompt_key(self) -> tuple[Any, ...]:
        """Rows with equal keys may share their prompt."""
        routes = None if self.routes is None else self.routes[: len(self.prompt_ids)].tobytes()
        digest = self.images and self.images.digest
        return (tuple(self.prompt_ids), routes, digest, self.rope_side)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


class PackingLayout(StrEnum):
    """The way in which rows share one forward."""

    SHARED_PROMPTS = "shared_prompts"
    """One row of all tokens that are needed; a prompt once for its group."""
    WHOLE_ROWS = "whole_rows"
    """One row of all tokens, the last one of each completion and the prompts of empty ones too."""
    PADDED = "padded"
    """Rows of similar length, padded on the right."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Input of a forward, and the completion tokens that it scores."""

    rows: list[int]
    """Indices of the rows, in the order in which their tokens are scored."""
    lengths: list[int]
    """Number of completion tokens of each."""
    input_ids: torch.Tensor
    """int64, (1, N), or (B, S) in a padded batch."""
    position_ids: torch.Tensor
    """int64, as `input_ids`: each token's index in its own sequence."""
    predicting_K: torch.Tensor
    """int64: index in the flat `input_ids` of the token before each completion token."""
    labels_K: torch.Tensor
    """int64: the completion tokens."""
    segments: tuple[Segment, ...] | None
    """None: a padded batch."""
    is_token: torch.Tensor | None
    """int64, (B, S), 0 in the padding; None: a packed batch, which has none."""
    routes: torch.Tensor | None = None
    """int16, [N, L, K]: experts that the tokens take; None: their routers choose."""
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further arguments of the forward: those of images, and positions along their axes."""
    rope_sides: Sequence[int] = ()
    """Sides of the rows, for `RowRope.by_row`; in a packed batch of prompts and completions."""
    rope_counts: Sequence[int] | None = None
    """Tokens of each of them; None: a padded batch."""

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return self.input_ids.numel()

    @property
    def num_shared_prompts(self) -> int:
        """Rows whose prompt is computed for another row."""
        if self.segments is None:
            return 0
        return len(self.rows) - sum(not segment.prefix_length for segment in self.segments)


def with_rope_sides(model: torch.nn.Module, rows: Sequence[PackedRow]) -> list[PackedRow]:
    """Return the rows with their `rope_side` under a model."""
    rope = RowRope(model)
    return [row._replace(rope_side=rope.side(row.num_tokens)) for row in rows]


def group_rows(rows: Sequence[PackedRow], numbers: Sequence[int]) -> list[list[int]]:
    """Return the rows at `numbers` in groups of equal prompts, in the order of their first rows."""
    groups: dict[Any, list[int]] = {}
    for index, number in enumerate(numbers):
        images = rows[number].images
        is_shared = images is None or images.are_of_prompt
        groups.setdefault(rows[number].prompt_key if is_shared else index, []).append(number)
    return list(groups.values())


def representative(rows: Sequence[PackedRow]) -> list[int]:
    """Return some rows to compare two forwards on: two of a group, the longest, and others.

    Where no group has two, the longest comes twice: a single row would not show that a layer
    carries its state from one row into the next.
    """
    scored = [number for number, row in enumerate(rows) if row.completion_ids]
    groups = sorted(group_rows(rows, scored), key=len, reverse=True)
    longest = max(scored, key=lambda n: rows[n].num_tokens)
    pair = groups[0][:2] if len(groups[0]) > 1 else [longest]
    others = dict.fromkeys([longest, *(group[0] for group in groups), *scored])
    chosen = [*pair, *(number for number in others if number not in pair)]
    return ([longest] * (len(pair) == 1) + chosen)[:NUM_COMPARED]


def pack(
    rows: Sequence[PackedRow],
    numbers: Sequence[int],
    layout: PackingLayout,
    device: torch.device,
    max_tokens: int | None = None,
    image_names: frozenset[str] = frozenset(),
) -> list[PackedBatch]:
    """Lay the rows at `numbers` out in as few batches as `max_tokens` allows, padding included.

    Rows without a completion token are left out. A row longer than `max_tokens` is a batch of its
    own. A group that does not fit is cut, and its prompt is in each part. `image_names` are the
    arguments that the model's forward takes for images.
    """
    if layout is PackingLayout.WHOLE_ROWS:
        parts = _within(rows, [[number] for number in numbers], max_tokens)
        return [_packed(rows, part, device, image_names, num_dropped=0) for part in parts]
    scored = [number for number in numbers if rows[number].completion_ids]
    if layout is PackingLayout.PADDED:
        parts = _of_one_length(rows, scored, max_tokens)
        return [_padded(rows, part, device, image_names) for part in parts]
    parts = _within(rows, group_rows(rows, scored), max_tokens)
    return [_packed(rows, part, device, image_names) for part in parts]


def _within(
    rows: Sequence[PackedRow], groups: list[list[int]], max_tokens: int | None
) -> Iterator[list[list[int]]]:
    """Yield lists of groups of at most `max_tokens` tokens; a group that does not fit is cut."""
    part: list[list[int]] = []
    left = max_tokens
    for group in groups:
        num_prompt = len(rows[group[0]].prompt_ids)
        open_group: list[int] = []
        for number in group:
            num_new = len(rows[number].completion_ids) + (0 if open_group else num_prompt)
            if left is not None and num_new > left and part:
                yield part
                part, left, open_group = [], max_tokens, []
                num_new = len(rows[number].completion_ids) + num_prompt
            if not open_group:
                part.append(open_group)
            open_group.append(number)
            left = None if left is None else left - num_new
    if part:
        yield part


def _of_one_length(
    rows: Sequence[PackedRow], numbers: list[int], max_tokens: int | None
) -> Iterator[list[int]]:
    sizes = {n: rows[n].num_tokens - 1 for n in numbers}
    part: list[int] = []
    num_tokens = 0
    for number in sorted(numbers, key=lambda n: -sizes[n]):
        longest = sizes[part[0]] if part else sizes[number]
        padded = longest * (len(part) + 1)
        is_wide = padded > MAX_PADDING * (num_tokens + sizes[number])
        if part and (is_wide or (max_tokens is not None and padded > max_tokens)):
            yield part
            part, num_tokens = [], 0
        part.append(number)
        num_tokens += sizes[number]
    if part:
        yield part


def _packed(
    rows: Sequence[PackedRow],
    groups: list[list[int]],
    device: torch.device,
    image_names: frozenset[str],
    *,
    num_dropped: int = 1,
) -> PackedBatch:
    # Rows, each with the first and the end of its tokens that are in the batch.
    pieces: list[tuple[PackedRow, int, int]] = []
    predicting: list[int] = []
    segments: list[Segment] = []
    images: list[tuple[RowImages, int]] = []
    end = 0
    for group in groups:
        shared, start = rows[group[0]], end
        num_prompt = len(shared.prompt_ids)
        pieces.append((shared, 0, num_prompt))
        end += num_prompt
        if len(group) > 1:
            segments.append(Segment(start, num_prompt))
        for number in group:
            num_completion = len(rows[number].completion_ids)
            num_new = max(0, num_completion - num_dropped)
            pieces.append((rows[number], num_prompt, num_prompt + num_new))
            predicting += [start + num_prompt - 1, *range(end, end + num_new)][:num_completion]
            if len(group) == 1:
                segments.append(Segment(start, num_prompt + num_new))
            elif num_new:
                segments.append(Segment(end, num_new, start, num_prompt))
            end += num_new
        if shared.images is not None:
            images.append((shared.images, end - start))
    tokens = [[*row.prompt_ids, *row.completion_ids][first:end] for row, first, end in pieces]
    positions = [position for _, first, end in pieces for position in range(first, end)]
    routes = [(r.routes if r.routes is None else r.routes[a:], 0, b - a) for r, a, b in pieces]
    others = {}
    if images:
        of_pieces = [r.images.positions_AT[:, a:b] for r, a, b in pieces if r.images]
        others = _joined_images(torch.cat(of_pieces, 1)[:, None], images, image_names, dim=1)
    numbers = [number for group in groups for number in group]
    return PackedBatch(
        numbers,
        [len(rows[number].completion_ids) for number in numbers],
        to_device([token for piece in tokens for token in piece], device)[None],
        to_device(positions, device)[None],
        to_device(predicting, device),
        to_device([t for n in numbers for t in rows[n].completion_ids], device),
        tuple(segments),
        None,
        _joined(routes, device),
        others,
        [row.rope_side for row, _, _ in pieces],
        [end - first for _, first, end in pieces],
    )


def _padded(
    rows: Sequence[PackedRow],
    numbers: list[int],
    device: torch.device,
    image_names: frozenset[str],
) -> PackedBatch:
    sequences = [[*rows[n].prompt_ids, *rows[n].completion_ids[:-1]] for n in numbers]
    S = max(map(len, sequences))
    predicting: list[int] = []
    for index, number in enumerate(numbers):
        first = index * S + len(rows[number].prompt_ids) - 1
        predicting += range(first, first + len(rows[number].completion_ids))
    # Any token will do as padding: nothing attends to it.
    ids = [sequence + sequence[:1] * (S - len(sequence)) for sequence in sequences]
    lengths = to_device(list(map(len, sequences)), device)
    positions_1S = torch.arange(S, device=device)[None]
    own = [(images, S) for n in numbers if (images := rows[n].images) is not None]
    others = {}
    if own:
        padded = [
            torch.nn.functional.pad(images.positions_AT[:, : len(sequence)], (0, S - len(sequence)))
            for (images, _), sequence in zip(own, sequences, strict=True)
        ]
        others = _joined_images(torch.stack(padded, 1), own, image_names, dim=0)
    return PackedBatch(
        numbers,
        [len(rows[number].completion_ids) for number in numbers],
        to_device([t for row in ids for t in row], device).view(len(numbers), S),
        positions_1S.expand(len(numbers), S),
        to_device(predicting, device),
        to_device([t for n in numbers for t in rows[n].completion_ids], device),
        None,
        (positions_1S < lengths[:, None]).to(torch.int64),
        _joined([(rows[n].routes, 0, S) for n in numbers], device),
        others,
        [rows[n].rope_side for n in numbers],
    )


def _joined(routes: list[tuple[Any, int, int]], device: torch.device) -> torch.Tensor | None:
    shapes = {record.shape[1:] for record, _, _ in routes if record is not None}
    return joined_routes(routes, shapes.pop(), device) if shapes else None
