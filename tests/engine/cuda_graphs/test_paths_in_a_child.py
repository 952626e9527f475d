"""An engine on a GPU runs in a child process first; what ends that is left out of this one.

The child is pretended to be needed on a CPU.
"""

import logging

import pytest
import torch
from tiny import FAMILIES, plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention.cpu.backend import CpuPagedAttention
from cb_rollout.engine.cuda_graphs import qualification
from cb_rollout.engine.cuda_graphs.qualification import small_config, small_model
from cb_rollout.engine.numerics.qualification import qualifier, verdicts
from cb_rollout.engine.numerics.qualification.child import run_in_child
from cb_rollout.engine.service import engine_trial
from cb_rollout.engine.service.engine_trial import try_engine


@pytest.fixture
def tried_here(tmp_path, monkeypatch):
    """Engines on a CPU run in a child first, and no verdict is known."""
    monkeypatch.setattr(qualification, "TRIED_DEVICES", {"cpu"})
    monkeypatch.setattr(verdicts, "cache_folder", lambda name: tmp_path)
    monkeypatch.delenv(qualifier.SWITCH, raising=False)
    qualifier.forget_trials()
    yield
    qualifier.forget_trials()


def argument_of(model, **settings):
    return {
        "device": "cpu",
        "dtype": "float32",
        "autocast_dtype": "",
        "config": small_config(model),
        "attention": model.config._attn_implementation,
        "settings": {"num_blocks": 512, "max_requests_per_batch": 32, "seed": 0, **settings},
    }


def roll_out(config):
    """Sample, and hold log-probabilities against a plain forward; return the paths."""
    model = tiny_model("qwen3")
    params = SamplingParams(ignore_eos=True)
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(
            [[5, 6, 7], [20] * 40], sampling_params=params, max_new_tokens=8
        )
        for output in outputs.values():
            tokens = output.generated_tokens
            plain = plain_logprobs(model, output.prompt_ids, tokens, 1.0)
            assert output.logprobs == pytest.approx(plain, abs=1e-5)
        return {path.part: path.runs for path in generator.paths}


def engine_warnings(caplog):
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if "an engine of" in message]


CPP, GATHERED = "cpp", "gathered"


@pytest.mark.parametrize(
    ("trial", "attention", "graphs", "lines"),
    [
        ("proved", CPP, "off", []),
        ("segfaults_compiled", CPP, "off", ["decode steps run not compiled"]),
        (
            "segfaults_under_graphs",
            CPP,
            "off, as asked",
            ["decode steps run not compiled", "decode steps run without CUDA graphs"],
        ),
        (
            "segfaults",
            GATHERED,
            "off, as asked",
            [
                "decode steps run not compiled",
                "decode steps run without CUDA graphs",
                "decode steps run gathered",
            ],
        ),
        (
            "raises",
            GATHERED,
            "off, as asked",
            [
                "decode steps run not compiled",
                "decode steps run without CUDA graphs",
                "decode steps run gathered",
            ],
        ),
        ("cannot_have_the_card", GATHERED, "off, as asked", ["decode steps run gathered"]),
    ],
)
@pytest.mark.usefixtures("tried_here")
def test_what_ends_the_child_is_left_out(trial, attention, graphs, lines, monkeypatch, caplog):
    monkeypatch.setattr(qualification, "TRIAL", f"planted_trials:{trial}")
    paths = roll_out(RolloutConfig(seed=3))
    assert paths["decode attention"].startswith(attention)
    assert paths["CUDA graphs"] == graphs
    found = engine_warnings(caplog)
    assert len(found) == len(lines)
    for message, line in zip(found, lines, strict=True):
        assert line in message
        assert "doctor MODEL --qualify" in message


@pytest.mark.usefixtures("tried_here")
def test_what_the_user_asks_for_is_refused_where_it_ends_the_child(monkeypatch):
    monkeypatch.setattr(qualification, "TRIAL", "planted_trials:segfaults")
    config = RolloutConfig(use_default_compile_configs=True)
    with pytest.raises(
        ConfigurationError, match=r"use_default_compile_configs=True: .*SIGSEGV.*leave it None"
    ):
        RolloutGenerator(tiny_model("qwen3"), config)


@pytest.mark.usefixtures("tried_here")
def test_a_model_that_a_child_cannot_make_runs_as_configured(monkeypatch):
    monkeypatch.setattr(qualification, "TRIAL", "planted_trials:segfaults")
    model = tiny_model("qwen3")

    class OfTheUser(type(model)):
        pass

    model.__class__ = OfTheUser
    config = RolloutConfig()
    assert qualification.qualified(model, config, None) is config


@pytest.mark.usefixtures("tried_here")
def test_a_config_of_which_no_model_can_be_made_is_no_fault(monkeypatch):
    monkeypatch.setattr(qualification, "TRIAL", "planted_trials:segfaults")
    model = tiny_model("qwen3")
    monkeypatch.setattr(qualification, "small_config", lambda model: {"model_type": "unknown"})
    config = RolloutConfig()
    assert qualification.qualified(model, config, None) is config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_model_has_a_layer_of_each_kind(family):
    model = tiny_model(family, num_hidden_layers=2)
    small = small_model(small_config(model), torch.float32, model.config._attn_implementation)
    assert type(small) is type(model)
    kinds = {type(layer) for layer in small.modules()}
    assert kinds == {type(layer) for layer in model.modules()}
    assert small(torch.tensor([[5, 6, 7]])).logits.shape[-1] == model.config.vocab_size


def test_layers_are_left_out_but_one_of_each_kind():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    model = tiny_model("qwen3", num_hidden_layers=6, layer_types=kinds)
    small = small_config(model)
    assert small["num_hidden_layers"] == 2
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert small_config(tiny_model("llama", num_hidden_layers=3))["num_hidden_layers"] == 2


def test_a_small_engine_agrees_with_its_plain_forward():
    verdict = try_engine(argument_of(tiny_model("qwen3", max_position_embeddings=1024)))
    assert verdict["fault"] == ""
    assert verdict["milliseconds"]["a step"] > 0


def test_a_fault_beyond_the_rows_of_the_model_check_is_found(monkeypatch):
    attend = CpuPagedAttention.attend

    def without_the_long_row(self, *arguments):
        outputs = attend(self, *arguments)
        outputs[self.lengths_B > 500] *= 1.1
        return outputs

    monkeypatch.setattr(CpuPagedAttention, "attend", without_the_long_row)
    verdict = try_engine(argument_of(tiny_model("qwen3", max_position_embeddings=1024)))
    assert verdict["fault"].startswith("log-probabilities are off its plain forward by")


@pytest.mark.slow
def test_a_small_engine_runs_in_a_child():
    result = run_in_child(
        qualification.TRIAL,
        argument_of(tiny_model("qwen3")),
        limit_seconds=300,
        environment={qualifier.SWITCH: "0"},
    )
    assert (result.fault, result.obstacle) == ("", "")
    assert result.answer["fault"] == ""


def test_a_device_that_cannot_be_had_is_no_fault():
    argument = argument_of(tiny_model("qwen3")) | {"device": "cuda:9"}
    with pytest.raises(engine_trial.CannotTryError, match="cuda:9 cannot be had"):
        try_engine(argument)
