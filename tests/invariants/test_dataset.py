"""Each sequence of a data set is generated once, whenever the run was interrupted."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from full_disk import FullDisk
from nightly import slow_after
from tiny import char_tokenizer, plain_logprobs, tiny_model

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    InvalidRequestError,
    OutOfCacheMemoryError,
    RolloutConfig,
    SamplingParams,
)
from cb_rollout.tools.dataset import generate_dataset
from cb_rollout.tools.dataset.generate import completions
from cb_rollout.tools.dataset.rows import Row

TOKENIZER = char_tokenizer()
ROWS = [{"prompt": f"{n} + 1 = ", "id": f"q{n}", "answer": n + 1} for n in range(12)]
SAMPLES = 3
PARAMS = SamplingParams(max_new_tokens=12)
# A run that hangs is killed and fails the test.
TIMEOUT_SECONDS = 120

DEADLY_SCORER = """
import os, signal
calls = 0
def length(row):
    global calls
    calls += 1
    if calls == int(os.environ.get("DIES_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    return len(row["token_ids"])
"""


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=len(TOKENIZER))


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def generate(model, dataset, output, **options):
    settings = {
        "tokenizer": TOKENIZER,
        "max_new_tokens": 12,
        "num_return_sequences": SAMPLES,
        "temperature": 1.0,
        "max_num_seqs": 8,
        "progress_bar": False,
    }
    return generate_dataset(model, dataset, output, **{**settings, **options})


@contextmanager
def started(manager):
    manager.start()
    yield manager
    manager.stop()


def token_ids(row):
    return TOKENIZER(row.values["prompt"])["input_ids"]


def keys(results):
    return sorted((str(result["id"]), result["sample"]) for result in results)


ALL_KEYS = sorted((row["id"], sample) for row in ROWS for sample in range(SAMPLES))


def test_every_row_gets_its_sequences_with_what_was_asked_for(model, jsonl, tmp_path):
    report = generate(model, jsonl, tmp_path / "out.jsonl", logprobs=True)
    results = read_jsonl(tmp_path / "out.jsonl")
    assert keys(results) == ALL_KEYS
    assert (report.num_rows, report.num_sequences, report.num_failed) == (12, 36, 0)
    assert report.num_tokens == sum(len(result["token_ids"]) for result in results)
    for result in results:
        row = next(row for row in ROWS if row["id"] == result["id"])
        assert result["prompt"] == row["prompt"]
        assert result["answer"] == row["answer"]
        assert result["completion"] == TOKENIZER.decode(
            result["token_ids"], skip_special_tokens=True
        )
        stopped = result["token_ids"][-1] == TOKENIZER.eos_token_id
        assert result["finish_reason"] == ("stop" if stopped else "length")
        prompt_ids = TOKENIZER(row["prompt"])["input_ids"]
        expected = plain_logprobs(model, prompt_ids, result["token_ids"])
        assert result["logprobs"] == pytest.approx(expected, abs=1e-5)


def test_a_groups_prompt_is_computed_once(model):
    with started(ContinuousBatchingManager(model, None, RolloutConfig())) as manager:
        wanted = ((Row("", n, {"prompt": f"{n:04}" + "x" * 60}), [0, 1, 2]) for n in range(30))
        assert sum(map(len, completions(manager, PARAMS, token_ids, wanted))) == 90
        assert manager.counters.prefill_tokens == 30 * 64


def test_no_more_is_read_than_keeps_the_batch_full(model):
    num_taken = num_completed = most = 0

    def wanted():
        nonlocal num_taken, most
        for n in range(40):
            num_taken += 3
            most = max(most, num_taken - num_completed)
            yield Row("", n, {"prompt": f"{n}"}), [0, 1, 2]

    config = RolloutConfig(max_requests_per_batch=8)
    with started(ContinuousBatchingManager(model, None, config)) as manager:
        for completed in completions(manager, PARAMS, token_ids, wanted()):
            num_completed += len(completed)
    assert num_completed == num_taken == 120
    # Two batches in flight, and a row that is read and does not fit yet. Completions are counted
    # after the rows that replaced them were read, hence another batch.
    assert most <= 2 * 8 + 3 + 8


def test_rows_without_an_id_get_their_number_and_a_seed_repeats_a_run(model, tmp_path):
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    jsonl = write_jsonl(tmp_path / "in.jsonl", rows)
    for name in ("a.jsonl", "b.jsonl"):
        generate(model, jsonl, tmp_path / name, seed=7)
    a, b = (
        {(r["id"], r["sample"]): r["token_ids"] for r in read_jsonl(tmp_path / name)}
        for name in ("a.jsonl", "b.jsonl")
    )
    assert a == b
    assert {row_id for row_id, _ in a} == set(range(12))
    assert len({tuple(tokens) for tokens in a.values()}) > 30


@pytest.mark.parametrize("share", slow_after(1, [0.301, 0.0, 0.3, 0.77, 0.999]))
def test_an_output_cut_off_anywhere_is_resumed(model, jsonl, tmp_path, share):
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output, seed=0)
    whole = output.read_bytes()
    kept = whole[: int(len(whole) * share)]
    output.write_bytes(kept)
    report = generate(model, jsonl, output, seed=0)
    assert report.num_resumed == kept.count(b"\n")
    assert keys(read_jsonl(output)) == ALL_KEYS
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    again = output.read_bytes()
    assert generate(model, jsonl, output, seed=0).num_tokens == 0
    assert output.read_bytes() == again


@pytest.mark.parametrize("seed", [0, None])
def test_a_row_that_lacks_some_of_its_sequences_gets_others_than_it_has(model, tmp_path, seed):
    jsonl = write_jsonl(tmp_path / "in.jsonl", ROWS[:1])
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output, seed=seed, ignore_eos=True)
    first = next(line for line in output.read_text().splitlines() if '"sample":0' in line)
    output.write_text(first + "\n")
    generate(model, jsonl, output, seed=seed, ignore_eos=True)
    results = read_jsonl(output)
    assert len({tuple(result["token_ids"]) for result in results}) == SAMPLES


@pytest.mark.slow
def test_a_killed_run_is_finished_by_the_next_one(checkpoint, jsonl, tmp_path):
    (tmp_path / "deadly.py").write_text(DEADLY_SCORER)
    output = tmp_path / "out.jsonl"
    command = [
        *(sys.executable, "-m", "cb_rollout", "generate", "--model", str(checkpoint)),
        *("--input", str(jsonl), "--output", str(output), "--evaluate", "deadly:length"),
        *("--num-return-sequences", str(SAMPLES), "--max-new-tokens", "12", "--seed", "0"),
        *("--temperature", "1", "--max-num-seqs", "4"),
    ]

    def run(**environment):
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    assert run(DIES_AT="20").returncode == -signal.SIGKILL
    before = read_jsonl(output)
    assert 0 < len(before) < 20
    with output.open("a") as file:
        file.write('{"id": "q1", "sample": 2, "prom')
    ended = run()
    assert ended.returncode == 0, ended.stderr[-2000:]
    after = read_jsonl(output)
    assert after[: len(before)] == before
    assert keys(after) == ALL_KEYS
    assert f"36 sequences of 12 rows in {output}, {len(before)} of them from before" in ended.stdout
    assert all(result["scores"] == {"score": len(result["token_ids"])} for result in after)


@pytest.mark.parametrize("first_refused", [2, 7])
def test_a_run_that_a_full_disk_ends_is_finished_by_the_next_one(
    model, jsonl, tmp_path, monkeypatch, first_refused
):
    output = tmp_path / "results" / "out.jsonl"
    output.parent.mkdir()
    with (
        FullDisk(output.parent, first_refused).mounted(monkeypatch),
        pytest.raises(ConfigurationError, match=r"cannot be written \(No space left on device\)"),
    ):
        generate(model, jsonl, output, seed=5)
    generate(model, jsonl, output, seed=5)
    assert keys(read_jsonl(output)) == ALL_KEYS


def test_an_interrupt_tells_the_progress_and_stops_the_engine(model, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    calls = iter(range(100))

    def score(_):
        if next(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return 0.0

    with pytest.raises(KeyboardInterrupt) as caught:
        generate(model, jsonl, output, evaluate=score, max_num_seqs=4)
    before = read_jsonl(output)
    assert 0 < len(before) <= 20
    assert f"interrupted: {len(before)} of 36 sequences are in {output}" in str(caught.value)
    assert "run the same again" in str(caught.value)
    assert not [t for t in threading.enumerate() if t.name == "cb_rollout"]
    generate(model, jsonl, output, evaluate=score, max_num_seqs=4)
    assert keys(read_jsonl(output)) == ALL_KEYS


@pytest.mark.parametrize(
    ("changed", "said"),
    slow_after(
        1,
        [
            ({"temperature": 0.7}, "temperature was 1.0 and is 0.7"),
            ({"num_return_sequences": 4}, "num_return_sequences was 3 and is 4"),
            ({"logprobs": True}, "logprobs was False and is True"),
            ({"evaluate": len}, "evaluate was None and is 'builtins:len'"),
        ],
    ),
)
def test_other_settings_are_refused_unless_it_is_overwritten(model, jsonl, tmp_path, changed, said):
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output)
    before = output.read_bytes()
    with pytest.raises(ConfigurationError, match=said):
        generate(model, jsonl, output, **changed)
    assert output.read_bytes() == before
    report = generate(model, jsonl, output, overwrite=True, **changed)
    assert report.num_resumed == 0
    assert report.num_sequences == report.num_rows * report.num_return_sequences


def test_other_rows_other_weights_and_lost_settings_are_refused(model, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output)
    with pytest.raises(ConfigurationError, match="model was '"):
        generate(tiny_model(vocab_size=len(TOKENIZER), seed=1), jsonl, output)
    other = tiny_model(vocab_size=len(TOKENIZER))
    with torch.no_grad():
        other.get_parameter("model.layers.0.mlp.up_proj.weight").view(-1)[1] += 1e-3
    with pytest.raises(ConfigurationError, match="model was '"):
        generate(other, jsonl, output)
    write_jsonl(jsonl, [*ROWS, {"prompt": "one more"}])
    with pytest.raises(ConfigurationError, match="input was '"):
        generate(model, jsonl, output)
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(ConfigurationError, match=r"out\.jsonl\.settings\.json"):
        generate(model, jsonl, output)
    # Settings that affect speed only may differ.
    write_jsonl(jsonl, ROWS)
    generate(model, jsonl, output, overwrite=True)
    assert generate(model, jsonl, output, max_num_seqs=2).num_tokens == 0


def test_a_request_that_the_engine_refuses_becomes_a_row_with_an_error(model, tmp_path):
    rows = [ROWS[0], {"prompt": "x" * 600, "id": "long"}, {"prompt": [5, 10**6], "id": "foreign"}]
    jsonl = write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    report = generate(model, jsonl, output, evaluate=lambda row: len(row["token_ids"]))
    assert (report.num_sequences, report.num_failed) == (9, 6)
    errors = {result["id"]: result.get("error") for result in read_jsonl(output)}
    assert errors["q0"] is None
    assert f"{jsonl} line 2" in errors["long"]
    assert "the model takes at most 512" in errors["long"]
    assert f"{jsonl} line 3" in errors["foreign"]
    assert "outside the model's vocabulary" in errors["foreign"]
    assert f"the first error: {report.first_error}\n" in str(report)
    assert report.first_error in errors.values()
    assert report.scores[0].num_sequences == 3
    resumed = generate(model, jsonl, output, evaluate=lambda row: len(row["token_ids"]))
    assert (resumed.num_resumed, resumed.num_failed, resumed.num_tokens) == (9, 6, 0)


@pytest.mark.slow
def test_without_a_length_rows_get_512_new_tokens_or_what_still_fits(tmp_path):
    small = tiny_model(vocab_size=len(TOKENIZER), num_hidden_layers=1, max_position_embeddings=520)
    rows = [{"prompt": "x" * length, "id": str(length)} for length in (4, 514, 517)]
    jsonl = write_jsonl(tmp_path / "in.jsonl", rows)
    options = {"max_new_tokens": None, "ignore_eos": True, "num_return_sequences": 1}
    report = generate(small, jsonl, tmp_path / "out.jsonl", **options)
    assert report.num_failed == 0
    found = {line["id"]: len(line["token_ids"]) for line in read_jsonl(tmp_path / "out.jsonl")}
    assert found == {"4": 512, "514": 6, "517": 3}
    asked = generate(small, jsonl, tmp_path / "asked.jsonl", **{**options, "max_new_tokens": 512})
    assert asked.num_failed == 2, "what was asked for is not cut"
    options["max_new_tokens"] = 520
    with pytest.raises(ConfigurationError, match=r"=520 leaves no room .* 520 tokens"):
        generate(small, jsonl, tmp_path / "long.jsonl", **options)


def test_failed_sequences_are_generated_again_once_their_lines_are_gone(model, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output)
    results = read_jsonl(output)
    write_jsonl(output, [*results[:30], *({**r, "error": "no room"} for r in results[30:])])
    assert generate(model, jsonl, output).num_failed == 6
    write_jsonl(output, [result for result in read_jsonl(output) if "error" not in result])
    report = generate(model, jsonl, output)
    assert (report.num_resumed, report.num_failed, report.num_sequences) == (30, 0, 36)
    assert keys(read_jsonl(output)) == ALL_KEYS
    assert read_jsonl(output)[:30] == results[:30]


def test_a_cache_without_room_is_refused_before_anything_is_written(model, jsonl, tmp_path):
    with pytest.raises(OutOfCacheMemoryError, match="no memory for a KV cache"):
        generate(model, jsonl, tmp_path / "out.jsonl", max_memory_percent=1e-12)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_parquet_and_data_sets_on_disk_give_what_jsonl_gives(model, jsonl, tmp_path):
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "in.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    found = []
    for name in ("in.jsonl", "in.parquet", "saved"):
        output = tmp_path / f"{name}.out.jsonl"
        generate(model, tmp_path / name, output, seed=0)
        found.append({(r["id"], r["sample"]): r for r in read_jsonl(output)})
    assert len(found[0]) == 36
    assert found[0] == found[1] == found[2]


def test_chats_go_through_the_template_with_the_system_prompt(model, tmp_path):
    chat = [{"role": "user", "content": "1+2="}]
    rows = [{"messages": chat, "id": "m"}, {"prompt": chat, "id": "p"}, {"prompt": "1+2="}]
    jsonl = write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    options = {"temperature": 0.0, "num_return_sequences": 1, "logprobs": True}
    generate(model, jsonl, output, chat=True, system_prompt="Be brief.", **options)
    results = read_jsonl(output)
    prompt_ids = TOKENIZER("system: Be brief.\nuser: 1+2=\nassistant: ")["input_ids"]
    for result in results:
        expected = plain_logprobs(model, prompt_ids, result["token_ids"])
        assert result["logprobs"] == pytest.approx(expected, abs=1e-5)
    assert {r["id"]: r.get("messages") for r in results} == {"m": chat, "p": None, 2: None}
    output = tmp_path / "b.jsonl"
    assert generate(model, jsonl, output, system_prompt="Be brief.", **options).num_failed == 1
    (failed,) = [result for result in read_jsonl(output) if "error" in result]
    assert re.search(r"line 3: the prompt is text, .* set chat", failed["error"])
    templateless = char_tokenizer()
    templateless.chat_template = None
    output = tmp_path / "c.jsonl"
    report = generate(model, jsonl, output, tokenizer=templateless, **options)
    assert report.num_failed == 2
    assert re.search(r"line 1: .* no chat template", report.first_error)


def test_rows_in_memory_are_refused_with_how_to_write_them(model, tmp_path):
    with pytest.raises(ConfigurationError, match=r"dataset is a list; .*to_json"):
        generate(model, ROWS, tmp_path / "out.jsonl")


def test_a_chat_with_a_system_message_of_its_own_is_a_row_with_an_error(model, tmp_path):
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    jsonl = write_jsonl(tmp_path / "in.jsonl", [{"messages": messages}])
    report = generate(model, jsonl, tmp_path / "out.jsonl", system_prompt="C")
    assert report.num_failed == SAMPLES
    assert "system message of its own" in read_jsonl(tmp_path / "out.jsonl")[0]["error"]


def test_scores_are_in_the_rows_and_their_means_over_rows_in_the_report(model, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    report = generate(
        model,
        jsonl,
        output,
        evaluate=lambda row: {"even": row["answer"] % 2 == 0, "length": len(row["token_ids"])},
    )
    results = read_jsonl(output)
    assert all(r["scores"]["length"] == len(r["token_ids"]) for r in results)
    even, length = report.scores
    assert (even.name, even.num_rows, even.num_sequences, even.mean) == ("even", 12, 36, 0.5)
    assert even.mean_error == pytest.approx(math.sqrt(0.25 * 12 / 11 / 12))
    by_row = torch.tensor(
        [[r["scores"]["length"] for r in results if r["id"] == row["id"]] for row in ROWS]
    )
    assert length.mean == pytest.approx(by_row.mean().item())
    assert length.best == pytest.approx(by_row.max(1).values.mean().item())
    assert length.best_error == pytest.approx(by_row.max(1).values.std().item() / math.sqrt(12))
    assert "best of 3" in str(report)


@pytest.mark.parametrize(
    ("scorer", "said"),
    slow_after(
        1,
        [
            (lambda row: 1 / (row["answer"] - 5), "raised ZeroDivisionError: division by zero"),
            (lambda row: math.nan if row["answer"] == 5 else 1, "gave score=nan"),
            (lambda row: None if row["answer"] == 5 else 1, "gave score=None"),
        ],
    ),
)
def test_a_failing_scorer_names_itself_and_the_row_and_keeps_what_is_done(
    model, jsonl, tmp_path, scorer, said
):
    output = tmp_path / "out.jsonl"
    with pytest.raises(ConfigurationError, match=said) as caught:
        generate(model, jsonl, output, evaluate=scorer, max_num_seqs=1)
    assert "<lambda> on" in str(caught.value)
    assert f"{jsonl} line 5 (id 'q4', sample 0)" in str(caught.value)
    scorer.__code__ = (lambda row: 1.0).__code__
    before = output.read_bytes()
    with pytest.raises(ConfigurationError, match=r"evaluate_code was .* set rescore=True"):
        generate(model, jsonl, output, evaluate=scorer)
    assert output.read_bytes() == before
    report = generate(model, jsonl, output, evaluate=scorer, rescore=True)
    assert report.num_resumed > 0
    assert keys(read_jsonl(output)) == ALL_KEYS
    assert report.scores[0].mean == 1
    assert generate(model, jsonl, output, evaluate=scorer).num_tokens == 0


def test_results_are_scored_again_without_being_generated_again(model, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    generate(model, jsonl, output)
    before = read_jsonl(output)
    with pytest.raises(ConfigurationError, match="rescore=True needs a scoring function"):
        generate(model, jsonl, output, rescore=True)
    with pytest.raises(ConfigurationError, match=r"sample [0-2]\) raised Zero"):
        generate(model, jsonl, output, rescore=True, evaluate=lambda row: 1 / 0)
    assert read_jsonl(output) == before
    report = generate(model, jsonl, output, rescore=True, evaluate=lambda row: row["answer"])
    assert (report.num_resumed, report.num_tokens) == (36, 0)
    assert report.scores[0].mean == pytest.approx(6.5)
    after = read_jsonl(output)
    assert [{n: v for n, v in row.items() if n != "scores"} for row in after] == before
    # Settings that decide completions still count.
    with pytest.raises(ConfigurationError, match=r"temperature was 1\.0 and is 0\.5"):
        generate(model, jsonl, output, rescore=True, evaluate=len, temperature=0.5)


def edit(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


CHANGED_FILES = {
    "config.rms_norm_eps was": lambda f: edit(f / "config.json", rms_norm_eps=0.1),
    "sampling_params.repetition_penalty was None": lambda f: edit(
        f / "generation_config.json", repetition_penalty=1.5
    ),
    "sampling_params.stop_token_ids|sampling_params.eos_token_id": lambda f: edit(
        f / "generation_config.json", eos_token_id=[1, 7]
    ),
    "chat_template was": lambda f: (f / "chat_template.jinja").write_text("other"),
    "tokenizer.tokenizer.json was": lambda f: swap(f / "tokenizer.json"),
    "tokenizer.tokenizer_config.json was": lambda f: edit(
        f / "tokenizer_config.json", clean_up_tokenization_spaces=True
    ),
}


def swap(path):
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    path.write_text(json.dumps(content))


@pytest.mark.fast_cases("config.rms_norm_eps was")
@pytest.mark.parametrize("said", CHANGED_FILES)
def test_a_checkpoint_that_changed_is_refused_by_what_changed(checkpoint, jsonl, tmp_path, said):
    folder, output = tmp_path / "checkpoint", tmp_path / "out.jsonl"
    shutil.copytree(checkpoint, folder)
    generate(folder, jsonl, output, tokenizer=None)
    before = output.read_bytes()
    CHANGED_FILES[said](folder)
    with pytest.raises(ConfigurationError, match=rf"other settings: ({said}).*overwrite this one"):
        generate(folder, jsonl, output, tokenizer=None)
    assert output.read_bytes() == before


def test_a_checkpoint_that_moved_is_resumed(checkpoint, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    generate(checkpoint, jsonl, output, tokenizer=None)
    shutil.copytree(checkpoint, tmp_path / "moved")
    edit(tmp_path / "moved" / "config.json", transformers_version="5.0.0")
    report = generate(tmp_path / "moved", jsonl, output, tokenizer=None, max_num_seqs=2)
    assert (report.num_resumed, report.num_tokens) == (36, 0)


def test_equal_greedy_completions_are_refused(model, jsonl, tmp_path):
    with pytest.raises(
        ConfigurationError, match="greedy decoding would make all num_return_sequences=3"
    ):
        generate(model, jsonl, tmp_path / "out.jsonl", temperature=None)
    report = generate(
        model, jsonl, tmp_path / "b.jsonl", temperature=None, generation_config="none"
    )
    assert report.num_failed == 0
    with pytest.raises(InvalidRequestError, match="top_p=2"):
        generate(model, jsonl, tmp_path / "c.jsonl", top_p=2.0)
