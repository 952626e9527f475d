"""The steps of a loop of one's own, as the report reads them."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
import wandb
from tiny import byte_tokenizer, char_tokenizer, plain_logprobs, tiny_model
from tiny_vision import picture, tiny_vision_model
from wandb_file import rows, table

from cb_rollout import (
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)
from cb_rollout.metrics.run_records import iterate_rollouts, list_runs, read_metrics
from cb_rollout.rollout.recording.distributions import DRIFT, LOGPROBS, NUM_BINS, RATIO
from cb_rollout.tools.cli import main

PARAMS = SamplingParams(max_new_tokens=6, seed=1)
PROMPTS = [[40, 41, 42], [50, 51]]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5]
ADVANTAGES = [1.0, -1.0, -1.0, 1.0, 0.0, 0.0]


@pytest.fixture
def generator():
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    config = RolloutConfig(seed=0, record_num_sequences=100)
    with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        generator.model = model
        yield generator


def rolled_out(generator):
    outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS, num_return_sequences=3)
    return list(outputs.values())


def shifted(outputs):
    """Log-probabilities of a trainer that is off by another number of nats at each token."""
    return [
        torch.tensor([x - 0.125 * (i + t) for t, x in enumerate(output.logprobs)])
        for i, output in enumerate(outputs)
    ]


def test_a_sequence_is_recorded_token_by_token(generator, tmp_path):
    outputs = rolled_out(generator)
    with torch.no_grad():
        trained = packed_logprobs(generator.model, outputs)
    generator.record(outputs, REWARDS, torch.tensor(ADVANTAGES), trained, output_dir=tmp_path)
    records = list(iterate_rollouts(tmp_path))
    assert [record.request_id for record in records] == [o.request_id for o in outputs]
    for record, output, reward, advantage in zip(
        records, outputs, REWARDS, ADVANTAGES, strict=True
    ):
        assert (record.step, record.mode) == (1, "train")
        assert record.prompt == generator.tokenizer.decode(output.prompt_ids)
        assert record.token_ids == output.generated_tokens
        assert record.tokens == [generator.tokenizer.decode([t]) for t in record.token_ids]
        assert record.logprobs == output.logprobs
        exact = plain_logprobs(generator.model, output.prompt_ids, output.generated_tokens)
        assert record.trainer_logprobs == pytest.approx(exact, abs=1e-5)
        assert (record.reward, record.advantage) == (reward, advantage)
        assert record.policy_versions == [(0, len(record.token_ids))]
        assert record.finish_reason == output.finish_reason
        assert record.mask == [1] * len(record.token_ids)


def test_the_figures_of_a_step_are_those_of_all_its_outputs(generator, tmp_path):
    outputs = rolled_out(generator)
    trained = shifted(outputs)
    generator.record(outputs, REWARDS, ADVANTAGES, trained, output_dir=tmp_path)
    (metrics,) = read_metrics(tmp_path)
    lengths = [len(output.generated_tokens) for output in outputs]
    assert metrics.completion_lengths == lengths
    assert metrics.group_rewards == [[1.0, 0.0, 0.0], [1.0, 0.5, 0.5]]
    scalars = metrics.scalars
    assert scalars["reward"] == 0.5
    assert scalars["reward_std"] == pytest.approx(statistics.stdev(REWARDS))
    assert scalars["frac_reward_zero_std"] == 0.0
    assert scalars["completions/mean_length"] == pytest.approx(statistics.fmean(lengths))
    cut = [output.finish_reason == "length" for output in outputs]
    assert scalars["completions/clipped_ratio"] == pytest.approx(sum(cut) / 6)
    drift = np.concatenate([np.array(o.logprobs) - t.numpy() for o, t in zip(
        outputs, trained, strict=True)])  # fmt: skip
    assert scalars["sampling/sampling_logp_difference/mean"] == pytest.approx(drift.mean())
    assert scalars["sampling/sampling_logp_difference/max"] == pytest.approx(drift.max())
    ratio = "sampling/importance_sampling_ratio"
    assert scalars[f"{ratio}/min"] == pytest.approx(math.exp(-drift.max()))
    assert scalars[f"{ratio}/mean"] == pytest.approx(np.exp(-drift).mean())
    assert scalars["rollout/tokens"] == sum(lengths)
    assert scalars["rollout/policy_version"] == 0


def test_steps_are_counted_and_each_has_its_policy_version(generator, tmp_path):
    for _ in range(3):
        outputs = rolled_out(generator)
        generator.sync_weights()
        generator.record(outputs, REWARDS, output_dir=tmp_path)
    steps = read_metrics(tmp_path)
    assert [metrics.step for metrics in steps] == [1, 2, 3]
    # The outputs', not that of the sync since.
    assert [metrics.scalars["rollout/policy_version"] for metrics in steps] == [0, 1, 2]
    assert "rollout/step_share" not in steps[0].scalars
    assert all(0 < metrics.scalars["rollout/step_share"] <= 1 for metrics in steps[1:])
    names = [span.name for metrics in steps for span in metrics.spans]
    assert names.count("step") == 2
    assert names.count("rollout") == 3
    assert names.count("sync") == 3


def test_several_calls_of_a_step_are_one_step(generator, tmp_path):
    outputs = rolled_out(generator)
    for part in (slice(0, 3), slice(3, 6)):
        trained = shifted(outputs)[part]
        generator.record(
            outputs[part], REWARDS[part], ADVANTAGES[part], trained, step=1, output_dir=tmp_path
        )
    others = tmp_path / "whole"
    generator.record(outputs, REWARDS, ADVANTAGES, shifted(outputs), step=1, output_dir=others)
    *_, last = read_metrics(tmp_path)
    assert last.completion_lengths == [len(output.generated_tokens) for output in outputs]
    assert last.scalars["reward"] == 0.5
    records = list(iterate_rollouts(tmp_path))
    assert [record.request_id for record in records] == [o.request_id for o in outputs]
    assert last.scalars["rollout/tokens"] == sum(last.completion_lengths)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_that_calls_divide_is_one_group(generator, tmp_path, size):
    outputs = rolled_out(generator)
    for start in range(0, 6, size):
        part = slice(start, start + size)
        generator.record(outputs[part], REWARDS[part], step=1, output_dir=tmp_path)
    *_, last = read_metrics(tmp_path)
    assert last.group_rewards == [REWARDS[:3], REWARDS[3:]]
    # No group has equal rewards, though calls of one output each have.
    assert last.scalars["frac_reward_zero_std"] == 0


def test_a_prompt_with_another_image_is_another_group(tmp_path):
    model, processor = tiny_vision_model("llava")
    chats = []
    for seed in (1, 2):
        content = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "w60"}]
        chats.append([{"role": "user", "content": content}])
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=processor) as generator:
        generated = generator.generate_batch(chats, sampling_params=PARAMS, num_return_sequences=2)
        outputs = list(generated.values())
        assert outputs[0].prompt_ids == outputs[2].prompt_ids
        generator.record(outputs, [0.0, 0.0, 1.0, 1.0], output_dir=tmp_path)
    (step,) = read_metrics(tmp_path)
    assert step.group_rewards == [[0.0, 0.0], [1.0, 1.0]]
    assert step.scalars["frac_reward_zero_std"] == 1


def figures(folder):
    """Steps with their rewards, and the sequences that the newest run recorded of each step."""
    rewards = []
    for metrics in read_metrics(folder):
        prefix = "eval_" if metrics.mode == "eval" else ""
        rewards.append((metrics.step, metrics.mode, metrics.scalars[f"{prefix}reward"]))
    return rewards, list_runs(folder)[-1].num_sequences


@pytest.mark.parametrize("first_step", [1, 2])
def test_a_run_has_no_figures_of_the_run_before(generator, tmp_path, first_step):
    """The second run begins anew, or goes on after a step of the first."""
    outputs = rolled_out(generator)
    for reward, first in ((0.0, 1), (1.0, first_step)):
        for step in range(first, 4):
            generator.record(outputs, [reward] * 6, step=step, output_dir=tmp_path)
        generator.record(outputs, [reward] * 6, mode="eval")
    rewards, num_sequences = figures(tmp_path)
    assert rewards[-1] == (3, "eval", 1.0)
    assert num_sequences == {1: 6, 2: 6, 3: 12}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_directory_has_no_figures_of_another(generator, tmp_path, mode):
    """Of one step: two evaluations, or two trainings by one generator, in turns."""
    outputs = rolled_out(generator)
    for part in (slice(0, 3), slice(3, 6)):
        for name, reward in (("a", 0.0), ("b", 1.0)):
            generator.record(
                outputs[part], [reward] * 3, mode=mode, step=7, output_dir=tmp_path / name
            )
    for name, reward in (("a", 0.0), ("b", 1.0)):
        rewards, num_sequences = figures(tmp_path / name)
        assert rewards[-1] == (7, mode, reward)
        assert num_sequences == {7: 6}
        (*_, last) = read_metrics(tmp_path / name)
        assert len(last.completion_lengths) == (6 if mode == "train" else 0)


def test_the_next_step_follows_the_last_one_and_an_evaluation_has_its_number(generator, tmp_path):
    for step, mode in [(5, "train"), (None, "eval"), (None, "train"), (6, "train"), (9, "eval")]:
        generator.record(rolled_out(generator), REWARDS, step=step, mode=mode, output_dir=tmp_path)
    found = [(metrics.step, metrics.mode) for metrics in read_metrics(tmp_path)]
    assert found == [(5, "train"), (5, "eval"), (6, "train"), (6, "train"), (9, "eval")]
    evaluation = read_metrics(tmp_path)[1]
    assert evaluation.scalars["eval_reward"] == 0.5
    assert evaluation.completion_lengths == evaluation.group_rewards == []
    assert "reward" not in evaluation.scalars
    # Of step 6 the records of both calls.
    assert list_runs(tmp_path)[0].num_sequences == {5: 12, 6: 12, 9: 6}


def test_a_loop_that_resumes_continues_the_run_before(generator, tmp_path):
    def steps(*numbers):
        for step in numbers:
            generator.record(rolled_out(generator), REWARDS, step=step, output_dir=tmp_path)

    steps(1, 2, 3)
    # Back to the checkpoint of step 1, in the same process.
    steps(2, 3)
    first, second = list_runs(tmp_path)
    assert (first.steps, first.continues) == ([1, 2, 3], {})
    assert (second.steps, second.continues) == ([1, 2, 3], {first.run_id: 1})


def test_another_process_that_resumes_continues_the_run_before(tmp_path):
    for steps in ([1, 2, 3], [3, 4], [1]):
        with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
            for step in steps:
                outputs = rolled_out(generator)
                generator.record(outputs, step=step, output_dir=tmp_path)
    first, second, third = list_runs(tmp_path)
    assert (second.steps, second.continues) == ([1, 2, 3, 4], {first.run_id: 2})
    assert (third.steps, third.continues) == ([1], {})


def test_the_first_sequences_of_a_step_are_recorded_and_all_are_counted(tmp_path):
    config = RolloutConfig(seed=0, record_num_sequences=4)
    with RolloutGenerator(tiny_model(), config) as generator:
        for _ in range(2):
            outputs = rolled_out(generator)
            generator.record(outputs[:3], step=1, output_dir=tmp_path)
            generator.record(outputs[3:], step=1)
            generator.record(outputs)
        with_none = RolloutConfig(seed=0, record_num_sequences=0)
    with RolloutGenerator(tiny_model(), with_none) as generator:
        generator.record(rolled_out(generator), output_dir=tmp_path / "none")
    assert list_runs(tmp_path)[-1].num_sequences == {1: 4, 2: 4}
    assert list(iterate_rollouts(tmp_path / "none")) == []
    assert [len(x.completion_lengths) for x in read_metrics(tmp_path / "none")] == [6]


def test_without_a_tokenizer_the_text_of_a_token_is_its_id(tmp_path):
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        outputs = rolled_out(generator)
        generator.record(outputs, output_dir=tmp_path)
    record = next(iterate_rollouts(tmp_path))
    assert record.prompt == " 40 41 42"
    assert record.tokens == [f" {token}" for token in outputs[0].generated_tokens]
    assert record.reward is record.advantage is None
    assert record.trainer_logprobs == []


def test_the_directory_is_that_of_the_last_call_or_trainer_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        generator.record(rolled_out(generator))
        generator.record(rolled_out(generator), output_dir="other")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        generator.record(rolled_out(generator))
    assert [x.step for x in read_metrics(tmp_path / "trainer_output")] == [1]
    assert [x.step for x in read_metrics(tmp_path / "other")] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"step": 0}, "step=0: pass a whole number from 1"),
        ({"step": 1.5}, "step=1.5: pass a whole"),
        ({"step": True}, "step=True: pass a whole"),
        ({"mode": "test"}, "mode='test' is neither 'train' nor 'eval'"),
        ({"outputs": []}, r"record\(\) got no outputs"),
        ({"rewards": [1.0]}, "rewards has 1 numbers for 6 outputs"),
    ],
)
def test_a_refused_call_records_nothing_and_is_no_step(generator, tmp_path, arguments, sentence):
    outputs = rolled_out(generator)
    with pytest.raises(InvalidRequestError, match=sentence):
        generator.record(**{"outputs": outputs, "output_dir": tmp_path} | arguments)
    assert list(tmp_path.iterdir()) == []
    generator.record(outputs, REWARDS, output_dir=tmp_path)
    assert [metrics.step for metrics in read_metrics(tmp_path)] == [1]
    assert len(list(iterate_rollouts(tmp_path))) == 6


def test_outputs_without_log_probabilities_are_refused(tmp_path):
    with RolloutGenerator(tiny_model(), RolloutConfig(return_logprobs=False)) as generator:
        outputs = rolled_out(generator)
        with pytest.raises(InvalidRequestError, match="sample with return_logprobs=True"):
            generator.record(outputs, output_dir=tmp_path)


def test_the_report_and_the_trace_read_a_loops_records(generator, tmp_path, capsys):
    for _ in range(3):
        outputs = rolled_out(generator)
        generator.record(outputs, REWARDS, ADVANTAGES, shifted(outputs), output_dir=tmp_path)
        generator.sync_weights()
    trace = tmp_path / "trace.json"
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path), "--trace", str(trace)]) == 0
    page = (tmp_path / "cb_rollout" / "report.html").read_text()
    for title in ("Reward", "Groups", "Length of completions", "Throughput", "drift"):
        assert title in page
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step 2", "step 3", "rollout", "sync", "decode", "rest"} <= names


def test_an_audit_reads_a_loops_records(tmp_path):
    from cb_rollout import audit
    from cb_rollout.rollout.audit.records import read_rollouts

    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        outputs = rolled_out(generator)
        generator.record(outputs, output_dir=tmp_path)
    found = read_rollouts(tmp_path, tokenizer)
    assert [own.generated_tokens for own in found] == [o.generated_tokens for o in outputs[:4]]
    assert [own.prompt_ids for own in found] == [output.prompt_ids for output in outputs[:4]]
    assert audit(found, model)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    run = wandb.init(project="cb_rollout", dir=tmp_path)
    yield run
    run.finish()


def finish(run):
    """End a run, and wait until its file is whole."""
    run.finish()
    wandb.teardown()


def require_shown(row, folder, outputs, trained, step):
    """Compare a row of wandb with what the outputs say."""
    sampled = np.array([value for output in outputs for value in output.logprobs])
    theirs = np.array([value for values in trained for value in values.tolist()])
    for name, values in (
        (LOGPROBS, sampled), (DRIFT, sampled - theirs), (RATIO, np.exp(theirs - sampled))
    ):  # fmt: skip
        counts, edges = np.histogram(values, NUM_BINS)
        assert row[name]["_type"] == "histogram"
        assert row[name]["values"] == counts.tolist(), name
        assert row[name]["bins"] == pytest.approx(edges.tolist()), name
    tokens = table(folder, row["rollout/tokens"])
    assert {cell["step"] for cell in tokens} == {step}
    assert [cell["logprob"] for cell in tokens] == sampled.tolist()
    assert [cell["trainer_logprob"] for cell in tokens] == theirs.tolist()
    ids = [output.request_id for output in outputs for _ in output.generated_tokens]
    assert [cell["request_id"] for cell in tokens] == ids


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("logs_itself", [True, False])
def test_wandb_gets_table_and_histograms_of_each_step(generator, tmp_path, offline, logs_itself):
    steps = []
    for _ in range(2):
        outputs = rolled_out(generator)
        steps.append((outputs, shifted(outputs)))
        for part in (slice(0, 3), slice(3, 6)):
            generator.record(
                outputs[part],
                REWARDS[part],
                trainer_logprobs=shifted(outputs)[part],
                step=len(steps),
                output_dir=tmp_path / "out",
            )
        if logs_itself:
            offline.log({"reward": float(len(steps))})
    finish(offline)
    found = rows(tmp_path)
    assert len(found) == 2
    for step, (row, (outputs, _)) in enumerate(zip(found, steps, strict=True), 1):
        trained = [part for s in (slice(0, 3), slice(3, 6)) for part in shifted(outputs)[s]]
        require_shown(row, tmp_path, outputs, trained, step)
        assert row.get("reward") == (step if logs_itself else None)


def test_wandb_gets_the_table_alone_of_an_evaluation(generator, tmp_path, offline):
    generator.record(rolled_out(generator), mode="eval", output_dir=tmp_path / "out")
    finish(offline)
    (row,) = rows(tmp_path)
    assert len(table(tmp_path, row["rollout/tokens"])) > 0
    assert not {LOGPROBS, DRIFT, RATIO} & set(row)


def test_without_the_trainers_log_probabilities_there_is_no_drift(generator, tmp_path, offline):
    generator.record(rolled_out(generator), output_dir=tmp_path / "out")
    finish(offline)
    (row,) = rows(tmp_path)
    assert {LOGPROBS, DRIFT, RATIO} & set(row) == {LOGPROBS}
