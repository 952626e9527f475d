"""Stock trainers under accelerate's FSDP2 roll out from a whole copy on every process."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    return run_processes("trl_fsdp2.py")


@pytest.mark.parametrize("way", ["whole", "lora", "bf16"])
def test_every_step_rolls_out_from_the_weights_of_the_last(ranks, way):
    for rank in ranks:
        assert rank[way]["num_sharded"] >= 2
        assert rank[way]["moved"] > 1e-3
        # One sync a step, and the test's own.
        assert rank[way]["policy_version"] == 4
        assert len(rank[way]["drifts"]) == 3


@pytest.mark.parametrize("way", ["whole", "lora"])
def test_log_probabilities_are_the_sharded_trainers_own(ranks, way):
    for rank in ranks:
        assert max(rank[way]["drifts"]) <= 1e-5
        assert max(rank[way]["differences"]) <= 1e-5


def test_in_mixed_precision_the_copy_holds_what_fsdp2_casts_to(ranks):
    for rank in ranks:
        assert rank["bf16"]["dtypes"] == ["torch.bfloat16"]
        # bf16 rounds a padded batch otherwise than the row of a decode step.
        assert max(rank["bf16"]["differences"]) < 0.05
