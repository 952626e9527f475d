"""The processes of a tensor-parallel group roll out one model, as one process would."""

import re

import pytest
from playback import play_back
from processes import asked_for, run_processes
from tiny_trainer import TENSOR_PARALLEL, tiny_trainer

pytestmark = pytest.mark.slow

# Dense, sliding windows, sinks, soft caps, MoE, MLA, and recurrent states.
TYPES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "granitemoehybrid", "jamba"),
)
# One for each kind of layer; the others run by night.
BY_DAY = ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text")
WINDOWED = ("gemma2", "gemma3_text", "mixtral", "gpt_oss")
TYPES_OF_FOUR = ("llama", "gemma3_text", "qwen3_moe")


def require_equal(ranks, model_type):
    for rank in ranks:
        found = rank[model_type]
        assert found["is_equal"] == [True, True]
        # A split sum rounds otherwise than a whole one, as a plain forward of the split model does.
        assert max(found["differences"]) <= 1e-5
        # A window of the last tokens needs fewer blocks.
        assert found["preemptions"] > 0 or model_type in WINDOWED
    assert all(rank[model_type]["tokens"] == ranks[0][model_type]["tokens"] for rank in ranks)


WAYS_OF_COPIES = (
    *("fsdp2 x tp2", "tp4", "ddp", "fsdp2", "fsdp2_lora"),
    *("fsdp2_of_four", "fsdp2_by_columns", "fsdp2_tied", "hsdp"),
)
# One for each way to split a layer; `pair` splits all of `TYPES`.
TYPES_OF_COPIES = (
    *("gemma3_text", "phi3", "gpt_oss", "qwen3_moe"),
    *("deepseek_v3", "qwen3_5_text", "granitemoehybrid"),
)


def by_day_or_night(types):
    """Mark the types that run by night alone."""
    return [pytest.param(t, marks=() if t in BY_DAY else pytest.mark.nightly) for t in types]


@pytest.fixture(scope="module")
def copies(request):
    ways = asked_for(request, WAYS_OF_COPIES + TYPES_OF_COPIES)
    return run_processes("distributed/tensor_parallel_copies.py", *ways, num_processes=4)


@pytest.fixture(scope="module")
def pair(request):
    types = asked_for(request, TYPES, "model_type")
    return run_processes("distributed/tensor_parallel_rollouts.py", *types)


@pytest.fixture(scope="module")
def four(request):
    types = asked_for(request, TYPES_OF_FOUR, "model_type")
    return run_processes("distributed/tensor_parallel_rollouts.py", *types, num_processes=4)


@pytest.mark.parametrize("model_type", by_day_or_night(TYPES))
def test_two_processes_sample_what_one_does(pair, model_type):
    require_equal(pair, model_type)


@pytest.mark.parametrize("model_type", TYPES_OF_FOUR)
def test_four_processes_sample_what_one_does(four, model_type):
    require_equal(four, model_type)


@pytest.mark.ways("llama")
def test_pages_are_split_with_the_heads(pair, four):
    assert {rank["llama"]["key_heads"] for rank in pair} == {2}
    assert {rank["llama"]["key_heads"] for rank in four} == {1}


def test_random_calls_deliver_the_same_on_every_process():
    ranks = run_processes("distributed/tensor_parallel_schedule.py", "25")
    for rank in ranks:
        assert rank["delivered"] == ranks[0]["delivered"]
        assert rank["preemptions"] == ranks[0]["preemptions"] > 0
        assert rank["blocks"] == 0
        assert max(rank["difference"], rank["difference_after"]) <= 1e-5
        # A group draws one series of numbers, and two equal requests differ in it.
        assert rank["drawn"] == ranks[0]["drawn"]
        assert rank["drawn"][0] != rank["drawn"][1]


@pytest.mark.parametrize(
    "way",
    [
        *("raise", "kill", "raise_leader", "other_call"),
        *("absent_leader", "absent_follower", "late_leader"),
    ],
)
def test_a_failure_on_one_process_ends_all_of_them(way):
    with pytest.raises(AssertionError) as caught:
        run_processes("distributed/tensor_parallel_failing.py", way)
    said = str(caught.value)
    codes = dict(re.findall(r"^rank (\d) ended with (-?\d+):$", said, re.MULTILINE))
    assert codes == {"0": "1", "1": "-9" if way == "kill" else "1"}
    if way == "other_call":
        assert "must make the same calls in the same order" in said
    elif way == "absent_leader":
        assert "rank 1 waited for the decisions of rank 0" in said
    elif way == "late_leader":
        assert "rank 1 waited for the decisions of rank 0" in said
        assert "within cpu_group_timeout=6 seconds; raise it" in said
    elif way == "absent_follower":
        assert "Timed out waiting 6000ms for send" in said
    elif way == "kill":
        assert re.search("Connection (closed|reset) by peer", said)
    else:
        assert "no such expert" in said
    assert "timed out" not in said
    assert "ended late" not in said


def require_copied(ranks, way):
    for rank in ranks:
        found = rank[way]
        assert found["is_equal"] == [True, True]
        # Linear attention carries its rounding from token to token.
        assert max(found["differences"] + found["drifts"]) <= 3e-5
        # Between the rollouts no process held a weight of the copy.
        assert found["asleep"] == [0]


@pytest.mark.parametrize("way", [*WAYS_OF_COPIES, *by_day_or_night(TYPES_OF_COPIES)])
def test_a_split_copy_samples_what_the_sharded_model_does(copies, way):
    require_copied(copies, way)


@pytest.mark.parametrize("way", WAYS_OF_COPIES)
def test_each_process_has_its_own_prompts_draws_and_errors(copies, way):
    drawn = {tuple(rank[way]["drawn"]) for rank in copies}
    said = [rank[way]["refusal"] for rank in copies]
    if way in ("fsdp2 x tp2", "tp4"):
        # The processes of a group train on equal batches.
        assert len(drawn) == (2 if way == "fsdp2 x tp2" else 1)
        assert said == [""] * 4
        return
    assert len(drawn) == 4
    assert "input 0 is text" in said[3]
    assert "rank" not in said[3]
    assert said[2].startswith("rank 3, whose prompts are rolled out with this one's: input 0")
    assert said[0] == (said[2] if way == "fsdp2_of_four" else "")


@pytest.mark.ways("fsdp2", "fsdp2_of_four")
def test_a_copy_over_four_holds_a_quarter(copies):
    assert copies[0]["fsdp2_of_four"]["held"] * 2 == copies[0]["fsdp2"]["held"]


def test_a_stock_trainer_trains_a_split_model(tmp_path):
    ranks = run_processes("distributed/trl_tensor_parallel.py")
    alone = tiny_trainer(tmp_path, **TENSOR_PARALLEL)
    record = play_back(alone, ranks[0]["turns"])
    alone.train()
    for rank in ranks:
        assert rank["turns"] == ranks[0]["turns"]
        assert max(rank["drifts"]) <= 1e-5
        assert len(rank["losses"]) == 3
        assert rank["losses"] == pytest.approx(record.losses, abs=1e-4)
