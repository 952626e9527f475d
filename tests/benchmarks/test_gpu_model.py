"""What the model of a GPU counts, and how it turns counts into time."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.workload import TINY
from benchmarks.roofline import gpu_model, optimizations
from benchmarks.roofline.cards import CARDS, HOST_SECONDS, KERNEL_SECONDS, Card
from benchmarks.roofline.gpu_model import ideal_decode, ideal_prefill, memory_bytes
from benchmarks.roofline.kernel_recorder import (
    SAMPLING_KERNELS,
    Kernel,
    KernelRecorder,
    launches_reported,
    num_bytes,
)
from benchmarks.roofline.steps import (
    SAMPLED,
    TOP_P,
    Rows,
    Step,
    engine_decode,
    engine_prefill,
    of_all_layers,
    on_card,
    transformers_decode,
    transformers_prefill,
)
from benchmarks.roofline.stretches import STEPS, Programs, cut_by_list
from benchmarks.roofline.tensors import DEVICE, CudaTensor
from benchmarks.roofline.vllm_kernels import LayerSizes, vllm_step
from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.tools.bench import create_model

pytest.importorskip("triton")

TINY_SHAPE = TINY.shape
LLAMA = TINY_SHAPE | {"model_type": "llama"}
ROWS = Rows(4, 100)

# Counted by hand in transformers' LlamaDecoderLayer. A norm: to float32, a power, a mean, a sum, a
# root, a product, back to bfloat16, a product with the weight.
NORM = Counter({"_to_copy": 2, "pow": 1, "mean": 1, "add": 1, "rsqrt": 1, "mul": 2})
# A rotation: two products, a negated half, the halves joined, a sum.
ROTATION = Counter({"mul": 2, "neg": 1, "cat": 1, "add": 1})
PRODUCTS = Counter({"mm": 7})
REST = Counter({"silu": 1, "mul": 1, "add": 2})
LAYER = NORM + NORM + ROTATION + ROTATION + PRODUCTS + REST


def names(step):
    found = Counter()
    for kernel, count in step.kernels.items():
        found[kernel.name] += count
    return found


def product_flops(step):
    return sum(n * k.num_flops for k, n in step.kernels.items() if k.name == "mm")


def decode(num_layers, shape=LLAMA, rows=ROWS, **settings):
    return engine_decode(shape, rows, 132, num_layers, **settings)


@pytest.fixture(scope="module")
def llama():
    """A decode step of the engine, with one layer and with two."""
    return [decode(1), decode(2)]


def test_a_layer_of_the_engine_launches_what_its_modules_say(llama):
    layer = llama[1].plus(llama[0], -1)
    assert names(layer) == LAYER + Counter({"write_kernel": 1, "attend_kernel": 1})
    assert (layer.num_launches, layer.num_waits) == (39, 0)
    assert not layer.eager


def test_a_layer_of_transformers_attends_and_grows_its_cache_instead():
    traced = of_all_layers(lambda layers: transformers_decode(LLAMA, ROWS, layers), 5)
    attention = Counter({"cat": 2, "_scaled_dot_product_flash_attention": 1})
    assert names(traced.layer) == LAYER + attention
    assert not traced.step.graphed


def test_layers_are_alike_so_four_follow_from_two(llama):
    layer = llama[1].plus(llama[0], -1)
    four = decode(4)
    assert four == llama[1].plus(layer, 2)
    assert four == of_all_layers(lambda layers: llama[layers - 1], 4).step


def test_kernels_have_the_bytes_and_operations_of_their_tensors(llama):
    layer = llama[1].plus(llama[0], -1).kernels
    # Up, gate and down: 4 rows of 32 and of 48 numbers, in bfloat16.
    assert layer[Kernel("mm", 2 * (4 * 32 + 32 * 48 + 4 * 48), 2 * 4 * 32 * 48)] == 3
    assert layer[Kernel("silu", 2 * 2 * 4 * 48, 0)] == 1
    # Keys and values of 4 rows, one head of 16: read, and written to pages.
    assert layer[Kernel("write_kernel", 2 * 2 * 2 * 4 * 16, 0)] == 1
    pages, queries = 2 * 2 * 4 * 100 * 16, 2 * 4 * 2 * 16
    assert layer[Kernel("attend_kernel", pages + 2 * queries, 4 * 4 * 2 * 16 * 100)] == 1


def test_products_are_those_that_torch_counts():
    model = create_model(LLAMA, "meta")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(ROWS.num_rows, 1, dtype=torch.int64, device="meta"))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert product_flops(decode(2)) == product_flops(transformers_decode(LLAMA, ROWS, 2)) == counted


@pytest.mark.fast_cases("plain")
@pytest.mark.parametrize("sampled", SAMPLED)
def test_every_kind_of_sampling_is_three_kernels_of_the_graph(sampled):
    wide = LLAMA | {"vocab_size": 8192}
    step = decode(1, wide, params=SAMPLED[sampled])
    assert (step.num_waits, step.eager.total()) == (0, 0)
    assert names(step) == names(decode(1, wide))
    moved = {k.name: k.num_bytes for k in step.graphed if k.name in SAMPLING_KERNELS}
    # Logits in bfloat16, two parts of 4,096 a row.
    token = 2
    assert moved["measure_kernel"] == 4 * 8192 * token
    assert moved["draw_kernel"] == 4 * 4096 * token
    num_reads = {"top-k": 16, TOP_P: 17, "min-p": 1, "top-k, top-p and min-p": 32}.get(sampled, 0)
    assert moved["truncate_kernel"] == num_reads * 4 * 8192 * token


def test_long_rows_are_split_and_joined():
    assert names(decode(1, rows=Rows(2, 2000)))["join_kernel"] == 1
    assert "join_kernel" not in names(decode(1, rows=Rows(1024, 200)))


def test_a_prefill_of_equal_prompts_takes_flash_attention():
    for step in (engine_prefill(LLAMA, ROWS, 1), transformers_prefill(LLAMA, ROWS, 1)):
        (attention,) = (k for k in step.kernels if k.name == "_scaled_dot_product_flash_attention")
        assert attention.num_flops == 4 * 4 * 2 * 100 * 100 * 16 // 2
        assert not step.graphed


def test_views_launch_nothing_and_repeated_elements_count_once():
    with on_card(1):
        numbers = torch.empty(4, 8, device=DEVICE)
        assert isinstance(numbers, CudaTensor)
        assert num_bytes(numbers[1:3, :2]) == 4 * 2 * 2
        assert num_bytes(numbers[:, :1].expand(4, 8)) == 4 * 4
        with KernelRecorder().recording() as recorder:
            numbers.t().reshape(2, 16)[0].unsqueeze(0)
            torch.empty_like(numbers).view(-1)
    # The transposed matrix is copied.
    assert list(recorder.kernels) == [Kernel("clone", 2 * 4 * 32, 0)]


def test_what_an_operator_overwrites_it_does_not_read():
    with on_card(1):
        table = torch.empty(1000, 8, device=DEVICE)
        rows, ids = torch.empty(3, 8, device=DEVICE), torch.zeros(3, dtype=int, device=DEVICE)
        with KernelRecorder().recording() as recorder:
            table.zero_()
            table.exp_()
            rows.copy_(rows.clone())
            table.index_select(0, ids)
            table.index_copy_(0, ids, rows)
            rows.logsumexp(-1)
    found = {kernel.name: kernel.num_bytes for kernel in recorder.kernels}
    assert (found["zero_"], found["copy_"]) == (32_000, 2 * 96)
    # Three rows are read and written, and their ids read.
    assert found["index_select"] == found["index_copy_"] == 2 * 96 + 24
    assert recorder.kernels[Kernel("exp_", 64_000, 0)] == 1
    assert recorder.kernels.total() == 6 + 9


def test_the_host_waits_where_it_reads_a_boolean_and_may_read_nothing_else():
    with on_card(1):
        numbers = torch.empty(3, device=DEVICE)
        with KernelRecorder(answer=False).recording() as recorder:
            assert not (numbers > 0).all()
            with pytest.raises(AssertionError, match="reads a number"):
                numbers.sum().item()
    assert recorder.num_waits == 1


def test_a_triton_kernel_without_a_cost_of_its_own_moves_its_tensors_once():
    from cb_rollout.engine.attention.triton.kernels import join_kernel

    reported = []
    with launches_reported(lambda name, args, options: reported.append((name, args, options))):
        join_kernel[(1, 2)](1, 2, WIDTH=3)
    assert reported == [("join_kernel", (1, 2), {"WIDTH": 3})]
    with on_card(1):
        given, made = torch.empty(8, device=DEVICE), torch.empty(4, device=DEVICE)
        with KernelRecorder().recording() as recorder:
            join_kernel[(1,)](given, made, given, 7)
    assert recorder.kernels == {Kernel("join_kernel", 48, 0): 1}


CARD = Card("card", bytes_per_second=1e9, flops_per_second=1e12, num_processors=1, memory_bytes=1e9)
MOVING, COMPUTING = Kernel("moving", 2_000_000, 10), Kernel("computing", 10, 10**10)


def test_a_kernel_takes_the_longer_of_moving_and_computing():
    assert CARD.kernel_seconds(MOVING) == pytest.approx(2e-3)
    assert CARD.kernel_seconds(COMPUTING) == pytest.approx(1e-2)


def test_a_graph_adds_the_gap_between_kernels_and_the_host_is_hidden_behind_the_device():
    both = Counter({MOVING: 3, COMPUTING: 1})
    device_seconds = 3 * 2e-3 + 1e-2 + 4 * KERNEL_SECONDS
    assert CARD.step_seconds(Step(graphed=both)) == pytest.approx(device_seconds)
    assert CARD.step_seconds(Step(eager=both)) == pytest.approx(device_seconds)
    tiny = Counter({Kernel("tiny", 1, 0): 100})
    assert CARD.step_seconds(Step(eager=tiny)) == pytest.approx(100 * HOST_SECONDS)
    assert CARD.step_seconds(Step(both, tiny)) == pytest.approx(device_seconds + 100 * HOST_SECONDS)


def test_the_ideal_is_weights_once_and_keys_once():
    body, head = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48), 64 * 32
    states = 4 * 100 * 2 * 2 * 2 * 16
    attention = 4 * 100 * 2 * 4 * 32
    step = ideal_decode(LLAMA, ROWS)
    assert step.num_bytes == 2 * (body + head) + states == memory_bytes(LLAMA, ROWS)
    assert step.num_flops == 2 * 4 * (body + head) + attention
    prefill = ideal_prefill(LLAMA, ROWS)
    assert prefill.num_flops == 2 * 4 * (100 * body + head) + attention * 50
    untied = memory_bytes(LLAMA | {"tie_word_embeddings": False}, ROWS)
    assert untied == step.num_bytes + 2 * head


@pytest.mark.parametrize("is_decode", [True, False])
def test_the_list_of_vllm_has_the_products_of_the_model(is_decode):
    theirs = vllm_step(TINY_SHAPE, ROWS, is_decode=is_decode)
    ours = decode(2, TINY_SHAPE) if is_decode else engine_prefill(TINY_SHAPE, ROWS, 2)
    assert product_flops(theirs.step) == product_flops(ours)
    assert theirs.layer.num_launches == 13
    assert bool(theirs.step.graphed) is True
    assert not vllm_step(TINY_SHAPE, Rows(600, 1), is_decode=is_decode).step.graphed


def test_optimizations_keep_the_products_and_replace_what_they_name():
    traced = of_all_layers(lambda layers: decode(layers, LLAMA), LLAMA["num_hidden_layers"])
    found = optimizations.optimizations(traced, LLAMA, ROWS, CARDS[1])
    rest = traced.step.num_launches - 2 * 39
    assert found["as it is"]["launches"] == rest + 2 * 39
    assert found[optimizations.FUSED]["launches"] == rest + 2 * 9
    assert found["as it is"]["percent_saved"] == 0 < found[optimizations.FUSED]["percent_saved"]
    fused = optimizations._fused(traced, LayerSizes.of(LLAMA), ROWS)
    assert product_flops(fused.step) == product_flops(traced.step)


def test_a_card_is_traced_only_if_it_splits_keys_otherwise(monkeypatch):
    traced = []
    monkeypatch.setattr(gpu_model, "_engine_decode", lambda *given: traced.append(given[2]))
    for card in CARDS:
        gpu_model.engine_step(TINY_SHAPE, Rows(1, 8000), card)
        gpu_model.engine_step(TINY_SHAPE, Rows(1024, 300), card)
    assert traced == [108] * 6
    gpu_model.engine_step(TINY_SHAPE | {"num_key_value_heads": 8}, Rows(4, 4000), CARDS[1])
    assert traced[-1] == 132


@pytest.mark.parametrize("name", list(STEPS)[:2])
def test_modelled_stretches_are_those_that_the_kernel_lists(name):
    from cb_rollout.engine.attention.triton.launch import cut

    step = STEPS[name]
    num_rows, prompt = len(step.own), sum(step.shared)
    tiles = {}
    if prompt:
        ints = [torch.tensor(v, dtype=torch.int32) for v in ([prompt] * num_rows, [0], [num_rows])]
        tiles = dict(zip(("shared_B", "first_T", "count_T"), ints, strict=True))
    lengths_B = torch.tensor([one + prompt for one in step.own], dtype=torch.int32)
    address = torch.zeros(2, dtype=torch.int64)
    work = cut(AttentionMetadata(address, 16, lengths_B, lengths_B, 66, **tiles), None)
    lists = [work.own_O, work.shared_S]
    modelled = cut_by_list(step, 66)
    assert len(modelled.keys) == sum((items >= 0).sum() for items in lists)
    assert modelled.num_launched == sum(map(len, lists))
    assert max(modelled.keys) <= work.sizes[: 1 + bool(prompt)].max()
    assert sum(modelled.keys) == sum(step.own) + prompt


def test_the_longest_program_bounds_a_kernel_that_leaves_processors_idle():
    shape = TINY_SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16}
    per_key = 2 * 2 * 16
    alone = Programs([1000], 1).milliseconds(shape, replace(CARD, num_processors=10))
    assert alone == pytest.approx(1e3 * 3 * 1000 * per_key * 10 / 1e9)
    spread = Programs([10] * 100, 100).milliseconds(shape, replace(CARD, num_processors=10))
    assert spread == pytest.approx(1e3 * 3 * 2 * 1000 * per_key / 1e9)
