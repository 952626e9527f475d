"""Processes of a loop of one's own record together, each sequence once."""

import os

import numpy as np
import pytest
from processes import run_processes
from wandb_file import rows, table

from cb_rollout.metrics.run_records import iterate_rollouts, list_runs, read_metrics
from cb_rollout.rollout.recording.distributions import DRIFT, LOGPROBS, NUM_BINS, RATIO

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def ranks(folder):
    ranks = run_processes("distributed/recorded_loop.py", str(folder), num_processes=2)
    assert [said["rank"] for said in ranks] == [0, 1]
    assert [said["world_size"] for said in ranks] == [2, 2]
    assert len({said["pid"] for said in ranks} | {os.getpid()}) == 3
    return ranks


def given(ranks, step):
    return [row for said in ranks for row in said["given"] if row[0] == step]


def test_each_row_of_each_process_is_recorded_once(folder, ranks):
    (run,) = list_runs(folder / "all")
    assert run.num_sequences == {1: 4 + 6, 2: 4 + 6, 3: 4 + 6}
    for step in (1, 2):
        records = list(iterate_rollouts(folder / "all", run, {step}))
        found = [[r.step, r.token_ids, r.logprobs, r.reward, r.trainer_logprobs] for r in records]
        assert found == given(ranks, step)
        assert len({record.request_id for record in records}) == 10


def test_the_metrics_are_of_all_processes_in_one_line_a_step(folder, ranks):
    steps = read_metrics(folder / "all")
    assert [metrics.step for metrics in steps] == [1, 2, 3]
    for metrics in steps[:2]:
        rows_of_step = given(ranks, metrics.step)
        rewards = [reward for _, _, _, reward, _ in rows_of_step]
        assert metrics.scalars["reward"] == pytest.approx(np.mean(rewards))
        assert metrics.completion_lengths == [len(tokens) for _, tokens, *_ in rows_of_step]
        assert metrics.group_rewards == [rewards[i : i + 2] for i in range(0, 10, 2)]
        drift = drift_of(rows_of_step)
        name = "sampling/sampling_logp_difference"
        assert metrics.scalars[f"{name}/mean"] == pytest.approx(drift.mean())
        assert metrics.scalars[f"{name}/max"] == pytest.approx(drift.max())


def drift_of(rows_of_step):
    sampled, trained = (
        np.array([value for row in rows_of_step for value in row[column]]) for column in (2, 4)
    )
    return sampled - trained


def test_the_first_process_alone_shows_the_tokens_of_all_in_wandb(folder, ranks):
    found = rows(folder)
    assert len(found) == 3
    for step, row in enumerate(found[:2], 1):
        rows_of_step = given(ranks, step)
        sampled = np.array([value for _, _, logprobs, *_ in rows_of_step for value in logprobs])
        drift = drift_of(rows_of_step)
        for name, values in ((LOGPROBS, sampled), (DRIFT, drift), (RATIO, np.exp(-drift))):
            counts, edges = np.histogram(values, NUM_BINS)
            assert row[name]["values"] == counts.tolist(), name
            assert row[name]["bins"] == pytest.approx(edges.tolist()), name
        tokens = table(folder, row["rollout/tokens"])
        assert [cell["logprob"] for cell in tokens] == sampled.tolist()


def test_a_call_that_one_process_may_not_make_is_refused_on_all(ranks):
    (too_few, other_step, nothing, own_path), (told, told_step, told_nothing, path) = (
        said["refused"] for said in ranks
    )
    assert "record() was refused on rank 1, and nothing was recorded: rewards has 1" in too_few
    assert told.startswith("rewards has 1 numbers for 6 outputs")
    assert "for step 5 (train) here, and for step 6 (train) on rank 1" in other_step
    assert "for step 6 (train) here, and for step 5 (train) on rank 0" in told_step
    assert "refused on rank 1, and nothing was recorded: outputs is a NoneType" in nothing
    assert told_nothing.startswith("outputs is a NoneType")
    assert own_path.startswith("output_dir=3 is no path")
    assert "refused on rank 0, and nothing was recorded: output_dir=3 is no path" in path


def test_as_many_sequences_are_recorded_however_many_processes_there_are(folder, ranks):
    records = list(iterate_rollouts(folder / "some"))
    assert [record.request_id.startswith("rank1/") for record in records] == [False] * 4 + [True]
    assert [len(x.completion_lengths) for x in read_metrics(folder / "some")] == [10]


def test_outputs_that_several_processes_have_are_recorded_once(folder, ranks):
    assert [said["num_split"] for said in ranks] == [4, 4]
    assert len(list(iterate_rollouts(folder / "split"))) == 4
    # A split copy serves each process its own prompts.
    assert len(list(iterate_rollouts(folder / "split_copy"))) == 4 + 6
