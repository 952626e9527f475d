"""Lay prompts and completions out as packed batches of a token budget.

In a packed batch all tokens stand in one row of the model's input. Rows are the paths of a prefix
tree: tokens that several begin with are computed once. A row's other tokens are one segment, which
attends to the row's path and to itself. A model that carries states along a row computes a prompt,
and then all its completions from the states that it left. Where a model takes neither, rows of
similar length are padded on the right.

N: tokens of a packed batch, R: completion tokens of its rows, K: those of R with a score of their
own, B: rows, S: longest row, T: tokens of a row, A: axes of positions.
"""

import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

import torch

from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.packed import Segment
from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.engine.images.prompt_images import ImageInputs, PromptImages, joined
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.model.routers import joined_routes

# A padded batch holds at most this many times its tokens: a wider one costs more than two forwards.
MAX_PADDING = 1.25

# Rows that are computed both ways before a layout is used.
NUM_COMPARED = 4

# A fork has at least this many tokens after its prompt, padding included. Recurrent layers of
# transformers 5.23 compute a single token by a step of decoding: it writes its state over the one
# that the backward pass needs, and its kernels have no backward pass.
MIN_FORK_TOKENS = 2


class RowImages(NamedTuple):
    """The images of a row, and its positions."""

    images: PromptImages | None
    """None: it is a row of text beside others with images."""
    positions_AT: torch.Tensor
    """int64, of prompt and completion."""


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
    """An `array("i")` of the ids that each completion token was sampled from; None: the whole
    vocabulary."""
    temperature: float = 1.0
    """Divides its logits in `packed_logprobs`."""
    max_shared: int | None = None
    """Tokens that it shares with other rows at most; None: all."""

    @property
    def path(self) -> tuple[tuple[int, bool], list[Any]]:
        """Return what rows share all of or nothing, and a key of each token that is computed.

        Rows with an equal first value compute the same from tokens that begin with equal keys.
        """
        keys: list[Any] = [*self.prompt_ids, *self.completion_ids[:-1]]
        if self.images is not None:
            own = self.images.images
            keys = keys if own is None else own.cache_keys(keys, 0, len(keys))
            keys = [key if isinstance(key, tuple) else (key,) for key in keys]
        if self.routes is not None:
            routes = (
                hashlib.blake2b(own.tobytes(), digest_size=16).digest()
                for own in self.routes[: len(keys)]
            )
            keys = list(zip_longest(keys, routes, fillvalue=b""))
        return (self.rope_side, self.routes is not None), keys

    def num_shareable(self, num_tokens: int) -> int:
        """Return the most tokens, up to `num_tokens`, after which a segment cuts no image."""
        images = self.images and self.images.images
        return images.num_resumable(num_tokens) if images else num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def with_images(
    model: Any, rows: Sequence[PackedRow], images: Sequence[PromptImages | None]
) -> list[PackedRow]:
    """Return the rows with their images and positions; None: a row of text alone."""
    inputs, device, read = ImageInputs(model), next(model.parameters()).device, []
    pairs = [([*r.prompt_ids, *r.completion_ids], i) for r, i in zip(rows, images, strict=True)]
    inputs.find_positions([(ids[: own.num_prompt_tokens], own) for ids, own in pairs if own])
    for ids, own in pairs:
        positions = torch.arange(len(ids), device=device)[None]
        if own is not None:
            positions = inputs.positions(own, 0, len(ids)).flatten(0, -2)
        read.append(RowImages(own, positions))
    num_axes = max(len(own.positions_AT) for own in read)
    read = [own._replace(positions_AT=own.positions_AT.expand(num_axes, -1)) for own in read]
    return [row._replace(images=own) for row, own in zip(rows, read, strict=True)]


class PackingLayout(StrEnum):
    """The way in which rows share one forward."""

    SHARED_PREFIXES = "shared_prefixes"
    """One row of all tokens that are needed, each common prefix once."""
    WHOLE_ROWS = "whole_rows"
    """One row of all tokens, the last one of each completion and the prompts of empty ones too."""
    FORKED_STATES = "forked_states"
    """A prompt, then the completions of its group from its states, padded on the right. With images
    or experts it is `PADDED`."""
    PADDED = "padded"
    """Rows of similar length, padded on the right."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Input of a forward, and the completion tokens that it scores."""

    rows: list[int]
    """Indices of the rows, in the order in which their tokens are scored."""
    lengths: list[int]
    """Number of completion tokens of each, R together."""
    input_ids: torch.Tensor
    """int64, (1, N), or (B, S) in a padded batch."""
    position_ids: torch.Tensor
    """int64, as `input_ids`: each token's index in its own sequence."""
    predicting_K: torch.Tensor
    """int64: of each scored token the index of the token before it, in `shared_ids` and then the
    flat `input_ids`."""
    labels_K: torch.Tensor
    """int64: the scored tokens."""
    scored: list[tuple[int, int]]
    """Of each scored token the index of a row, and its index in the row's completion."""
    scores_R: torch.Tensor | None
    """int64: index among the scores of each completion token; None: each has a score of its own."""
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
    num_shared_prompts: int = 0
    """Rows whose prompt is computed for another row."""
    shared_ids: torch.Tensor | None = None
    """int64, (1, P): the prompt that all rows of a padded batch go on from, computed before them;
    None: one forward takes all tokens."""

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        num_shared = 0 if self.shared_ids is None else self.shared_ids.numel()
        return num_shared + self.input_ids.numel()


def with_rope_sides(model: torch.nn.Module, rows: Sequence[PackedRow]) -> list[PackedRow]:
    """Return the rows with their `rope_side` under a model."""
    rope = RowRope(model)
    return [row._replace(rope_side=rope.side(row.num_tokens)) for row in rows]


def in_tree_order(rows: Sequence[PackedRow], numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the rows at `numbers`, each with the first tokens that it shares with the one before.

    Sorted, a row shares with the row before as many tokens as with any earlier one. A row that
    another begins with comes after it.
    """
    paths = {number: rows[number].path for number in numbers}
    order = sorted(paths, key=paths.__getitem__, reverse=True)
    ordered = [(number, 0) for number in order[:1]]
    for pair in pairwise(order):
        commons, keys = zip(*map(paths.__getitem__, pair), strict=True)
        limits = [limit for n in pair if (limit := rows[n].max_shared) is not None]
        num_shared = min([num_common(keys), *limits]) if len(set(commons)) == 1 else 0
        ordered.append((pair[1], min(rows[number].num_shareable(num_shared) for number in pair)))
    return ordered


def num_tree_tokens(rows: Sequence[PackedRow]) -> int:
    """Return the tokens that scores need: completions without the last, a common prefix once."""
    scored = (number for number, row in enumerate(rows) if row.completion_ids)
    return sum(
        rows[number].num_tokens - 1 - shared for number, shared in in_tree_order(rows, scored)
    )


def representative(rows: Sequence[PackedRow]) -> tuple[list[int], list[PackedRow]]:
    """Return some rows to compare two forwards on, and their indices.

    They are two that share most and go on apart, the longest, and others. Where no rows share
    anything, the longest comes twice, and shares its prompt: a single row would not show that a
    layer carries its state from one row into the next.
    """
    scored = [number for number, row in enumerate(rows) if row.completion_ids]
    longest = max(scored, key=lambda n: rows[n].num_tokens)
    ordered = in_tree_order(rows, scored)
    forks = [
        (num_shared, before, number)
        for (before, _), (number, num_shared) in pairwise(ordered)
        if 0 < num_shared < rows[number].num_tokens - 1
    ]
    _, *pair = max(forks, default=(0, longest, longest))
    roots = (number for number, num_shared in ordered if not num_shared)
    others = (n for n in dict.fromkeys([longest, *roots, *scored]) if n not in pair)
    numbers = [*pair, *others][:NUM_COMPARED]
    chosen = [rows[number] for number in numbers]
    if not forks:
        # The second row has a token of its own, even if its completion has a single one.
        num_shared = min(len(rows[longest].prompt_ids), rows[longest].num_tokens - 2)
        chosen[:2] = [row._replace(max_shared=num_shared) for row in chosen[:2]]
    return numbers, chosen


def fork_examples(rows: Sequence[PackedRow]) -> list[list[PackedRow]]:
    """Return rows whose forks have one token after their prompt, and rows whose forks have more.

    Recurrent layers compute a single token in another way than several, and the rows of a first
    batch need not have both. The completions of `rows` are cut to two tokens, and lengthened to
    three: the last token of a completion is not computed. The first rows are those that share most.
    Experts and sampling masks are left out; rows with images are never forked, and give none.
    """
    if any(row.images is not None for row in rows):
        return []
    one_token = [_cut(_lengthened(row, 2), 2) for row in rows[:2]]
    more_tokens = [_lengthened(row, 3) for row in rows]
    return [one_token, more_tokens]


def _lengthened(row: PackedRow, least: int) -> PackedRow:
    """Return a row whose completion is repeated until it has `least` tokens."""
    ids = list(row.completion_ids)
    if len(ids) < least:
        num_repeats = math.ceil(least / len(ids))
        ids = (ids * num_repeats)[:least]
    return row._replace(completion_ids=ids, routes=None, sampling_mask=None)


def _cut(row: PackedRow, most: int) -> PackedRow:
    """Return a row with the first `most` tokens of its completion."""
    return row._replace(completion_ids=row.completion_ids[:most])


def pack(
    rows: Sequence[PackedRow],
    numbers: Sequence[int],
    layout: PackingLayout,
    device: torch.device,
    max_tokens: int | None = None,
    image_names: frozenset[str] = frozenset(),
) -> list[PackedBatch]:
    """Lay the rows at `numbers` out in batches of up to `max_tokens`, padding included.

    Rows without a completion token are left out. A row longer than `max_tokens` is a batch of its
    own. A tree that does not fit is cut, and what its parts share is in each. `image_names` are the
    arguments that the model's forward takes for images.
    """
    if layout is PackingLayout.WHOLE_ROWS:
        parts = _within(rows, [(number, 0) for number in numbers], max_tokens)
        return [_packed(rows, part, device, image_names, num_dropped=0) for part in parts]
    scored = [number for number in numbers if rows[number].completion_ids]
    if layout is PackingLayout.SHARED_PREFIXES:
        parts = _within(rows, in_tree_order(rows, scored), max_tokens)
        return [_packed(rows, part, device, image_names) for part in parts]
    # Images and experts belong to whole rows.
    is_whole = any(row.images is not None or row.routes is not None for row in rows)
    is_forked = layout is PackingLayout.FORKED_STATES and not is_whole
    groups = _of_one_length(rows, scored, max_tokens, is_forked=is_forked)
    return [_padded(rows, *group, device, image_names) for group in groups]


def _within(
    rows: Sequence[PackedRow], ordered: Sequence[tuple[int, int]], max_tokens: int | None
) -> list[list[tuple[int, int]]]:
    """Cut rows, with their shared tokens, into parts of at most `max_tokens` tokens together.

    What a part's first row shares with the row before is computed again. Of the cuts into fewest
    parts, one is taken that computes the fewest tokens again.
    """
    if max_tokens is None or not ordered:
        return [list(ordered)] if ordered else []
    sizes = [rows[number].num_tokens for number, _ in ordered]
    # Of the first rows: parts, tokens that are computed again, and where the last part starts.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end in range(1, len(ordered) + 1):
        num_tokens, least = 0, (sys.maxsize, 0, 0)
        for start in range(end - 1, -1, -1):
            num_shared = ordered[start][1]
            if num_tokens + sizes[start] <= max_tokens or start == end - 1:
                num_parts, num_again, _ = best[start]
                choice = (num_parts + 1, num_again + num_shared, start)
                least = min(least, choice, key=lambda cut: cut[:2])
            num_tokens += sizes[start] - num_shared
            if num_tokens > max_tokens:
                break
        best.append(least)
    parts: list[list[tuple[int, int]]] = []
    end = len(ordered)
    while end:
        start = best[end][2]
        parts.append([(ordered[start][0], 0), *ordered[start + 1 : end]])
        end = start
    return parts[::-1]


def _of_one_length(
    rows: Sequence[PackedRow],
    numbers: Sequence[int],
    max_tokens: int | None,
    *,
    is_forked: bool,
) -> Iterator[tuple[list[int], int]]:
    """Yield rows of similar length, and how many tokens of theirs are computed once.

    `is_forked`: rows have an equal prompt, which is computed once.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number in numbers:
        row = rows[number]
        groups[(row.rope_side, *row.prompt_ids) if is_forked else ()].append(number)
    for group in groups.values():
        num_shared = len(rows[group[0]].prompt_ids) if is_forked else 0
        sizes = {number: rows[number].num_tokens - 1 - num_shared for number in group}
        order = sorted(group, key=sizes.__getitem__, reverse=True)
        if is_forked:
            sizes = {number: _fork_width(size) for number, size in sizes.items()}
        part: list[int] = []
        num_tokens = num_shared
        for number in order:
            longest = sizes[part[0]] if part else sizes[number]
            padded = num_shared + longest * (len(part) + 1)
            is_wide = padded > MAX_PADDING * (num_tokens + sizes[number])
            if part and (is_wide or (max_tokens is not None and padded > max_tokens)):
                yield part, num_shared
                part, num_tokens = [], num_shared
            part.append(number)
            num_tokens += sizes[number]
        yield part, num_shared


def _fork_width(num_tokens: int) -> int:
    """Return the tokens, padding included, that go on from a prompt for so many of a completion."""
    return max(num_tokens, MIN_FORK_TOKENS) if num_tokens else 0


def _packed(
    rows: Sequence[PackedRow],
    part: Sequence[tuple[int, int]],
    device: torch.device,
    image_names: frozenset[str],
    *,
    num_dropped: int = 1,
) -> PackedBatch:
    # Rows, each with the first and the end of its tokens that no row before has.
    pieces: list[tuple[PackedRow, int, int]] = []
    segments: list[Segment] = []
    path: tuple[range, ...] = ()
    # Rows may share a token's score too: it is one of a label after a packed token.
    shared_scores: dict[Any, int] = {}
    scored: list[tuple[int, int]] = []
    scores_of_rows: list[int] = []
    all_predicting: list[int] = []
    end = 0
    for (number, num_shared), (_, num_next) in pairwise([*part, (0, 0)]):
        row, path = rows[number], _first(path, num_shared)
        if num_new := row.num_tokens - num_dropped - num_shared:
            pieces.append((row, num_shared, num_shared + num_new))
            segments.append(Segment(end, num_new, path))
            path, end = (*path, range(end, end + num_new)), end + num_new
        predicting = [*chain(*path)][len(row.prompt_ids) - 1 :]
        num_in_others = max(num_shared, num_next) - len(row.prompt_ids) + 1
        for t, label in enumerate(row.completion_ids):
            score = len(scored)
            if t < num_in_others:
                kept = row.sampling_mask and bytes(row.sampling_mask[t])
                key = predicting[t], label, row.temperature, kept
                score = shared_scores.setdefault(key, score)
            if score == len(scored):
                scored.append((number, t))
                all_predicting.append(predicting[t])
            scores_of_rows.append(score)
    tokens = chain(*([*r.prompt_ids, *r.completion_ids][a:b] for r, a, b in pieces))
    positions = chain(*(range(first, end) for _, first, end in pieces))
    routes = [(r.routes if r.routes is None else r.routes[a:], 0, b - a) for r, a, b in pieces]
    return PackedBatch(
        [number for number, _ in part],
        [len(rows[number].completion_ids) for number, _ in part],
        to_device([*tokens], device)[None],
        to_device([*positions], device)[None],
        to_device(all_predicting, device),
        to_device([rows[number].completion_ids[t] for number, t in scored], device),
        scored,
        None if len(scored) == len(scores_of_rows) else to_device(scores_of_rows, device),
        tuple(segments),
        None,
        joined_routes(routes, device),
        arguments_of_rows(pieces, image_names, dim=1),
        [row.rope_side for row, _, _ in pieces],
        [end - first for _, first, end in pieces],
        sum(num_shared >= len(rows[number].prompt_ids) for number, num_shared in part),
    )


def arguments_of_rows(
    rows: Sequence[tuple[PackedRow, int, int]], names: frozenset[str], dim: int
) -> dict[str, torch.Tensor]:
    """Return a forward's positions and arguments of images; none where no row has any.

    Tensors of images are joined end to end, those of tokens along `dim`, with zeros for a row of
    text: 1 in a packed batch, 0 in a padded batch. Each of the `rows` has the first and the end of
    its tokens.
    """
    pieces = [(own.images, own.positions_AT, a, b) for row, a, b in rows if (own := row.images)]
    if not pieces:
        return {}
    of_rows = [
        {} if images is None else images.arguments(first, end, names, positions_AT.device)
        for images, positions_AT, first, end in pieces
    ]
    per_token = frozenset(name for images, *_ in pieces if images for name in images.of_tokens)
    arguments: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(chain(*of_rows)):
        tensors = [own[name] for own in of_rows if name in own]
        if name in per_token:
            shape = tensors[0].shape[2:]
            zeros = [tensors[0].new_zeros(1, end - first, *shape) for *_, first, end in pieces]
            tensors = [own.get(name, zero) for own, zero in zip(of_rows, zeros, strict=True)]
        arguments[name] = joined(tensors, dim if name in per_token else 0)
    positions = []
    for _, positions_AT, first, end in pieces:
        own_AT = positions_AT[:, first:end]
        positions.append(torch.nn.functional.pad(own_AT, (0, end - first - own_AT.shape[1])))
    # [A, 1, N] or [A, B, S]; a model without axes takes (1, N) or (B, S).
    positions_ABS = torch.cat(positions, 1)[:, None] if dim else torch.stack(positions, 1)
    has_axes = len(positions_ABS) > 1
    return arguments | {"position_ids": positions_ABS if has_axes else positions_ABS[0]}


def _first(path: tuple[range, ...], num_tokens: int) -> tuple[range, ...]:
    """Return the first tokens of a path of packed tokens."""
    first: list[range] = []
    for part in path:
        if not num_tokens:
            break
        first.append(part[:num_tokens])
        num_tokens -= len(first[-1])
    return tuple(first)


def _padded(
    rows: Sequence[PackedRow],
    numbers: list[int],
    num_shared: int,
    device: torch.device,
    image_names: frozenset[str],
) -> PackedBatch:
    """Pad rows on the right, without the first `num_shared` tokens, which all begin with."""
    sequences = [[*rows[n].prompt_ids, *rows[n].completion_ids[:-1]] for n in numbers]
    shared_ids = sequences[0][:num_shared]
    sequences = [sequence[num_shared:] for sequence in sequences]
    S = max(map(len, sequences))
    if num_shared:
        S = _fork_width(S)
    scored = [(n, t) for n in numbers for t in range(len(rows[n].completion_ids))]
    starts = {n: index * S for index, n in enumerate(numbers)}
    places = ((n, len(rows[n].prompt_ids) - 1 + t) for n, t in scored)
    predicting = [place if place < num_shared else starts[n] + place for n, place in places]
    # Any token will do as padding: nothing attends to it.
    ids = [sequence + [0] * (S - len(sequence)) for sequence in sequences]
    lengths = to_device(list(map(len, sequences)), device)
    positions_1S = torch.arange(num_shared, num_shared + S, device=device)[None]
    return PackedBatch(
        numbers,
        [len(rows[number].completion_ids) for number in numbers],
        to_device([t for row in ids for t in row], device).view(len(numbers), S),
        positions_1S.expand(len(numbers), S),
        to_device(predicting, device),
        to_device([rows[n].completion_ids[t] for n, t in scored], device),
        scored,
        None,
        None,
        None if num_shared else (positions_1S < lengths[:, None]).to(torch.int64),
        joined_routes([(rows[n].routes, 0, S) for n in numbers], device),
        arguments_of_rows([(rows[n], 0, S) for n in numbers], image_names, dim=0),
        [rows[n].rope_side for n in numbers],
        num_shared_prompts=len(numbers) - 1 if num_shared else 0,
        shared_ids=to_device(shared_ids, device)[None] if num_shared else None,
    )
