"""Two processes that train one model with numerics="bitwise"."""

import pytest
from processes import asked_for, run_processes

pytestmark = pytest.mark.slow

# FSDP leaves settings of its own in a process: DDP comes first.
WAYS = ["ddp", "fsdp2", "fsdp2_bf16", "fsdp1"]


@pytest.fixture(scope="module")
def ranks(request):
    return run_processes("distributed/trl_bitwise.py", *asked_for(request, WAYS))


@pytest.mark.parametrize("loss_forward", ["trainer", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_processes_sample_what_they_train_on_in_every_bit(ranks, way, loss_forward):
    for found in ranks:
        run = found[f"{way}/{loss_forward}"]
        assert run["figures"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
        assert run["is_shared"] == (way == "ddp")
        assert run["is_repeated"]
        assert run["num_weights"] > 0


@pytest.mark.ways("fsdp2_bf16")
def test_fsdp2_that_rounds_the_trainers_logprobs_is_refused(ranks):
    for found in ranks:
        assert (
            "rounds the trainer's log-probabilities to torch.bfloat16"
            in (found["fsdp2_bf16/trainer"]["refusal"])
        )
