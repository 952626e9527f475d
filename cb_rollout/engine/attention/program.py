"""A list of operators that C++ goes through by itself, for few rows.

What an operator computes takes less time, for few rows, than to call it from Python. Every tensor
of a program lies in order, so what only gives one another shape is nothing at all.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value.
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.engine.attention.cpp_decode import CppReader, attend_kernel
from cb_rollout.engine.attention.decode_cache import DecodeLayer, Reader
from cb_rollout.engine.attention.places import Form
from cb_rollout.engine.native.library import COUNT, TENSOR
from cb_rollout.engine.native.program import (
    NOWHERE,
    Attention,
    Kind,
    Operator,
    Rows,
    run_kernel,
)

Value = Any
# What names a tensor of a program; hashable.

Sizes = tuple[int, ...]
# Of a tensor, without its rows.


class Call(NamedTuple):
    """An operator of a program."""

    kind: Kind
    given: tuple[Value | None, ...]
    """What it reads, three tensors at most; None: one that is not there."""
    sizes: Sizes = ()
    """As program.cpp has them; where it attends, H, K, D and E."""
    number: float = 0.0
    layer: DecodeLayer | None = None
    """Which layer attends."""
    form: Form | None = None
    """And how."""


class Program:
    """Runs a list of operators on few rows."""

    is_watched = False
    """Whether each operator is a call of its own, for who looks where time goes."""

    def __init__(
        self,
        calls: Mapping[Value, Call],
        inputs: Sequence[Value],
        outputs: Sequence[tuple[Value, Sizes]],
        sizes: Mapping[Value, Sizes],
        dtype: torch.dtype,
    ) -> None:
        """Lay out its numbers.

        Args:
            calls: in order, by what each computes.
            inputs: in the order of the call; at least one has rows.
            outputs: what is returned, and of which sizes.
            sizes: of every input and result whose first dimension is the rows, without it.
            dtype: of everything.
        """
        returned = list(dict.fromkeys(value for value, _ in outputs))
        self._row_input = next(place for place, value in enumerate(inputs) if value in sizes)
        self._returned_sizes = [sizes[value] for value in returned]
        self._views = [(returned.index(value), shape) for value, shape in outputs]
        places = {value: place for place, value in enumerate((*inputs, *returned))}
        workspace = _Workspace()
        workspace.place(calls, places, sizes)
        self._workspace_size = workspace.size
        self._attended = [_AttentionCall.of(call) for call in calls.values() if call.layer]
        self._attentions = (Attention * len(self._attended))(
            *(attended.described(dtype) for attended in self._attended)
        )
        numbers = iter(range(len(self._attended)))
        self._operators = (Operator * len(calls))(
            *(
                Operator(
                    call.kind,
                    _places(call.given, places),
                    places[value],
                    (COUNT * 4)(*((next(numbers),) if call.layer else call.sizes)),
                    call.number,
                )
                for value, call in calls.items()
            )
        )
        self._kernel = run_kernel(dtype)
        # A graph calls functions, not objects, and names them.
        self.__name__ = "program"

    def __call__(self, reader: Reader, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the operators compute.

        Args:
            reader: of the step, which attends.
            inputs: as the program was told, in its dtype: `[B, *sizes]`, or a weight.

        Returns:
            For each output in order, `[B, *sizes]` in the program's dtype.

        Raises:
            NotOrdinaryError: the reader's.
        """
        rows = inputs[self._row_input]
        num_rows = rows.shape[0]
        tensors = [tensor.contiguous() for tensor in inputs]
        returned = [rows.new_empty(num_rows, *sizes) for sizes in self._returned_sizes]
        tensors += returned
        memory = _Memory(tensors, rows.new_empty(num_rows * self._workspace_size), num_rows)
        paged = reader if isinstance(reader, CppReader) else None
        if self.is_watched or (self._attended and paged is None):
            self._run_each(memory, reader)
        elif paged is not None and self._attended:
            where, _held = self._located(paged)
            self._run(0, len(self._operators), memory, where)
        else:
            self._run(0, len(self._operators), memory)
        return tuple(returned[index].view(num_rows, *sizes) for index, sizes in self._views)

    def _located(self, reader: CppReader) -> tuple[Rows, list[torch.Tensor]]:
        """Where keys are now, and tensors that are to be held as long as that is used."""
        held: list[torch.Tensor] = []
        for attention, attended in zip(self._attentions, self._attended, strict=True):
            keys, values = reader.pages(attended.layer)
            attention.keys, attention.values = keys.data_ptr(), values.data_ptr()
            if attended.form.sinks_H is not None:
                held.append(attended.form.sinks_H.to(keys.dtype).contiguous())
                attention.sinks = held[-1].data_ptr()
        blocks = reader.table.blocks
        where = Rows(
            blocks.data_ptr(),
            blocks.shape[1],
            reader.table.block_size,
            reader.slots_B.data_ptr(),
            reader.lengths_B.data_ptr(),
        )
        return where, held

    def _run(self, first: int, end: int, memory: "_Memory", where: Rows | None = None) -> None:
        self._kernel(
            self._operators,
            first,
            end,
            memory.addresses,
            memory.workspace.data_ptr(),
            memory.num_rows,
            self._attentions,
            None if where is None else ctypes.byref(where),
        )

    def _run_each(self, memory: "_Memory", reader: Reader) -> None:
        """One operator after the other, and attention by whatever reader there is."""
        attended = iter(self._attended)
        for index, described in enumerate(self._operators):
            if described.kind == Kind.ATTENTION:
                attention = next(attended)
                places = zip(described.given, attention.state_sizes, strict=True)
                query, key, value = (memory.view(place, sizes) for place, sizes in places)
                output_B1HE = reader.attend(attention.layer, query, key, value, attention.form)
                memory.view(described.output, output_B1HE.shape[1:]).copy_(output_B1HE)
            elif described.kind == Kind.PRODUCT:
                self.run_product(index, memory)
            else:
                self._run(index, index + 1, memory)

    def run_product(self, index: int, memory: "_Memory") -> None:
        """Run one operator that is a product; by itself, so that it can be watched."""
        self._run(index, index + 1, memory)


class _AttentionCall(NamedTuple):
    """An attention of a program."""

    layer: DecodeLayer
    form: Form
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, call: Call) -> "_AttentionCall":
        assert call.layer is not None
        assert call.form is not None
        return cls(call.layer, call.form, *call.sizes)

    def described(self, dtype: torch.dtype) -> Attention:
        """As C++ takes it, but for where keys and sinks are."""
        _, form, *sizes = self
        return Attention(
            ctypes.cast(attend_kernel(dtype, *sizes), TENSOR),
            None,
            None,
            None,
            *sizes,
            form.window or 0,
            form.scale,
            form.softcap or 0.0,
        )

    @property
    def state_sizes(self) -> list[Sizes]:
        """Of queries, keys and values."""
        num_keys, size = self.num_key_heads, self.key_size
        return [(self.num_heads, 1, size), (num_keys, 1, size), (num_keys, 1, self.value_size)]


class _Memory(NamedTuple):
    """Where the numbers of one call are."""

    tensors: list[torch.Tensor]
    workspace: torch.Tensor
    num_rows: int

    @property
    def addresses(self) -> Any:
        """Of the tensors."""
        return (TENSOR * len(self.tensors))(*(tensor.data_ptr() for tensor in self.tensors))

    def view(self, place: int, sizes: Sizes) -> torch.Tensor:
        """What lies at a place, `[B, *sizes]`."""
        if place >= 0:
            return self.tensors[place].view(self.num_rows, *sizes)
        start = (-1 - place) * self.num_rows
        numbers = self.workspace[start : start + self.num_rows * math.prod(sizes)]
        return numbers.view(self.num_rows, *sizes)


class _Workspace:
    """Where a program's numbers lie that nobody else needs, each for as long as it is needed."""

    def __init__(self) -> None:
        self.size = 0
        """Numbers of a row."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def place(
        self, calls: Mapping[Value, Call], places: dict[Value, int], sizes: Mapping[Value, Sizes]
    ) -> None:
        """Find a place for all that is computed and has none in `places` yet."""
        last_use = {value: index for index, c in enumerate(calls.values()) for value in c.given}
        fixed = set(places)
        for index, (value, call) in enumerate(calls.items()):
            if value not in places:
                places[value] = self._take(math.prod(sizes[value]))
            for done in {given for given in call.given if last_use[given] == index} - fixed:
                if done is not None:
                    self._free[math.prod(sizes[done])].append(places[done])

    def _take(self, size: int) -> int:
        """A place for so many numbers of each row."""
        if self._free[size]:
            return self._free[size].pop()
        place = -1 - self.size
        self.size += size
        return place


def _places(given: Sequence[Value | None], places: Mapping[Value, int]) -> Any:
    there = [NOWHERE if value is None else places[value] for value in given]
    return (COUNT * 3)(*there, *([NOWHERE] * (3 - len(there))))
