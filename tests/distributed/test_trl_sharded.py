"""Stock trainers under accelerate's FSDP and DeepSpeed roll out from whole weights everywhere."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow

FSDP = ["fsdp2", "fsdp2_lora", "fsdp1", "fsdp1_lora"]
BF16 = ["fsdp2_bf16", "fsdp1_bf16"]
ZERO = ["zero1", "zero3", "zero3_lora"]


@pytest.fixture(scope="module")
def ranks():
    return run_processes("distributed/trl_sharded.py", *FSDP, *BF16)


@pytest.fixture(scope="module")
def zero_ranks():
    pytest.importorskip("deepspeed", reason="ZeRO is tested where deepspeed is installed")
    return run_processes("distributed/trl_sharded.py", *ZERO)


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
