"""The decode kernels against a plain softmax, over random shapes; interpreted where no GPU is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_faults import with_fault
from plain_attention import softmax_attention

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from cb_rollout.engine.attention.decode_cache import AttentionSpec, DecodeLayer
from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.attention.triton import kernels, launch
from cb_rollout.engine.attention.triton.launch import attend, cut, shared_rows, write
from cb_rollout.engine.cuda_graphs.graphs import padded_rows
from cb_rollout.engine.kv_cache.layout import LayerSpec, TensorSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FLOAT32 = 1e-5 if torch.cuda.is_available() else 2e-6
# A device approximates powers and logarithms of two to about 2e-6.

TOLERANCES = {torch.float32: FLOAT32, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Rounding of outputs of order one; float32 products are not rounded to tf32.


BFLOAT16_ULP = 2**-7
# Of numbers below two: outputs are rounded once, and shares before their product with values.


class Pages:
    """Random pages of some rows, groups of which share their leading blocks."""

    def __init__(self, lengths, groups, *, key_heads, sizes, block_size, dtype):
        self.lengths, self.groups, self.block_size, self.dtype = lengths, groups, block_size, dtype
        self.key_heads, (self.D, self.E) = key_heads, sizes
        width = max(lengths) // block_size + 1
        blocks = torch.randperm(len(lengths) * width) + 1
        self.table = blocks.view(len(lengths), width).to(DEVICE)
        for first, count, num_shared in groups:
            self.table[first : first + count, : num_shared // block_size] = self.table[
                first, : num_shared // block_size
            ]
        num_slots = (len(blocks) + 1) * block_size
        self.keys, self.values = (
            torch.randn(num_slots, key_heads * size, device=DEVICE).to(dtype) for size in sizes
        )
        states = (TensorSpec((key_heads, size), dtype) for size in sizes)
        self.layer = DecodeLayer(0, LayerSpec(*states), DEVICE)

    def metadata(self, num_stretches, interval, heads_per_key, has_tiles):
        tensors = (self.table, self.keys, self.values)
        addresses = [tensors[0].data_ptr(), self.table.shape[1]]
        addresses += [tensor.data_ptr() for tensor in tensors[1:]]
        rows_per_tile = shared_rows(heads_per_key, self.layer)
        shared, tiles = [0] * len(self.lengths), []
        for first, count, num_shared in self.groups:
            shared[first : first + count] = [num_shared] * count
            for row in range(first, first + count, rows_per_tile):
                tiles.append((row, min(rows_per_tile, first + count - row)))
        tiles.append((0, 0))  # as in a graph with room for more tiles

        def integers(values):
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return AttentionMetadata(
            torch.tensor(addresses, device=DEVICE),
            self.block_size,
            integers(range(len(self.lengths))),
            integers(self.lengths),
            num_stretches,
            interval,
            interval,
            integers(shared) if has_tiles else None,
            integers([first for first, _ in tiles]) if has_tiles else None,
            integers([count for _, count in tiles]) if has_tiles else None,
            rows_per_tile,
        )

    def row(self, row):
        """Keys and values of one row, in order."""
        offsets = torch.arange(self.block_size, device=DEVICE)
        slots = (self.table[row, :, None] * self.block_size + offsets).view(-1)
        slots = slots[: self.lengths[row]]
        return (
            self.keys[slots].view(-1, self.key_heads, self.D),
            self.values[slots].view(-1, self.key_heads, self.E),
        )


def check(
    pages, spec, *, heads_per_key, num_stretches=1, interval=16, has_tiles=False, tolerance=None
):
    metadata = pages.metadata(num_stretches, interval, heads_per_key, has_tiles)
    B, K, dtype = len(pages.lengths), pages.key_heads, pages.dtype
    new_keys, new_values = (
        torch.randn(B, K, size, device=DEVICE).to(dtype) for size in (pages.D, pages.E)
    )
    before = pages.keys.clone()
    write(new_keys, new_values, pages.layer, metadata)
    query = torch.randn(B, K * heads_per_key, pages.D, device=DEVICE).to(dtype)
    work = cut(metadata, spec.window) if num_stretches else None
    tolerance = tolerance or TOLERANCES[dtype]
    output = attend(query, pages.layer, metadata, spec, work)
    num_written = (pages.keys != before).any(1).sum().item()
    assert num_written == sum(length > 0 for length in pages.lengths)
    for row, length in enumerate(pages.lengths):
        if not length:
            assert not output[row].any()
            continue
        keys, values = pages.row(row)
        assert torch.equal(keys[-1], new_keys[row])
        assert torch.equal(values[-1], new_values[row])
        expected = softmax_attention(query[row], keys, values, spec)
        torch.testing.assert_close(output[row].double(), expected, atol=tolerance, rtol=tolerance)


def sinks(count):
    return torch.randn(count, device=DEVICE)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_every_row_attends_over_its_own_keys(data, seed):
    torch.manual_seed(seed)
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any))
    key_heads, heads_per_key = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 5), (2, 3)]))
    pages = Pages(
        lengths,
        [],
        key_heads=key_heads,
        sizes=data.draw(st.sampled_from([(16, 16), (24, 40), (64, 8)])),
        block_size=data.draw(st.sampled_from([1, 4, 7, 32])),
        dtype=data.draw(st.sampled_from(list(TOLERANCES))),
    )
    spec = AttentionSpec(
        0.3,
        window=data.draw(st.sampled_from([None, 1, 9, 64])),
        softcap=data.draw(st.sampled_from([None, 4.0])),
        sinks_H=data.draw(st.sampled_from([None, sinks(key_heads * heads_per_key)])),
    )
    num_stretches = data.draw(st.integers(0, 4))
    check(pages, spec, heads_per_key=heads_per_key, num_stretches=num_stretches)


@pytest.mark.fast_cases("1-all")
@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.3), AttentionSpec(0.2, 29, 4.0, sinks(6))], ids=["plain", "all"]
)
@pytest.mark.parametrize("num_stretches", [1, 9])
def test_rows_that_share_a_prompt_read_it_as_if_it_were_their_own(spec, num_stretches):
    torch.manual_seed(num_stretches)
    groups = [(0, 3, 21), (4, 2, 14)]
    pages = Pages(
        [25, 31, 63, 5, 15, 30],
        groups,
        key_heads=2,
        sizes=(24, 40),
        block_size=7,
        dtype=torch.float32,
    )
    given = {"num_stretches": num_stretches, "interval": 4}
    check(pages, spec, heads_per_key=3, **given, has_tiles=True)


@pytest.mark.fast_cases("0-9")
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("ended", [0, 1])
def test_a_row_that_ended_hides_no_key_from_its_neighbours(window, ended):
    """Its length is 0, and its tile stays: it sees nothing, and they see the end of the prompt."""
    torch.manual_seed(ended)
    lengths = [25, 31, 33, 30]
    lengths[ended] = 0
    groups, sizes = [(0, 3, 21)], {"key_heads": 1, "sizes": (16, 16), "block_size": 7}
    pages = Pages(lengths, groups, **sizes, dtype=torch.float32)
    given = {"num_stretches": 6, "interval": 4, "heads_per_key": 2}
    check(pages, AttentionSpec(0.3, window), **given, has_tiles=True)


def check_bfloat16_tiles(heads_per_key, num_stretches):
    """Compare rows of two tiles of one prompt, and a row alone, of the shape that GRPO decodes."""
    torch.manual_seed(heads_per_key)
    sizes = {"key_heads": 1, "sizes": (128, 128), "block_size": 16, "dtype": torch.bfloat16}
    most = 64 // heads_per_key
    pages = Pages([48 + row for row in range(most + 2)], [(0, most + 1, 48)], **sizes)
    pages.lengths[0], pages.lengths[-1] = 0, 30
    assert shared_rows(heads_per_key, pages.layer) == most
    given = {"num_stretches": num_stretches, "interval": 16, "has_tiles": True}
    spec = AttentionSpec(128**-0.5)
    check(pages, spec, heads_per_key=heads_per_key, **given, tolerance=BFLOAT16_ULP)


@pytest.mark.fast_cases("5-4")
@pytest.mark.parametrize("heads_per_key", [4, 2])
@pytest.mark.parametrize("num_stretches", [1, 5])
def test_tiles_of_a_prompt_in_bfloat16_are_rounded_once(heads_per_key, num_stretches):
    check_bfloat16_tiles(heads_per_key, num_stretches)


def test_a_group_larger_than_a_tile_gets_several():
    torch.manual_seed(0)
    pages = Pages(
        [9 + row for row in range(7)],
        [(0, 7, 8)],
        key_heads=1,
        sizes=(16, 16),
        block_size=4,
        dtype=torch.float32,
    )
    assert shared_rows(10, pages.layer) == 3
    check(pages, AttentionSpec(0.3), heads_per_key=10, has_tiles=True)


@pytest.mark.parametrize(
    ("num_rows", "num_stretches", "expected"), [(8, 6, 3), (9, 6, 2), (8, 0, 2)]
)
def test_few_rows_that_are_split_have_a_third_stage(num_rows, num_stretches, expected, monkeypatch):
    torch.manual_seed(0)
    choose, chosen = launch.num_stages, []

    def num_stages(*arguments, **named):
        chosen.append(choose(*arguments, **named))
        return chosen[-1]

    monkeypatch.setattr(launch, "num_stages", num_stages)
    lengths, sizes = [40 + row for row in range(num_rows)], (16, 16)
    pages = Pages(lengths, [], key_heads=1, sizes=sizes, block_size=4, dtype=torch.float32)
    check(pages, AttentionSpec(0.3), heads_per_key=2, num_stretches=num_stretches, interval=4)
    assert chosen == [expected]


@pytest.mark.parametrize("size", [96, 256])
def test_large_heads_fit(size):
    torch.manual_seed(size)
    pages = Pages([40], [], key_heads=1, sizes=(size, size), block_size=16, dtype=torch.bfloat16)
    check(pages, AttentionSpec(size**-0.5), heads_per_key=4)


def test_queries_and_keys_may_be_slices_of_a_larger_tensor():
    torch.manual_seed(0)
    pages = Pages([5, 9], [], key_heads=2, sizes=(8, 8), block_size=4, dtype=torch.float32)
    metadata = pages.metadata(0, 16, 1, has_tiles=False)
    packed = torch.randn(2, 6, 8, 2, device=DEVICE).transpose(2, 3)[:, :, 0]
    query, keys, values = packed[:, :2], packed[:, 2:4], packed[:, 4:]
    write(keys, values, pages.layer, metadata)
    output = attend(query, pages.layer, metadata, AttentionSpec(0.3), None)
    for row in range(2):
        expected = softmax_attention(query[row], *pages.row(row), AttentionSpec(0.3))
        torch.testing.assert_close(output[row].double(), expected, atol=FLOAT32, rtol=FLOAT32)


def parts_of(items, unit):
    """The numbers of a unit's stretches, in the order of the list."""
    found = [divmod(item, 1 << 12) for item in items.tolist() if item >= 0]
    return [part for one, part in found if one == unit]


def work_of(lengths, groups, num_stretches, window=None):
    pages = Pages(lengths, groups, key_heads=1, sizes=(16, 16), block_size=1, dtype=torch.float32)
    return cut(pages.metadata(num_stretches, 128, 1, bool(groups)), window)


def test_one_long_row_among_short_ones_is_cut_alone():
    """No program is launched for more than there is, but for as many as keep processors busy."""
    work = work_of([300] * 31 + [8192], [], 66)
    assert work.own_O.shape == (32 + 66,)
    assert all(parts_of(work.own_O, row) == [0] for row in range(31))
    stretch = work.sizes[0].item()
    assert stretch == 384
    assert parts_of(work.own_O, 31) == list(range(-(-8192 // 384)))
    assert (work.own_O >= 0).sum() == work.first_parts[-1] == 31 + 22


def test_a_prompt_of_one_group_is_cut_so_that_it_fills_the_card():
    work = work_of([2052] * 16, [(0, 16, 2048)], 10)
    assert parts_of(work.shared_S, 0) == list(range(8))
    assert all(parts_of(work.own_O, row) == [0] for row in range(16))
    assert work.first_parts.tolist() == [9 * row for row in range(17)]
    assert work.max_parts >= 16 * 9


def test_a_window_is_what_is_cut():
    work = work_of([3000, 10], [], 4, window=512)
    assert work.sizes[0] == 256
    # 512 seen tokens and 10; whatever came before them is no one's work.
    assert [len(parts_of(work.own_O, row)) for row in (0, 1)] == [2, 1]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    num_stretches=st.integers(1, 70),
    window=st.sampled_from([None, 1, 700]),
)
def test_the_lists_hold_every_stretch_whatever_the_lengths(lengths, num_stretches, window):
    metadata = AttentionMetadata(
        torch.zeros(2, device=DEVICE),
        1,
        *(torch.tensor(lengths, dtype=torch.int32, device=DEVICE) for _ in range(2)),
        num_stretches,
    )
    work = cut(metadata, window)
    stretch, counts = work.sizes[0].item(), work.own_counts_B.tolist()
    seen = [min(length, window or length) for length in lengths]
    assert counts == [-(-one // stretch) for one in seen]
    assert sum(counts) == (work.own_O >= 0).sum() == work.first_parts[-1] <= work.max_parts
    for row, count in enumerate(counts):
        assert parts_of(work.own_O, row) == list(range(count))


FAULTS = {
    "keys are written to a block's first slot": (
        "position % BLOCK_SIZE\n        offsets",
        "0 * position\n        offsets",
    ),
    "parts of a prompt lie on those of the row": (
        "tl.store(own_counts + rows, counts, mask=is_row)",
        "tl.store(own_counts + rows, counts * 0, mask=is_row)",
    ),
    "a stretch ends one key early": (
        "tl.minimum(start + stretch, end), start)",
        "tl.minimum(start + stretch, end) - 1, start)",
    ),
    "scores are powers of two": ("scores * LOG2_E", "scores"),
    "a window is one key short": (">= earliest[:, None]", "> earliest[:, None]"),
    "a part is joined by its largest score alone": ("largest + known", "largest"),
    "parts are joined without their shares": ("partial * shares[:, :, None]", "partial"),
    "sinks are left out of a join": ("        total += 1.0\n", "        total += 0.0\n"),
}
TILE_FAULTS = {
    "a tile has the queries of its first row": ("(first_row + member)", "(first_row + 0 * member)"),
    "a tile leaves out its last row": ("member < num_rows", "member < num_rows - IS_SHARED"),
    "a key head answers one query": (
        "heads[:, None] * query_head",
        "0 * heads[:, None] * query_head",
    ),
    "a prompt is read again with a row's own keys": (
        "begin = tl.load(shared + unit)",
        "begin = 0 * tl.load(shared + unit)",
    ),
    "an ended row hides a prompt": ("& ((row_lengths > 0) | (not IS_SHARED))", "& (tile < 0)"),
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="faults are interpreted")
@pytest.mark.parametrize("heads_per_key", [4, 2])
@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_a_tile_with_a_fault_is_refused_in_bfloat16(fault, heads_per_key, tmp_path, monkeypatch):
    faulty = with_fault(kernels, *TILE_FAULTS[fault], tmp_path)
    monkeypatch.setattr(launch, "attend_kernel", faulty.attend_kernel)
    with pytest.raises((AssertionError, InterpreterError)):
        check_bfloat16_tiles(heads_per_key, 5)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="faults are interpreted")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_kernel_with_a_fault_is_refused(fault, tmp_path, monkeypatch):
    """By rows that share prompts, with a window, a soft cap, sinks and several stretches."""

    def compare():
        torch.manual_seed(5)
        groups = [(0, 3, 21), (4, 2, 14)]
        sizes = {"key_heads": 2, "sizes": (24, 40), "block_size": 7, "dtype": torch.float32}
        pages = Pages([25, 31, 63, 5, 15, 30], groups, **sizes)
        spec = AttentionSpec(0.2, 29, 4.0, sinks(6))
        check(pages, spec, heads_per_key=3, num_stretches=9, interval=4, has_tiles=True)

    if fault is None:
        compare()
        return
    faulty = with_fault(kernels, *FAULTS[fault], tmp_path)
    for name in ("write_kernel", "cut_kernel", "attend_kernel", "join_kernel"):
        monkeypatch.setattr(launch, name, getattr(faulty, name))
    with pytest.raises((AssertionError, InterpreterError)):
        compare()


class RecordedLaunches:
    """Stands in for a kernel, and records by what Triton would compile each launch anew."""

    def __init__(self, kernel):
        self.parameters = kernel.params
        self.variants = set()

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps, **constants):
        names = [parameter.name for parameter in self.parameters]
        given = dict(zip(names, arguments, strict=False)) | constants
        variant = []
        for parameter in self.parameters:
            value = given[parameter.name]
            if parameter.is_constexpr or value is None:
                variant.append(value)
            elif isinstance(value, int) and not parameter.do_not_specialize:
                variant.append((value == 1, value % 16 == 0))
        self.variants.add((num_warps, *variant))


@pytest.mark.parametrize("has_tiles", [False, True], ids=["own keys", "shared prompts"])
def test_few_variants_of_the_cut_are_compiled_for_all_sizes_of_graphs(has_tiles, monkeypatch):
    """Each takes half a second where it is compiled, and an engine captures 26 sizes."""
    # An interpreted kernel keeps what the decorator was given, and does nothing with it.
    given = getattr(kernels.cut_kernel, "kwargs", None)
    kernel = kernels.cut_kernel
    if given is not None:
        names = given["do_not_specialize"]
        kernel = JITFunction(kernels.cut_kernel.fn, do_not_specialize=names)
    recorded = RecordedLaunches(kernel)
    monkeypatch.setattr(launch, "cut_kernel", recorded)
    sizes = sorted({padded_rows(num_rows) for num_rows in range(2, 1025)})
    for num_rows in sizes:
        pages = Pages(
            [40] * num_rows, [], key_heads=1, sizes=(16, 16), block_size=16, dtype=torch.float32
        )
        metadata = pages.metadata(264, 16, 1, has_tiles)
        if has_tiles:
            tiles_T = metadata.lengths_B[: num_rows // 2]
            metadata = replace(metadata, first_T=tiles_T, count_T=tiles_T)
        cut(metadata, None)
    assert len(sizes) == 25
    assert len(recorded.variants) <= 5
