"""Rollouts of several engines are read, and audited from the command line."""

import json

import pytest
from tiny import char_tokenizer, tiny_model
from tokenizers import models

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.metrics.run_records import RunRecorder, SequenceRecord
from cb_rollout.rollout.audit.records import read_rollouts
from cb_rollout.tools.cli import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folders of a model and of an older version of it."""
    folders = []
    for name, seed in (("new", 0), ("old", 1)):
        folders.append(tmp_path_factory.mktemp(name))
        char_tokenizer().save_pretrained(folders[-1])
        tiny_model(vocab_size=99, seed=seed).save_pretrained(folders[-1])
    return folders


def rollout(seed):
    model, tokenizer = tiny_model(vocab_size=99, seed=seed), char_tokenizer()
    params = SamplingParams(max_new_tokens=20)
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        outputs = generator.generate_batch(["One and one?", "two"] * 4, sampling_params=params)
    return list(outputs.values())


def record_run(folder, outputs):
    tokenizer, recorder = char_tokenizer(), RunRecorder(folder / "cb_rollout")
    for step in (1, 2):
        for output in outputs:
            recorder.record_sequence(
                SequenceRecord(
                    step=step,
                    mode="train",
                    request_id=f"{step}-{output.request_id}",
                    prompt=tokenizer.decode(output.prompt_ids),
                    tokens=[tokenizer.decode([token]) for token in output.generated_tokens],
                    token_ids=output.generated_tokens,
                    logprobs=output.logprobs,
                    policy_versions=output.policy_versions,
                    reward=None,
                    finish_reason=output.finish_reason,
                )
            )


def test_the_records_of_a_run_are_the_rollout(tmp_path):
    outputs = rollout(0)
    record_run(tmp_path, outputs)
    found = read_rollouts(tmp_path, char_tokenizer())
    assert [own.request_id for own in found] == [f"2-{own.request_id}" for own in outputs]
    assert [own.prompt_ids for own in found] == [list(own.prompt_ids) for own in outputs]
    assert [own.logprobs for own in found] == [own.logprobs for own in outputs]
    first = read_rollouts(tmp_path, char_tokenizer(), step=1)
    assert first[0].request_id.startswith("1-")


LINES = {
    "ids": {"prompt_ids": [5, 6], "completion_ids": [7, 8], "logprobs": [-1.0, -2.0]},
    "generate": {"id": 3, "sample": 1, "prompt": '!"', "token_ids": [7, 8], "logprobs": [-1, -2]},
    "chat": {
        "messages": [{"role": "a", "content": "!"}],
        "token_ids": [7, 8],
        "logprobs": [-1, -2],
    },
    "openai": {
        "id": "x",
        "choices": [
            {
                "prompt_token_ids": [5, 6],
                "token_ids": [7, 8],
                "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
            }
        ],
    },
    "completions": {
        "choices": [
            {
                "prompt_token_ids": [5, 6],
                "token_ids": [7, 8],
                "logprobs": {"token_logprobs": [-1.0, -2.0]},
            }
        ]
    },
    "sglang": {
        "prompt_ids": [5, 6],
        "output_ids": [7, 8],
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]],
    },
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_other_engines_are_read(tmp_path, name):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(LINES[name]) + "\n")
    (own,) = read_rollouts(path, char_tokenizer(), temperature=0.5)
    assert own.generated_tokens == [7, 8]
    assert own.logprobs == [-1.0, -2.0]
    assert own.temperature == 0.5
    expected = char_tokenizer()("a: !\nassistant: ")["input_ids"] if name == "chat" else [5, 6]
    assert own.prompt_ids == expected


def test_a_last_line_needs_no_newline_and_sequences_without_an_id_have_their_lines(tmp_path):
    path, rows = tmp_path / "rollouts.jsonl", [LINES[name] for name in ("chat", "chat")]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_rollouts(path, char_tokenizer())
    assert [own.request_id for own in found] == ["line 1-0", "line 2-0"]
    path.write_text(json.dumps(rows[0]) + '\n{"prompt_ids": [1')
    with pytest.raises(ConfigurationError, match=f"line 2 of {path} is not a rollout"):
        read_rollouts(path, char_tokenizer())


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        read_rollouts(tmp_path / "nowhere", char_tokenizer())
    record_run(tmp_path, rollout(0)[:1])
    with pytest.raises(ConfigurationError, match="no sequence of step 99, but of 1, 2"):
        read_rollouts(tmp_path, char_tokenizer(), step=99)


def test_a_file_without_numbers_is_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt_ids": [1], "token_ids": [2]}\n')
    with pytest.raises(ConfigurationError, match="holds no sequence with token ids and log-prob"):
        read_rollouts(path, char_tokenizer())


def test_the_command_says_the_cause_and_exits_by_it(tmp_path, checkpoints, capsys):
    new, old = map(str, checkpoints)
    outputs = rollout(0)
    record_run(tmp_path, outputs)
    assert main(["audit", str(tmp_path), "--model", new]) == 0
    assert capsys.readouterr().out.startswith("Rounding explains 1")
    assert main(["audit", str(tmp_path), "--model", old, "--version", new]) == 1
    assert f"Log-probabilities differ by: older version ({new})." in capsys.readouterr().out
    assert main(["audit", str(tmp_path), "--model", old, "--version", new, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["cause"] == said["evidence"][0]["cause"] == "older version"
    assert said["sentence"].startswith(f"Log-probabilities differ by: older version ({new}).")
    assert (
        said["evidence"][0]["agreement"]["largest"] < 1e-4 < said["evidence"][0]["nats_per_token"]
    )
    assert said["num_tokens"] == sum(len(own.generated_tokens) for own in outputs)
    assert main(["audit", str(tmp_path / "nothing.jsonl"), "--model", new]) == 2


@pytest.mark.slow
def test_the_command_names_another_tokenizer_of_the_engine(tmp_path, checkpoints, capsys):
    new, _ = map(str, checkpoints)
    # The engine's ids of letters and signs are one more than the trainer's.
    words = char_tokenizer().get_vocab()
    moved = {word: 3 + (index - 2) % 96 if index > 2 else index for word, index in words.items()}
    other = char_tokenizer()
    other.backend_tokenizer.model = models.WordLevel(moved, unk_token="<unk>")
    other.save_pretrained(tmp_path / "other")
    tiny_model(vocab_size=99).config.save_pretrained(tmp_path / "other")
    texts, params = ["One and one?", "two", "12 x 12 ="] * 3, SamplingParams(max_new_tokens=12)
    with RolloutGenerator(tiny_model(vocab_size=99), RolloutConfig(seed=0)) as generator:
        prompts = other(text=texts)["input_ids"]
        outputs = generator.generate_batch(prompts, sampling_params=params).values()
    lines = [
        {"prompt": text, "token_ids": own.generated_tokens, "logprobs": own.logprobs}
        for text, own in zip(texts, outputs, strict=True)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["audit", str(path), "--model", new]) == 1
    assert "another tokenizer" not in capsys.readouterr().out
    assert main(["audit", str(path), "--model", new, "--tokenizer", str(tmp_path / "other")]) == 1
    assert "differ by: another tokenizer (" in capsys.readouterr().out
