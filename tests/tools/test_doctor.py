import json
import platform
import tomllib
from pathlib import Path

import pytest
import torch
from plain_attention import varlen_attn
from pretend_device import DEVICE, Pretended, pretend_device
from tiny import char_tokenizer, tiny_model
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.core import paged_model
from cb_rollout.engine.model import runner
from cb_rollout.rollout import checkpoint
from cb_rollout.tools import doctor
from cb_rollout.tools.cli import main
from cb_rollout.tools.doctor import EXTRAS, Level, checkpoint_findings, machine_findings


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Save good and bad checkpoints, one in each folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family, layers in (("qwen3", 2), ("qwen3_5_text", 2)):
        model = tiny_model(family, vocab_size=99, num_hidden_layers=layers)
        model.save_pretrained(root / family)
        char_tokenizer().save_pretrained(root / family)
    AutoModel.from_pretrained(root / "qwen3").save_pretrained(root / "headless")
    T5ForConditionalGeneration(
        T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8, vocab_size=40)
    ).save_pretrained(root / "t5")
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    BertForMaskedLM(bert).save_pretrained(root / "bert")
    for name in ("empty", "words", "types", "unknown"):
        (root / name).mkdir()
    (root / "words" / "config.json").write_text("not JSON")
    (root / "types" / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    (root / "unknown" / "config.json").write_text(json.dumps({"model_type": "perceptron-9"}))
    for name in ("torn", "weightless"):
        model.save_pretrained(root / name)
    (root / "torn" / "model.safetensors").write_bytes(b"\xff" * 64)
    (root / "weightless" / "model.safetensors").unlink()
    (root / "file").write_text("hello")
    return root


def test_a_good_checkpoint_is_probed_and_compared_with_its_forward(checkpoints, capsys):
    assert main(["doctor", str(checkpoints / "qwen3")]) == 0
    printed = capsys.readouterr().out
    lines = {line[2:28].strip(): line[29:] for line in printed.splitlines() if line[28:29] == " "}
    assert lines["torch"].startswith(f"{torch.__version__} (supported: >=")
    assert lines["model"].startswith(f"{checkpoints / 'qwen3'}: Qwen3ForCausalLM")
    assert lines["tokenizer"] == "99 tokens, with a chat template"
    assert lines["layers"] == "2 with keys and values, 0 with recurrent states, 0 with neither"
    # Two layers of keys and values, two heads of 16 float32 each.
    assert lines["bytes per token"] == str(2 * 2 * 2 * 16 * 4)
    assert lines["bytes per sequence"] == "0"
    assert (
        lines["sequences run"] == "of any lengths together in one forward, prompts without padding"
    )
    assert lines["extra 'server'"] == "found"
    assert "512 in one sequence" in lines["max tokens"]
    assert lines["rollout against forward"].startswith("32 tokens, ")
    assert lines["prefill"] == "packed"
    assert lines["packed loss"] == "shared_prefixes"
    assert printed.splitlines()[-1].startswith("usable")
    assert not [line for line in printed.splitlines() if line.startswith("X")]


def test_every_extra_that_is_looked_for_can_be_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert {*EXTRAS} <= {*project["project"]["optional-dependencies"]}


def test_a_hybrids_layers_are_told_apart(checkpoints):
    found = {f.name: f for f in checkpoint_findings(str(checkpoints / "qwen3_5_text"))}
    assert found["layers"].text.startswith("1 with keys and values, 1 with recurrent states")
    assert found["chunks, known prefixes"].text.startswith("not used: recurrent")
    assert found["prefill"].text.startswith("padded, not packed (recurrent states")
    assert found["packed loss"].text == "forked_states"
    assert int(found["bytes per sequence"].text.replace(",", "")) > 0
    assert max(f.level for f in found.values()) is Level.OK


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
@pytest.mark.parametrize(
    ("varlen", "level", "prefill", "loss"),
    [
        pytest.param(
            varlen_attn, Level.OK, "packed", "shared_prefixes", id="best", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda query, key, value: query,
            Level.WARNING,
            "padded, not packed (its forward fails (TypeError: ",
            "padded, not shared_prefixes (",
            id="lost",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_on_a_gpu_a_path_that_is_not_the_best_is_a_warning(
    checkpoints, monkeypatch, varlen, level, prefill, loss
):
    pytest.importorskip("triton")
    pretend_device(monkeypatch)
    monkeypatch.setattr(torch_compat, "varlen_attn", varlen)
    with Pretended():
        model = checkpoint.load_model(str(checkpoints / "qwen3"), "bfloat16", "cpu").to(DEVICE)
        monkeypatch.setattr(checkpoint, "load_model", lambda *_: model)
        found = {f.name: f for f in checkpoint_findings(str(checkpoints / "qwen3"))}
    for name, runs in (("prefill", prefill), ("packed loss", loss)):
        assert found[name].level is level
        assert found[name].text.startswith(runs)
        assert ("unexpected keyword" in found[name].text) is (level is Level.WARNING)
    assert found["decode attention"].text.startswith("triton (")
    assert found["CUDA graphs"].text == "on, a step ahead"
    assert max(f.level for f in found.values()) is level


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("x" * 300, "File name too long"),
        ("empty", "has no config.json"),
        ("words", "could be loaded"),
        ("types", "could be loaded"),
        ("unknown", "perceptron-9"),
        ("torn", "could be loaded"),
        ("weightless", "could be loaded"),
        (
            "headless",
            "lacks 1 of the model's weights, which would be initialized at random: lm_head.weight",
        ),
        ("t5", "T5Config"),
        ("bert", "BertForMaskedLM, which attends in both directions"),
    ],
)
def test_an_unusable_checkpoint_is_one_line_and_exit_code_1(checkpoints, capsys, name, said):
    assert main(["doctor", str(checkpoints / name)]) == 1
    faults = [line for line in capsys.readouterr().out.splitlines() if line.startswith("X ")]
    assert len(faults) == 1
    assert said in faults[0]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--dtype", "float8"], "--dtype float8 is not one of"),
        (["--device", "abacus"], "--device abacus cannot be used"),
        (["--max-memory-percent", "1.5"], "--max-memory-percent 1.5 is outside"),
        (["--max-memory-percent", "1e-12"], "raise --max-memory-percent"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_a_finding(checkpoints, capsys, option, said):
    assert main(["doctor", str(checkpoints / "qwen3"), *option]) == 1
    assert said in capsys.readouterr().out


def test_a_missing_tokenizer_is_a_warning_and_bfloat16_has_its_own_bound(checkpoints, tmp_path):
    tiny_model(vocab_size=99).save_pretrained(tmp_path)
    found = {f.name: f for f in checkpoint_findings(str(tmp_path), dtype="bfloat16")}
    assert found["tokenizer"].level is Level.WARNING
    assert "torch.bfloat16" in found["model"].text
    assert found["rollout against forward"].level is Level.OK


def test_a_rollout_that_is_not_the_models_forward_is_found(checkpoints, monkeypatch):
    plain = runner.recomputed_logprobs
    monkeypatch.setattr(
        runner, "recomputed_logprobs", lambda *args: [lp - 0.01 for lp in plain(*args)]
    )
    found = {f.name: f for f in checkpoint_findings(str(checkpoints / "qwen3"))}
    comparison = found["rollout against forward"]
    assert comparison.level is Level.BAD
    assert "0.01 nats (at most 0.01), beyond the model's own rounding" in comparison.text


def test_any_exception_of_a_model_is_a_finding(checkpoints, monkeypatch):
    def fail(*_):
        raise RuntimeError("the wheels came off\nat once")

    monkeypatch.setattr(paged_model, "check_model", fail)
    last = list(checkpoint_findings(str(checkpoints / "qwen3")))[-1]
    assert last.level is Level.BAD
    assert "(RuntimeError: the wheels came off)" in last.text


def test_the_machine_is_described_without_a_checkpoint():
    found = {f.name: f for f in machine_findings("cpu")}
    assert {"python", "torch", "transformers", "trl", "wandb", "flash_attn", "triton"} <= set(found)
    assert "not used: use_cuda_graph=True" in found["CUDA graphs"].text
    assert found["memory free"].text.endswith("GiB on cpu")


def test_the_findings_are_json_too(checkpoints, capsys):
    assert main(["doctor", str(checkpoints / "t5"), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["is_usable"] is False
    assert {"level": "ok", "name": "python", "text": platform.python_version()} in printed[
        "findings"
    ]
    assert printed["findings"][-1]["level"] == "bad"


QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def qwen3_8b(tmp_path):
    """Write a folder that holds the shape of Qwen3-8B alone: no weights, no tokenizer."""
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path / "Qwen3-8B"


def planned(capsys, folder, *options):
    """Return the exit code of a plan, its parts in GiB, and their notes."""
    code = main(["doctor", "--model", str(folder), *options])
    lines = [line for line in capsys.readouterr().out.splitlines() if " GiB, " in line]
    rows = {line[2:28].strip(): line[29:].split(" GiB, ", 1) for line in lines}
    return (
        code,
        {n: float(x) for n, (x, _) in rows.items()},
        {n: note for n, (_, note) in rows.items()},
    )


def test_a_step_is_planned_from_a_config_alone(qwen3_8b, capsys):
    options = ("--gpu-gib", "80", "--max-memory-percent", "0.4")
    code, parts, notes = planned(capsys, qwen3_8b, *options, "--lora", "16")
    assert code == 0
    assert notes["weights"] == "8,190,735,360 in torch.bfloat16"
    assert notes["adapters"] == "43,646,976 in float32, rank 16"
    # 2 x layers x key heads x head dimension x bytes.
    assert notes["KV cache at most"].endswith(f"{2 * 36 * 8 * 128 * 2:,} B")
    always = ["driver and libraries", "weights", "adapters", "gradients", "AdamW states"]
    held = sum(parts[name] for name in [*always, "engine's copy"])
    rollout = held + parts["forward workspace"] + parts["KV cache at most"]
    assert parts["in a rollout"] == pytest.approx(rollout, abs=0.05)
    assert parts["in the loss"] == pytest.approx(held + parts["activations"], abs=0.05)
    assert notes["in the loss"] == f"{80 - parts['in the loss']:.1f} GiB left"
    # All weights: as many gradients, twice as many states, and no copy.
    code, parts, notes = planned(capsys, qwen3_8b, *options)
    assert (code, notes["in the loss"]) == (0, f"{80 - parts['in the loss']:.1f} GiB left")
    assert parts["AdamW states"] == pytest.approx(2 * parts["weights"], abs=0.02)
    assert "engine's copy" not in parts
    code, parts, notes = planned(capsys, qwen3_8b, *options, "--dtype", "float32")
    assert (code, notes["in the loss"]) == (1, "does not fit: docs/tasks/one_gpu.md")
    assert parts["engine's copy"] == pytest.approx(parts["weights"] / 2, abs=0.01)


def test_a_plan_has_what_the_engine_would_keep_of_each_architecture(checkpoints, capsys):
    for family in ("qwen3", "qwen3_5_text"):
        model = checkpoint.load_model(str(checkpoints / family))
        with doctor.RolloutGenerator(model, doctor.RolloutConfig(num_blocks=4)) as generator:
            layout = generator.manager.engine.paged_model.layout
        code, _, notes = planned(capsys, checkpoints / family, "--gpu-gib", "4")
        assert code == 0
        assert notes["weights"] == f"{model.num_parameters():,} in torch.float32"
        # The engine's copy of float32 weights computes in bfloat16.
        assert notes["KV cache at most"].endswith(f" {layout.bytes_per_token // 2:,} B")
        assert ("states of sequences" in notes) == layout.is_recurrent


def test_what_cannot_be_planned_says_why(checkpoints, capsys):
    assert main(["doctor", "--gpu-gib", "80"]) == 2
    assert "--gpu-gib takes a MODEL" in capsys.readouterr().err
    assert main(["doctor", str(checkpoints / "t5"), "--gpu-gib", "80", "--lora", "-1"]) == 2
    assert "--lora -1 is below 0" in capsys.readouterr().err
    for name, why in (("empty", "has no config.json"), ("t5", "causal language model")):
        assert main(["doctor", str(checkpoints / name), "--gpu-gib", "80"]) == 1
        assert why in capsys.readouterr().out


def test_the_plan_of_an_8b_model_is_what_its_page_shows(qwen3_8b, capsys):
    page = (Path(__file__).parents[2] / "docs" / "tasks" / "one_gpu.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    options = ("--gpu-gib", "80", "--lora", "16")
    assert main(["doctor", "--model", str(qwen3_8b), *options, "--max-memory-percent", "0.4"]) == 0
    printed = capsys.readouterr().out.replace(str(qwen3_8b), "Qwen/Qwen3-8B").splitlines()
    assert [line.strip() for line in shown] == [line.strip() for line in printed]


def test_qualify_tries_again_what_was_tried_before(checkpoints, capsys, monkeypatch):
    monkeypatch.delenv("CB_ROLLOUT_QUALIFY", raising=False)
    model = str(checkpoints / "qwen3")
    assert main(["doctor", model, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["doctor", model, "--device", "cpu", "--qualify", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    trials = [finding["text"] for finding in findings if finding["name"] == "trial"]
    assert any(text.startswith("C++ kernel multiply (float32): proved in") for text in trials)
    assert any(text.startswith("C++ kernel attend (float32, NUM_HEADS=4") for text in trials)
    assert not any("stored" in text for text in trials)
    assert all(text.endswith(" ms") for text in trials)


def test_trials_that_are_switched_off_are_a_warning(checkpoints, monkeypatch):
    monkeypatch.setenv("CB_ROLLOUT_QUALIFY", "off")
    found = {f.name: f for f in checkpoint_findings(str(checkpoints / "qwen3"), device="cpu")}
    assert found["trials"].level is Level.WARNING
    assert found["trials"].text == "are switched off by CB_ROLLOUT_QUALIFY"


@pytest.mark.parametrize("arguments", [["--qualify"], ["M", "--qualify", "--gpu-gib", "80"]])
def test_qualify_is_refused_where_nothing_would_run(arguments, capsys):
    assert main(["doctor", *arguments]) != 0
    assert "--qualify" in capsys.readouterr().err
