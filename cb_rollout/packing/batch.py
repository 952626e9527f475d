"""Lay prompts and completions out as packed batches of a token budget.

In a packed batch, all tokens are in one row of the model's input. Rows are the paths of a prefix
tree: shared prefixes are computed once. A row's other tokens form one segment, which attends to the
row's path and to itself. A recurrent model computes a prompt first, and then all its completions
from the states after the prompt. If a model supports neither, rows of similar length are padded on
the right.

N: tokens of a packed batch, R: completion tokens of its rows, K: scored tokens (those that several
rows share count once), B: rows, S: longest row, A: axes of positions.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

import torch

from cb_rollout.engine.attention.packed import Segment
from cb_rollout.engine.images.prompt_images import joined
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.model.routers import joined_routes
from cb_rollout.packing.prefix_tree import TreeRow, cut_tree, in_tree_order
from cb_rollout.packing.rows import PackedRow, RowImages

# Largest size of a padded batch, as a multiple of its tokens without padding. With more padding,
# one forward costs more than two.
MAX_PADDING = 1.25

# A fork has at least this many tokens after its prompt, padding included. Recurrent layers of
# transformers 5.23 compute a single token with a decode step. That step overwrites the state which
# the backward pass needs, and its kernels have no backward pass.
MIN_FORK_TOKENS = 2

# Padding of input ids. Any token will do: nothing attends to it.
PADDING_ID = 0


class PackingLayout(StrEnum):
    """Layout in which rows share one forward."""

    SHARED_PREFIXES = "shared_prefixes"
    """One row with all necessary tokens, each shared prefix once."""
    WHOLE_ROWS = "whole_rows"
    """One row with all tokens, including each completion's last token and the prompts of empty
    completions."""
    FORKED_STATES = "forked_states"
    """A prompt, then its group's completions, which start from the prompt's states and are padded
    on the right. Batches with images or recorded experts use `PADDED` instead."""
    PADDED = "padded"
    """Rows of similar length, padded on the right."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch:
    """Input of a forward, and the completion tokens that it scores."""

    rows: list[int]
    """Indices of the rows, in the order in which their tokens are scored."""
    lengths: list[int]
    """Number of completion tokens of each row; R is their sum."""
    input_ids: torch.Tensor
    """int64, (1, N), or (B, S) in a padded batch."""
    position_ids: torch.Tensor
    """int64, as `input_ids`: each token's index in its own sequence."""
    predicting_K: torch.Tensor
    """int64: for each scored token, the index of the token before it, in `shared_ids` followed by
    the flat `input_ids`."""
    labels_K: torch.Tensor
    """int64: the scored tokens."""
    scored: list[tuple[int, int]]
    """For each scored token, the index of a row, and the token's index in the row's completion."""
    scores_R: torch.Tensor | None
    """int64: for each completion token, the index of its score; None: no tokens share a score."""
    segments: tuple[Segment, ...] | None
    """None: a padded batch."""
    is_token: torch.Tensor | None
    """int64, (B, S), 0 in the padding; None: a packed batch, or one with `shared_ids`."""
    routes: torch.Tensor | None = None
    """int16, [N, L, K]: experts that the tokens take; None: their routers choose."""
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further arguments of the forward for images, and the positions along each axis."""
    rope_sides: Sequence[int] = ()
    """Sides for `RowRope.by_row`: of each row in a padded batch, of each piece in a packed one."""
    rope_counts: Sequence[int] | None = None
    """Number of tokens of each piece; None: a padded batch."""
    num_shared_prompts: int = 0
    """Number of rows whose prompt is computed with another row."""
    shared_ids: torch.Tensor | None = None
    """int64, (1, P): the prompt that all rows of a padded batch continue, computed before them;
    None: one forward computes all tokens."""

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        num_tokens = self.input_ids.numel()
        if self.shared_ids is not None:
            num_tokens += self.shared_ids.numel()
        return num_tokens


class RowPiece(NamedTuple):
    """Consecutive tokens of a row, which one forward computes."""

    row: PackedRow
    start: int
    stop: int
    """May be past the row's end, in the padding."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def routes(self) -> Any:
        """Return the row's `PackedRow.routes` from this piece on."""
        if self.row.routes is None:
            return None
        return self.row.routes[self.start :]


def pack(
    rows: Sequence[PackedRow],
    numbers: Sequence[int],
    layout: PackingLayout,
    device: torch.device,
    max_tokens: int | None = None,
    image_names: frozenset[str] = frozenset(),
) -> list[PackedBatch]:
    """Lay rows out in batches.

    Rows without a completion token are left out, except with `WHOLE_ROWS`. A tree that does not fit
    into one batch is cut, and each part contains the shared tokens of its rows.

    Args:
        rows: all rows.
        numbers: indices of those to lay out.
        layout: how they share a forward.
        device: device of the batches' tensors.
        max_tokens: maximum tokens of a batch, including padding; a longer row is a separate batch.
            None: no limit.
        image_names: arguments that the model's forward takes for images.
    """
    if layout is PackingLayout.WHOLE_ROWS:
        whole_rows = [TreeRow(number, num_shared=0) for number in numbers]
        parts = cut_tree(rows, whole_rows, max_tokens)
        return [_packed(rows, part, device, image_names, num_dropped=0) for part in parts]
    scored = [number for number in numbers if rows[number].completion_ids]
    if layout is PackingLayout.SHARED_PREFIXES:
        parts = cut_tree(rows, in_tree_order(rows, scored), max_tokens)
        return [_packed(rows, part, device, image_names, num_dropped=1) for part in parts]
    if layout is PackingLayout.FORKED_STATES and not _hold_whole_rows_data(rows):
        groups = _forked_groups(rows, scored, max_tokens)
    else:
        groups = _padded_groups(rows, scored, max_tokens)
    return [_padded(rows, group, num_shared, device, image_names) for group, num_shared in groups]


def _hold_whole_rows_data(rows: Sequence[PackedRow]) -> bool:
    """Return whether a row has images or experts, which belong to whole rows."""
    return any(row.images is not None or row.routes is not None for row in rows)


# Indices of rows, and how many of their first tokens are computed once for all of them.
Group = tuple[list[int], int]


def _padded_groups(
    rows: Sequence[PackedRow], numbers: Sequence[int], max_tokens: int | None
) -> Iterator[Group]:
    """Yield rows of similar length."""
    widths = {number: rows[number].num_tokens - 1 for number in numbers}
    for group in _of_similar_width(widths, 0, max_tokens):
        yield group, 0


def _forked_groups(
    rows: Sequence[PackedRow], numbers: Sequence[int], max_tokens: int | None
) -> Iterator[Group]:
    """Yield rows with the same prompt and completions of similar length."""
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for number in numbers:
        row = rows[number]
        key = (row.rope_side, tuple(row.prompt_ids))
        groups[key].append(number)
    for group in groups.values():
        num_shared = len(rows[group[0]].prompt_ids)
        widths = {number: len(rows[number].completion_ids) - 1 for number in group}
        for part in _of_similar_width(widths, num_shared, max_tokens):
            yield part, num_shared


def _of_similar_width(
    widths: Mapping[int, int], num_shared: int, max_tokens: int | None
) -> Iterator[list[int]]:
    """Yield groups of rows that may be padded to their widest row, the widest group first.

    Args:
        widths: each row's number of tokens after the shared ones, by its index.
        num_shared: tokens that all rows share, computed once.
        max_tokens: maximum tokens of a padded batch, or None.
    """
    part: list[int] = []
    longest = 0
    num_tokens = num_shared
    for number in sorted(widths, key=widths.__getitem__, reverse=True):
        width = widths[number]
        if num_shared:
            width = _fork_width(width)
        if part:
            num_padded = num_shared + longest * (len(part) + 1)
            is_wide = num_padded > MAX_PADDING * (num_tokens + width)
            is_full = max_tokens is not None and num_padded > max_tokens
            if is_wide or is_full:
                yield part
                part = []
        if not part:
            longest = width
            num_tokens = num_shared
        part.append(number)
        num_tokens += width
    if part:
        yield part


def _fork_width(num_tokens: int) -> int:
    """Return the padded number of tokens after a prompt for a completion of this length."""
    if num_tokens == 0:
        return 0
    return max(num_tokens, MIN_FORK_TOKENS)


class _ScoredTokens:
    """Tokens that a packed batch scores.

    A score belongs to a label after a packed token. Rows that share both of these, the temperature
    and the sampling mask also share the score.
    """

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        """The index of a row, and a token's index in its completion."""
        self.labels: list[int] = []
        """The token id of each."""
        self.predicting: list[int] = []
        """The packed token before each."""
        self.scores_of_rows: list[int] = []
        """For each completion token of each row, its index into `tokens`."""
        self._shared: dict[Hashable, int] = {}

    @property
    def has_shared(self) -> bool:
        """Return whether several rows share a score."""
        return len(self.tokens) < len(self.scores_of_rows)

    def add(
        self, number: int, row: PackedRow, predicting: Sequence[int], num_in_others: int
    ) -> None:
        """Add the completion of a row.

        Args:
            number: the row's index.
            row: the row.
            predicting: the packed token before each token of the completion.
            num_in_others: number of leading completion tokens that another row may score too.
        """
        for t, label in enumerate(row.scored_ids):
            next_score = len(self.tokens)
            score = next_score
            if t < num_in_others:
                kept_ids = None
                if row.sampling_mask is not None:
                    kept_ids = bytes(row.sampling_mask[t])
                key = (predicting[t], label, row.temperature, kept_ids)
                score = self._shared.setdefault(key, next_score)
            if score == next_score:
                self.tokens.append((number, t))
                self.labels.append(label)
                self.predicting.append(predicting[t])
            self.scores_of_rows.append(score)


def _packed(
    rows: Sequence[PackedRow],
    tree: Sequence[TreeRow],
    device: torch.device,
    image_names: frozenset[str],
    *,
    num_dropped: int,
) -> PackedBatch:
    """Concatenate the rows of a tree, each without its shared tokens.

    Args:
        rows: all rows.
        tree: the rows to lay out.
        device: where the batch's tensors lie.
        image_names: arguments that the model's forward takes for images.
        num_dropped: number of tokens at each row's end that no forward computes.
    """
    pieces, segments, scored = _laid_out(rows, tree, num_dropped)
    token_ids: list[int] = []
    positions: list[int] = []
    routes: list[tuple[Any, int, int]] = []
    for piece in pieces:
        token_ids += piece.row.token_ids[piece.start : piece.stop]
        positions += range(piece.start, piece.stop)
        routes.append((piece.routes, 0, piece.num_tokens))
    scores_R = None
    if scored.has_shared:
        scores_R = to_device(scored.scores_of_rows, device)
    numbers = [row.number for row in tree]
    return PackedBatch(
        rows=numbers,
        lengths=[len(rows[number].completion_ids) for number in numbers],
        input_ids=to_device(token_ids, device)[None],
        position_ids=to_device(positions, device)[None],
        predicting_K=to_device(scored.predicting, device),
        labels_K=to_device(scored.labels, device),
        scored=scored.tokens,
        scores_R=scores_R,
        segments=segments,
        is_token=None,
        routes=joined_routes(routes, device),
        others=arguments_of_rows(pieces, image_names, dim=1),
        rope_sides=[piece.row.rope_side for piece in pieces],
        rope_counts=[piece.num_tokens for piece in pieces],
        num_shared_prompts=_num_shared_prompts(rows, tree),
    )


def _laid_out(
    rows: Sequence[PackedRow], tree: Sequence[TreeRow], num_dropped: int
) -> tuple[list[RowPiece], tuple[Segment, ...], _ScoredTokens]:
    """Return each row's computed piece and its segment, and the tokens to score.

    A row whose tokens are all shared has no piece. See `_packed`.
    """
    pieces: list[RowPiece] = []
    segments: list[Segment] = []
    scored = _ScoredTokens()
    # Packed tokens of the latest row, from its first to its last.
    path: tuple[range, ...] = ()
    num_packed = 0
    for index, (number, num_shared) in enumerate(tree):
        row = rows[number]
        path = _first(path, num_shared)
        piece = RowPiece(row, start=num_shared, stop=row.num_tokens - num_dropped)
        if piece.num_tokens:
            pieces.append(piece)
            segments.append(Segment(num_packed, piece.num_tokens, prefix=path))
            new_tokens = range(num_packed, num_packed + piece.num_tokens)
            path = (*path, new_tokens)
            num_packed = new_tokens.stop

        num_shared_with_next = 0
        if index + 1 < len(tree):
            num_shared_with_next = tree[index + 1].num_shared
        last_of_prompt = len(row.prompt_ids) - 1
        # The token before a score may be shared with the previous or the next row; then both rows
        # may score the same token.
        num_in_others = max(num_shared, num_shared_with_next) - last_of_prompt
        packed_tokens = list(chain.from_iterable(path))
        scored.add(number, row, packed_tokens[last_of_prompt:], num_in_others)
    return pieces, tuple(segments), scored


def _num_shared_prompts(rows: Sequence[PackedRow], tree: Sequence[TreeRow]) -> int:
    """Count the rows of a tree whose whole prompt is computed with another row."""
    num_shared_prompts = 0
    for number, num_shared in tree:
        if num_shared >= len(rows[number].prompt_ids):
            num_shared_prompts += 1
    return num_shared_prompts


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
    """Pad rows on the right.

    Args:
        rows: all rows.
        numbers: indices of the rows to pad.
        num_shared: number of leading tokens that these rows share, computed once before them.
        device: where the batch's tensors lie.
        image_names: arguments that the model's forward takes for images.
    """
    chosen = [rows[number] for number in numbers]
    # Each row's tokens after the shared ones, without the last token, which predicts nothing.
    sequences: list[list[int]] = []
    for row in chosen:
        sequences.append(row.token_ids[num_shared:-1])
    lengths = [len(sequence) for sequence in sequences]
    S = max(lengths)
    if num_shared:
        S = _fork_width(S)
    scored: list[tuple[int, int]] = []
    labels: list[int] = []
    predicting: list[int] = []
    for index, (number, row) in enumerate(zip(numbers, chosen, strict=True)):
        for t, label in enumerate(row.scored_ids):
            scored.append((number, t))
            labels.append(label)
            token = len(row.prompt_ids) - 1 + t
            if token >= num_shared:
                # The token is not in the shared prompt, and follows the rows before its own.
                token += index * S
            predicting.append(token)

    positions_1S = torch.arange(num_shared, num_shared + S, device=device)[None]
    shared_ids = None
    is_token = None
    num_shared_prompts = 0
    if num_shared:
        shared_ids = to_device(chosen[0].token_ids[:num_shared], device)[None]
        num_shared_prompts = len(numbers) - 1
    else:
        lengths_B1 = to_device(lengths, device)[:, None]
        is_token = (positions_1S < lengths_B1).to(torch.int64)
    pieces = [RowPiece(row, start=0, stop=S) for row in chosen]
    routes = [(piece.routes, 0, S) for piece in pieces]
    return PackedBatch(
        rows=numbers,
        lengths=[len(row.completion_ids) for row in chosen],
        input_ids=to_device(_right_padded(sequences, S), device).view(len(numbers), S),
        position_ids=positions_1S.expand(len(numbers), S),
        predicting_K=to_device(predicting, device),
        labels_K=to_device(labels, device),
        scored=scored,
        scores_R=None,
        segments=None,
        is_token=is_token,
        routes=joined_routes(routes, device),
        others=arguments_of_rows(pieces, image_names, dim=0),
        rope_sides=[row.rope_side for row in chosen],
        num_shared_prompts=num_shared_prompts,
        shared_ids=shared_ids,
    )


def _right_padded(sequences: Sequence[list[int]], length: int) -> list[int]:
    """Return sequences end to end, each padded to a length."""
    padded: list[int] = []
    for sequence in sequences:
        num_padding = length - len(sequence)
        padded += sequence
        padded += [PADDING_ID] * num_padding
    return padded


def arguments_of_rows(
    pieces: Sequence[RowPiece], names: frozenset[str], dim: int
) -> dict[str, torch.Tensor]:
    """Return a forward's image arguments and positions; empty if no row has `images`.

    Image tensors are concatenated. A row of text has zeros in per-token tensors.

    Args:
        pieces: the tokens of each row.
        names: arguments that the model's forward takes for images.
        dim: dimension along which per-token tensors are concatenated: 1 in a packed batch, 0 in a
            padded one.
    """
    with_images: list[tuple[RowImages, RowPiece]] = []
    for piece in pieces:
        if piece.row.images is not None:
            with_images.append((piece.row.images, piece))
    if not with_images:
        return {}
    arguments = _image_arguments(with_images, names, dim)
    positions = [_positions(images, piece) for images, piece in with_images]
    # [A, 1, N] or [A, B, S].
    if dim == 1:
        positions_ABS = torch.cat(positions, 1)[:, None]
    else:
        positions_ABS = torch.stack(positions, 1)
    arguments["position_ids"] = positions_ABS
    if len(positions_ABS) == 1:
        # A model without position axes takes (1, N) or (B, S).
        arguments["position_ids"] = positions_ABS[0]
    return arguments


def _positions(images: RowImages, piece: RowPiece) -> torch.Tensor:
    """Return the positions of a row's tokens, (A, tokens), with zeros in the padding."""
    positions_AT = images.positions_AT[:, piece.start : piece.stop]
    num_padding = piece.num_tokens - positions_AT.shape[1]
    return torch.nn.functional.pad(positions_AT, (0, num_padding))


def _image_arguments(
    with_images: Sequence[tuple[RowImages, RowPiece]], names: frozenset[str], dim: int
) -> dict[str, torch.Tensor]:
    """Join the tensors of all rows' images; see `arguments_of_rows`."""
    of_rows: list[dict[str, torch.Tensor]] = []
    names_per_token: set[str] = set()
    tensors_by_name: dict[str, list[torch.Tensor]] = defaultdict(list)
    for row_images, piece in with_images:
        of_row: dict[str, torch.Tensor] = {}
        images = row_images.images
        if images is not None:
            device = row_images.positions_AT.device
            of_row = images.arguments(piece.start, piece.stop, names, device)
            names_per_token.update(images.of_tokens)
        of_rows.append(of_row)
        for name, tensor in of_row.items():
            tensors_by_name[name].append(tensor)

    arguments: dict[str, torch.Tensor] = {}
    for name, tensors in tensors_by_name.items():
        if name not in names_per_token:
            arguments[name] = joined(tensors, 0)
            continue
        shape_after_tokens = tensors[0].shape[2:]
        of_all_rows = []
        for of_row, (_, piece) in zip(of_rows, with_images, strict=True):
            tensor = of_row.get(name)
            if tensor is None:
                tensor = tensors[0].new_zeros(1, piece.num_tokens, *shape_after_tokens)
            of_all_rows.append(tensor)
        arguments[name] = joined(of_all_rows, dim)
    return arguments
