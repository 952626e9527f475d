"""A window holds what its rows have in their pages, and its attention is the plain one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_rollout.engine.attention.decode_cache import DecodeLayer
from cb_rollout.engine.attention.places import Form, NotOrdinaryError
from cb_rollout.engine.attention.window import KeyWindow
from cb_rollout.engine.attention.window_step import WindowStep
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache
from cb_rollout.engine.probe import CacheLayout, LayerStates, StateShape

BLOCK_SIZE, BLOCKS_PER_SLOT, NUM_SLOTS = 4, 40, 5
HEADS, KEY_SIZE, VALUE_SIZE, QUERIES = 2, 8, 6, 3
FORMS = {
    "plain": Form(0.3),
    "window": Form(0.3, window=3),
    "softcap": Form(0.3, softcap=2.0),
    "sinks": Form(0.3, sinks_H=torch.linspace(-1, 2, HEADS * QUERIES)),
    "all": Form(0.3, 5, 2.0, torch.linspace(-1, 2, HEADS * QUERIES)),
}


class Sequences:
    """Sequences in slots, their pages, and the keys and values that each should have."""

    def __init__(self) -> None:
        kinds = (HEADS, KEY_SIZE), (HEADS, VALUE_SIZE)
        self.states = LayerStates(*(StateShape(kind, torch.float32) for kind in kinds))
        layout = CacheLayout((self.states, LayerStates(), self.states))
        self.cache = PagedCache(
            layout,
            num_blocks=NUM_SLOTS * BLOCKS_PER_SLOT,
            block_size=BLOCK_SIZE,
            num_slots=NUM_SLOTS,
            device=torch.device("cpu"),
        )
        for tensor in self.cache.tensors:
            tensor[BLOCK_SIZE:] = torch.nan  # whoever reads what nobody wrote shows it
        torch.empty(1 << 20).fill_(torch.nan)  # and memory that is taken next
        self.table = BlockTable(NUM_SLOTS, BLOCK_SIZE, torch.device("cpu"))
        self.window = KeyWindow(self.cache, self.table)
        self.draws = torch.Generator().manual_seed(0)
        self.histories: dict[int, list[torch.Tensor]] = {}

    def sit(self, slot: int, num_tokens: int) -> None:
        """Seat a new sequence whose prompt is in the pages."""
        blocks = [1 + slot * BLOCKS_PER_SLOT + index for index in range(BLOCKS_PER_SLOT)]
        self.table.write([(slot, index, block) for index, block in enumerate(blocks)])
        keys, values = (
            torch.randn(num_tokens, HEADS, size, generator=self.draws)
            for size in (KEY_SIZE, VALUE_SIZE)
        )
        self.histories[slot] = [keys, values]
        places = self.table.places(torch.tensor([slot]), torch.arange(num_tokens)[None])[0]
        for layer in (self.cache.layers[0], self.cache.layers[2]):
            for pages_NF, states in zip(layer.pages, (keys, values), strict=True):
                pages_NF[places] = states.flatten(1)

    def step(
        self, slots: list[int], form: Form, num_new: int = 1, num_right: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens for each row, of which the first `num_right` turn out to be right.

        Returns what the window's attention gives, and what it should.
        """
        lengths = [len(self.histories[slot][0]) + 1 for slot in slots]
        self.window.seat(slots, lengths, max(lengths) + num_new - 1)
        order = [slot for slot in self.window.slots for _ in range(num_new)]
        assert sorted(self.window.slots) == sorted(slots)
        ordered = [
            len(self.histories[slot][0]) + 1 + place
            for slot in self.window.slots
            for place in range(num_new)
        ]
        lengths_B = torch.tensor(ordered)
        places_B = self.table.places(torch.tensor(order), lengths_B - 1)
        step = WindowStep(self.window, ordered, lengths_B, places_B, num_new)
        queries, keys, values = (
            torch.randn(len(order), heads, 1, size, generator=self.draws)
            for heads, size in (
                (HEADS * QUERIES, KEY_SIZE),
                (HEADS, KEY_SIZE),
                (HEADS, VALUE_SIZE),
            )
        )
        got = [
            step.attend(DecodeLayer(index, self.states, torch.device("cpu")), *states, form)
            for index in (0, 2)
            for states in [(queries, keys, values)]
        ]
        self.window.advance(slots, lengths, num_new)
        assert torch.equal(*got)
        expected = []
        for row, slot in enumerate(order):
            for kind, new in enumerate((keys, values)):
                known = self.histories[slot][kind]
                self.histories[slot][kind] = torch.cat([known, new[row, :, 0][None]])
            expected.append(attended(queries[row, :, 0], *self.histories[slot], form))
        for slot in slots:
            kept = slice(len(self.histories[slot][0]) - num_new + num_right)
            self.histories[slot] = [states[kept] for states in self.histories[slot]]
        return got[0], torch.stack(expected)[:, None]


def attended(
    query_HD: torch.Tensor, keys_SHD: torch.Tensor, values_SHE: torch.Tensor, form: Form
) -> torch.Tensor:
    """One token's attention, head by head, in float64."""
    outputs = []
    for head, query_D in enumerate(query_HD.double()):
        key_head = head // QUERIES
        scores_S = keys_SHD[:, key_head].double() @ query_D * form.scale
        if form.softcap:
            scores_S = (scores_S / form.softcap).tanh() * form.softcap
        if form.window:
            scores_S[: -form.window] = -torch.inf
        rest = [] if form.sinks_H is None else [form.sinks_H[head].double()[None]]
        weights_S = torch.cat([scores_S, *rest]).softmax(0)[: len(scores_S)]
        outputs.append(weights_S @ values_SHE[:, key_head].double())
    return torch.stack(outputs).float()


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_attention_over_rows_that_come_and_go_is_the_plain_one(name, data):
    sequences = Sequences()
    slots = st.integers(0, NUM_SLOTS - 1)
    for _ in range(data.draw(st.integers(1, 6), label="turns")):
        for slot in data.draw(st.sets(slots, max_size=NUM_SLOTS), label="seated anew"):
            sequences.sit(slot, data.draw(st.integers(1, 9), label="tokens"))
        here = st.sampled_from(sorted(sequences.histories) or [None])
        rows = data.draw(st.lists(here, unique=True), label="rows")
        if not rows or rows == [None]:
            continue
        for _ in range(data.draw(st.integers(1, 4), label="steps")):
            num_new = data.draw(st.sampled_from([1, 1, 2, 5]), label="new tokens")
            num_right = data.draw(st.integers(1, num_new), label="right ones")
            got, expected = sequences.step(rows, FORMS[name], num_new, num_right)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_window_grows_by_many_columns_at_once():
    sequences = Sequences()
    sequences.sit(0, 3)
    sequences.sit(1, 7)
    sizes = set()
    for _ in range(140):
        got, expected = sequences.step([0, 1], FORMS["plain"])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        sizes.add(sequences.window.num_bytes)
    assert len(sizes) == 3


def test_what_was_no_number_in_a_row_before_is_never_read():
    sequences = Sequences()
    sequences.sit(0, 3)
    sequences.sit(1, 60)
    for _ in range(3):
        sequences.step([0, 1], FORMS["plain"])
    for layer in (0, 2):
        for held in sequences.window.held(layer):
            held[1] = torch.nan
    sequences.sit(2, 5)
    for _ in range(70):
        got, expected = sequences.step([0, 2], FORMS["plain"])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    sequences.sit(3, 90)
    got, expected = sequences.step([2, 3], FORMS["plain"])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_row_stays_where_it_is_after_a_draft_that_was_right_in_part():
    sequences = Sequences()
    sequences.sit(0, 3)
    sequences.sit(1, 7)
    sequences.step([0, 1], FORMS["plain"], num_new=4, num_right=3)
    for layer in (sequences.cache.layers[0], sequences.cache.layers[2]):
        for pages_NF in layer.pages:
            pages_NF.fill_(torch.nan)  # nothing is read from there again
    got, expected = sequences.step([0, 1], FORMS["plain"])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_states_of_two_types_are_refused():
    sequences = Sequences()
    sequences.sit(0, 3)
    sequences.window.seat([0], [4], 4)
    step = WindowStep(sequences.window, [4], torch.tensor([4]), torch.tensor([7]))
    layer = DecodeLayer(0, sequences.states, torch.device("cpu"))
    states = [torch.zeros(1, HEADS, 1, size) for size in (KEY_SIZE, KEY_SIZE, VALUE_SIZE)]
    states[2] = states[2].bfloat16()
    with pytest.raises(NotOrdinaryError, match=r"queries are torch\.float32"):
        step.attend(layer, *states, FORMS["plain"])
