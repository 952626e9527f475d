"""Stock trainers under accelerate's FSDP and DeepSpeed roll out from whole weights everywhere.

And with loss_forward="packed" they, and those under DDP, learn what they would without.
"""

import pytest
from processes import asked_for, run_processes

pytestmark = pytest.mark.slow

FSDP = ["fsdp2", "fsdp2_lora", "fsdp1", "fsdp1_lora"]
BF16 = ["fsdp2_bf16", "fsdp1_bf16"]
ZERO = ["zero1", "zero3", "zero3_lora"]

# FSDP leaves settings of its own in a process: DDP comes first.
WHOLE = [
    *("ddp/uneven", "ddp/accumulated", "ddp/checkpointed", "ddp_lora/penalised"),
    *("ddp/reentrant", "ddp/differs", "ddp/differs_padded", "ddp/older", "ddp/unpacked"),
]
SHARDED = [
    *("fsdp2/uneven", "fsdp2/accumulated", "fsdp2/checkpointed", "fsdp2_checkpointed/equal"),
    *("fsdp2_lora/penalised", "fsdp2/differs", "fsdp2/older", "fsdp2/unpacked"),
    *("fsdp1/uneven", "fsdp1_lora/penalised"),
]
WRONG = ["ddp/wrong", "fsdp2/wrong"]
PACKED = [*WHOLE, WRONG[0], *SHARDED, WRONG[1]]
PACKED_ZERO = ["zero2/accumulated", "zero3/uneven", "zero3/checkpointed", "zero3_lora/penalised"]


@pytest.fixture(scope="module")
def ranks(request):
    ways = asked_for(request, PACKED + FSDP + BF16)
    return run_processes("distributed/trl_sharded.py", *ways)


@pytest.fixture(scope="module")
def zero_ranks(request):
    pytest.importorskip("deepspeed", reason="ZeRO is tested where deepspeed is installed")
    return run_processes("distributed/trl_sharded.py", *asked_for(request, ZERO + PACKED_ZERO))


def require_followed(rank):
    assert rank["moved"] > 1e-3
    # One sync a step, and the test's own.
    assert rank["policy_version"] == 4
    assert len(rank["drifts"]) == 3


@pytest.mark.parametrize("way", FSDP)
def test_log_probabilities_are_the_sharded_trainers_own(ranks, way):
    for rank in ranks:
        require_followed(rank[way])
        assert not rank[way]["is_shared"]
        assert max(rank[way]["drifts"]) <= 1e-5
        assert max(rank[way]["differences"]) <= 1e-5


SPLIT = ["fsdp2_tensor_parallel", "fsdp2_tensor_parallel_tools"]


@pytest.fixture(scope="module")
def split_ranks(request):
    ways = asked_for(request, SPLIT)
    return run_processes("distributed/trl_sharded.py", *ways, num_processes=4)


@pytest.mark.parametrize("way", SPLIT)
def test_a_sharded_trainer_rolls_out_a_copy_that_is_split_over_its_processes(split_ranks, way):
    ranks = [rank[way] for rank in split_ranks]
    for rank in ranks:
        require_followed(rank)
        assert max(rank["drifts"] + rank["differences"]) <= 1e-5
        assert rank["losses"] == pytest.approx(rank["losses_played_back"], abs=1e-5)
    # Two pairs, each of which holds the vocabulary's 99 rows once.
    assert [rank["num_rows_held"] for rank in ranks] == [50, 49, 50, 49]
    assert len({tuple(rank["losses"]) for rank in ranks}) == 4
    # With tools every other process has one turn a step, and then rolls out with its neighbour.
    more = 9 if way.endswith("tools") else 3
    assert [rank["num_turns"] for rank in ranks] == [more, 3, more, 3]


@pytest.mark.parametrize("way", BF16)
def test_in_mixed_precision_the_copy_holds_what_fsdp_casts_to(ranks, way):
    for rank in ranks:
        require_followed(rank[way])
        assert rank[way]["dtypes"] == ["torch.bfloat16"]
        # bf16 rounds a padded batch otherwise than the row of a decode step.
        assert max(rank[way]["differences"]) < 0.05


@pytest.mark.parametrize("way", ZERO)
def test_deepspeed_trains_as_ever_and_is_followed(zero_ranks, way):
    for rank in zero_ranks:
        require_followed(rank[way])
        assert rank[way]["is_shared"] == (way == "zero1")
        assert max(rank[way]["drifts"]) <= 1e-5
        assert max(rank[way]["differences"]) <= 1e-5


def require_learned_alike(rank):
    assert rank["norm"] > 0.1
    assert rank["losses"] <= 1e-5
    assert max(rank["gradients"], default=0) <= 1e-5
    assert rank["weights"] <= 1e-6
    assert rank["figures"] <= 1e-5


@pytest.mark.parametrize("way", WHOLE + SHARDED)
def test_a_packed_loss_learns_what_the_trainers_own_does(ranks, way):
    for rank in ranks:
        require_learned_alike(rank[way])
        assert rank[way]["gradients"]


@pytest.mark.parametrize("way", PACKED_ZERO)
def test_a_packed_loss_learns_so_under_deepspeed_too(zero_ranks, way):
    for rank in zero_ranks:
        require_learned_alike(rank[way])
        assert rank[way]["layout"] == "shared_prefixes"


@pytest.mark.ways("ddp/uneven")
def test_each_process_trains_on_as_many_batches_as_it_needs(ranks):
    first, last = (rank["ddp/uneven"]["num_trained"] for rank in ranks)
    assert max(first) > 1
    assert set(last) == {1}


@pytest.mark.parametrize("way", [way for way in SHARDED if "/uneven" in way])
def test_sharded_models_run_one_forward_of_all_rows(ranks, way):
    for rank in ranks:
        assert rank[way]["num_trained"] == [1, 1]


@pytest.mark.parametrize(
    ("way", "layout", "said"),
    [
        ("ddp/differs", "padded", "prompts cannot be shared"),
        ("ddp/differs_padded", None, "is switched off"),
        ("fsdp2/differs", None, "is switched off"),
    ],
)
def test_what_one_process_finds_all_of_them_act_on(ranks, way, layout, said):
    for rank in ranks:
        assert rank[way]["layout"] == layout
        assert len(rank[way]["said"]) == 1
        assert said in rank[way]["said"][0]


@pytest.mark.parametrize("way", ["ddp/unpacked", "fsdp2/unpacked"])
def test_a_batch_that_one_process_cannot_pack_does_not_switch_packing_off(ranks, way):
    numbers = [len(rank[way]["num_trained"]) for rank in ranks]
    assert all(rank[way]["layout"] == "shared_prefixes" for rank in ranks)
    assert not any(rank[way]["said"] for rank in ranks)
    # Sharded, all of them do without where one does.
    assert (numbers[0] == numbers[1]) == way.startswith("fsdp2")


@pytest.mark.ways("ddp/older")
@pytest.mark.parametrize("way", WRONG)
def test_no_process_trusts_log_probabilities_that_are_wrong_on_one(ranks, way):
    assert not any(rank[way]["is_trusted"] for rank in ranks)
    assert all(rank["ddp/older"]["is_trusted"] for rank in ranks)
