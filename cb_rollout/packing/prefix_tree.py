"""Order rows as a prefix tree, in which shared prefixes are computed once.

Owns the order, the number of shared tokens, the cuts of a large tree, and the choice of
representative rows for comparing two forwards. Reads rows and makes no tensors.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.packing.rows import PackedRow, RowPath

# Rows on which two forwards are compared before a layout is used.
NUM_COMPARED = 4


class TreeRow(NamedTuple):
    """A row's place in a prefix tree."""

    number: int
    """Index of the row."""
    num_shared: int
    """Number of leading tokens that are computed with the previous row of the tree."""


class _Fork(NamedTuple):
    """Two neighbours in a tree that share a prefix and then differ."""

    num_shared: int
    before: int
    number: int


class _LastPart(NamedTuple):
    """The best last part for a tree's first rows, and the cost of all parts of these rows."""

    num_parts: int
    num_recomputed: int
    """Number of shared tokens that are recomputed, because a part begins after them."""
    start: int
    """The first row of the last part."""

    @property
    def cost(self) -> tuple[int, int]:
        return self.num_parts, self.num_recomputed


def in_tree_order(rows: Sequence[PackedRow], numbers: Iterable[int]) -> list[TreeRow]:
    """Return the rows at `numbers` in tree order, each with its shared tokens.

    In sorted order, a row shares at least as many tokens with the previous row as with any earlier
    one. A row that is a prefix of another one comes after it.
    """
    paths = {number: rows[number].path for number in numbers}
    tree: list[TreeRow] = []
    for number in sorted(paths, key=paths.__getitem__, reverse=True):
        num_shared = 0
        if tree:
            before = tree[-1].number
            num_equal = _num_equal(paths[before], paths[number])
            num_shared = _num_shareable(rows[before], rows[number], num_equal)
        tree.append(TreeRow(number, num_shared))
    return tree


def _num_equal(path: RowPath, other: RowPath) -> int:
    """Return the length of two rows' common prefix."""
    if path.compatibility != other.compatibility:
        return 0
    return num_common([path.token_keys, other.token_keys])


def _num_shareable(row: PackedRow, other: PackedRow, num_equal: int) -> int:
    """Return the length of two rows' common prefix that may be computed once."""
    limits = [num_equal]
    for each in (row, other):
        if each.max_shared is not None:
            limits.append(each.max_shared)
    num_shared = min(limits)
    return min(row.num_shareable(num_shared), other.num_shareable(num_shared))


def num_tree_tokens(rows: Sequence[PackedRow]) -> int:
    """Return the number of tokens that scores need: shared prefixes once, no last tokens."""
    total = 0
    for number, num_shared in in_tree_order(rows, _with_completions(rows)):
        total += rows[number].num_tokens - 1 - num_shared
    return total


def _with_completions(rows: Sequence[PackedRow]) -> list[int]:
    return [number for number, row in enumerate(rows) if row.completion_ids]


def cut_tree(
    rows: Sequence[PackedRow], tree: Sequence[TreeRow], max_tokens: int | None
) -> list[list[TreeRow]]:
    """Cut a tree into parts of at most `max_tokens` tokens; None: leave it whole.

    The tokens that a part's first row shares with the previous row are recomputed. Of all cuts into
    the fewest parts, the one with the fewest recomputed tokens is taken. A row that is longer than
    `max_tokens` is a separate part.
    """
    if not tree:
        return []
    if max_tokens is None:
        return [list(tree)]
    # best[n] is the best last part if the tree had only its first n rows.
    best = [_LastPart(num_parts=0, num_recomputed=0, start=0)]
    for end in range(1, len(tree) + 1):
        best.append(_best_last_part(rows, tree, best, end, max_tokens))
    parts: list[list[TreeRow]] = []
    end = len(tree)
    while end:
        start = best[end].start
        first = tree[start]._replace(num_shared=0)
        parts.append([first, *tree[start + 1 : end]])
        end = start
    parts.reverse()
    return parts


def _best_last_part(
    rows: Sequence[PackedRow],
    tree: Sequence[TreeRow],
    best: Sequence[_LastPart],
    end: int,
    max_tokens: int,
) -> _LastPart:
    """Choose where the last part of a tree's first rows begins.

    Args:
        rows: all rows.
        tree: the whole tree.
        best: the choice for each smaller number of first rows.
        end: the number of first rows.
        max_tokens: maximum tokens of a part; a single row may have more.
    """
    chosen: _LastPart | None = None
    # Tokens of the rows after `start`, without those shared with the previous row.
    num_tokens = 0
    for start in reversed(range(end)):
        number, num_shared = tree[start]
        size = rows[number].num_tokens
        is_single_row = start == end - 1
        if is_single_row or num_tokens + size <= max_tokens:
            before = best[start]
            choice = _LastPart(
                num_parts=before.num_parts + 1,
                num_recomputed=before.num_recomputed + num_shared,
                start=start,
            )
            if chosen is None or choice.cost < chosen.cost:
                chosen = choice
        num_tokens += size - num_shared
        if num_tokens > max_tokens:
            break
    assert chosen is not None
    return chosen


def representative(rows: Sequence[PackedRow]) -> tuple[list[int], list[PackedRow]]:
    """Return some rows to compare two forwards on: their indices, and the rows.

    They are the two rows that share the longest prefix before they differ, the longest row, and
    others. If no rows share a prefix, the longest row is included twice and shares its prompt,
    because a single row would not show whether a layer carries its state into the next row.
    """
    scored = _with_completions(rows)
    tree = in_tree_order(rows, scored)
    forks = _forks(rows, tree)
    longest = max(scored, key=lambda number: rows[number].num_tokens)
    if forks:
        fork = max(forks)
        numbers = [fork.before, fork.number]
        chosen = [rows[fork.before], rows[fork.number]]
    else:
        # The second row computes a token itself, even if its completion has a single token.
        num_shared = min(len(rows[longest].prompt_ids), rows[longest].num_tokens - 2)
        row = rows[longest]._replace(max_shared=num_shared)
        numbers = [longest, longest]
        chosen = [row, row]
    roots = [row.number for row in tree if row.num_shared == 0]
    for number in chain([longest], roots, scored):
        if len(numbers) == NUM_COMPARED:
            break
        if number not in numbers:
            numbers.append(number)
            chosen.append(rows[number])
    return numbers, chosen


def _forks(rows: Sequence[PackedRow], tree: Sequence[TreeRow]) -> list[_Fork]:
    forks: list[_Fork] = []
    for before, row in pairwise(tree):
        num_computed = rows[row.number].num_tokens - 1
        if 0 < row.num_shared < num_computed:
            forks.append(_Fork(row.num_shared, before.number, row.number))
    return forks


def fork_examples(rows: Sequence[PackedRow]) -> list[list[PackedRow]]:
    """Return two sets of rows on which to compare the gradients of forked states.

    Recurrent layers compute a single token differently from several, and a batch may lack one of
    the two cases. So the forks of the first set compute one token after their prompt, and those of
    the second set two or more. Their completions have one more token, because the last one is not
    computed. Experts and sampling masks are left out. Rows with images are never forked, so they
    give no examples.

    Args:
        rows: as `representative` returns them, the two with the longest common prefix first.
    """
    if any(row.images is not None for row in rows):
        return []
    one_token: list[PackedRow] = []
    for row in rows[:2]:
        row_of_two = _lengthened(row, 2)
        one_token.append(_cut(row_of_two, 2))
    more_tokens = [_lengthened(row, 3) for row in rows]
    return [one_token, more_tokens]


def _lengthened(row: PackedRow, least: int) -> PackedRow:
    """Return a row whose completion is repeated until it has at least `least` tokens."""
    ids = list(row.completion_ids)
    if len(ids) < least:
        num_repeats = math.ceil(least / len(ids))
        ids = (ids * num_repeats)[:least]
    return row._replace(completion_ids=ids, routes=None, sampling_mask=None)


def _cut(row: PackedRow, most: int) -> PackedRow:
    """Return a row with the first `most` tokens of its completion."""
    return row._replace(completion_ids=row.completion_ids[:most])
