"""The running sequences' keys and values side by side, for decode steps on a CPU.

Pages stay where everything is kept. A window is a dense copy of what the rows of a decode step
hold, made when a sequence joins and from then on extended by one column a step, so that nothing is
gathered and attention is two batched matrix products. PyTorch's own attention kernel for a CPU
makes two small products for every row and head, each of which costs more than its work.

R: rows there is room for, H: key heads, C: columns there is room for, D: size of a key or a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PADDING_PLACE, PagedCache, PagedLayer

COLUMNS_AT_A_TIME = 64
# Room for this many more steps is made at once.


@dataclass(slots=True)
class Row:
    """What one row of a window holds."""

    slot: int
    seating: int
    """Which of the sequences that sat in the slot it is."""
    num_tokens: int
    """Leading columns that are its keys."""
    num_drafted: int = 0
    """Columns behind them that are too, as far as the draft that they are of was right."""

    def holds(self, wanted: "Row") -> bool:
        """Whether it has what is wanted, of the same sequence."""
        is_same = (self.slot, self.seating) == (wanted.slot, wanted.seating)
        return is_same and 0 <= wanted.num_tokens - self.num_tokens <= self.num_drafted


class KeyWindow:
    """Keys and values of the sequences that decode, `[R, H, C, D]` a layer."""

    def __init__(self, cache: PagedCache, table: BlockTable) -> None:
        """Copy nothing yet."""
        self._layers = {
            index: layer
            for index, layer in enumerate(cache.layers)
            if isinstance(layer, PagedLayer)
        }
        self._shapes = {
            index: tuple(shape.shape for shape in cache.layout.layers[index].per_token[:2])
            for index in self._layers
        }
        self._table = table
        self._rows: list[Row] = []
        self._num_rows = self._num_columns = 0
        self._num_clean = 0
        """Leading columns in which every row has numbers, its own or zeros."""
        self._held: dict[int, list[torch.Tensor]] = {}
        self._expected: tuple[list[int], list[int], int] = ([], [], 0)
        """Slots, lengths and seatings of a next step with the same rows."""

    @property
    def slots(self) -> list[int]:
        """The slot of each row."""
        return [row.slot for row in self._rows]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def held(self, layer: int) -> list[torch.Tensor]:
        """Keys and values of one layer, each `[R, H, C, D]`."""
        return self._held[layer]

    def pages(self, layer: int) -> list[torch.Tensor]:
        """Pages of keys and of values of one layer."""
        return self._layers[layer].pages

    def seat(self, slots: Sequence[int], lengths: Sequence[int], longest: int) -> bool:
        """Hold what the sequences in `slots` have in their pages, and room for new tokens.

        Args:
            slots: of the coming step's sequences; others are dropped.
            lengths: each one's tokens, the first new one included.
            longest: of the longest one, all new ones included.

        Returns:
            Whether rows came, went or moved.
        """
        is_new = (slots, lengths, self._table.num_seatings) != self._expected
        if is_new:
            seatings = self._table.seatings
            wanted = {
                slot: Row(slot, seatings[slot], length - 1)
                for slot, length in zip(slots, lengths, strict=True)
            }
            self._drop(wanted)
            known = set(self.slots)
            joining = [row for slot, row in wanted.items() if slot not in known]
            self._reserve(len(wanted), longest)
            if joining:
                self._load(joining)
        else:
            self._reserve(len(slots), longest)
        # Until the step is done nothing is expected: it may fail, and come again.
        self._expected = ([], [], 0)
        return is_new

    def advance(self, slots: Sequence[int], lengths: Sequence[int], num_new: int) -> None:
        """Note that every row got so many tokens, all but the first of them drafted.

        The other arguments are those of `seat`.
        """
        for row in self._rows:
            row.num_tokens += 1
            row.num_drafted = num_new - 1
        if num_new == 1:
            longer = [length + 1 for length in lengths]
            self._expected = (list(slots), longer, self._table.num_seatings)

    def _drop(self, wanted: dict[int, Row]) -> None:
        """Take out rows that are not wanted as they are; the last row moves into each gap."""
        index = 0
        while index < len(self._rows):
            row = self._rows[index]
            if row.slot in wanted and row.holds(wanted[row.slot]):
                self._rows[index] = wanted[row.slot]
                index += 1
                continue
            last = self._rows.pop()
            if last is row:
                break
            self._rows[index] = last
            columns = slice(self._num_clean)
            for held_RHCD in self._tensors():
                held_RHCD[index, :, columns] = held_RHCD[len(self._rows), :, columns]
        if not self._rows:
            self._num_clean = 0

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        """Make room, and have no column that is read hold what is no number.

        A column hidden by a mask counts nothing, but zero times what is no number is none either.
        """
        if num_rows > self._num_rows or num_columns > self._num_columns:
            self._enlarge(num_rows, num_columns)
        if num_columns > self._num_clean:
            num_clean = min(num_columns + COLUMNS_AT_A_TIME, self._num_columns)
            for held_RHCD in self._tensors():
                held_RHCD[: len(self._rows), :, self._num_clean : num_clean] = 0
            self._num_clean = num_clean

    def _enlarge(self, num_rows: int, num_columns: int) -> None:
        self._num_rows = max(num_rows, self._num_rows)
        if num_columns > self._num_columns:
            self._num_columns = num_columns + COLUMNS_AT_A_TIME
        for index, layer in self._layers.items():
            old, new = self._held.pop(index, []), []
            for (heads, size), pages in zip(self._shapes[index], layer.pages, strict=False):
                new.append(pages.new_empty(self._num_rows, heads, self._num_columns, size))
            kept = slice(len(self._rows)), slice(None), slice(self._num_clean)
            for old_RHCD, new_RHCD in zip(old, new, strict=False):
                new_RHCD[kept] = old_RHCD[kept]
            self._held[index] = new

    def _load(self, joining: list[Row]) -> None:
        """Copy what sequences that join have in their pages."""
        first, last = len(self._rows), len(self._rows) + len(joining)
        lengths = torch.tensor([row.num_tokens for row in joining])
        columns = torch.arange(int(lengths.max()))
        places = self._table.places(
            torch.tensor([row.slot for row in joining]), columns.expand(len(joining), -1)
        )
        places = places.masked_fill(columns >= lengths[:, None], PADDING_PLACE)
        for index, layer in self._layers.items():
            for held_RHCD, pages_NF in zip(self._held[index], layer.pages, strict=False):
                heads, size = held_RHCD.shape[1], held_RHCD.shape[3]
                found = pages_NF.index_select(0, places.view(-1))
                found = found.view(*places.shape, heads, size).transpose(1, 2)
                held_RHCD[first:last, :, : len(columns)] = found
                held_RHCD[first:last, :, len(columns) : self._num_clean] = 0
        self._rows += joining

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self._held.values() for tensor in pair]
