"""The measurement of compile settings goes on after a setting that fails."""

import re

import pytest
from tiny import tiny_model

from cb_rollout.config.compilation import CompileSettings
from measure import compiled as measure_compiled


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(measure_compiled, "COMPLETION_TOKENS", 8)
    monkeypatch.setattr(measure_compiled, "PROMPT_TOKENS", (6, 9))
    return tiny_model("qwen3", 256, num_hidden_layers=1)


def failing(module, inputs):
    raise NotImplementedError("no such instruction")


def lines_of(model, monkeypatch, **settings):
    monkeypatch.setattr(measure_compiled, "SETTINGS", settings)
    return list(measure_compiled.lines(model, list(settings), 1))


def test_a_setting_that_fails_prints_its_reason_and_the_others_run(model, monkeypatch):
    refused = {"varlen_compile_config": {"backend": failing, "mode": None}}
    unknown = {"default_compile_level": 9}
    lines = lines_of(model, monkeypatch, refused=refused, unknown=unknown, plain={})
    assert lines[0].startswith("refused: failed, CompilationFailedError: varlen_compile_config: ")
    assert "no such instruction" in lines[0]
    assert lines[1].startswith("unknown: failed, ConfigurationError: default_compile_level")
    assert lines[2].startswith("plain: ")
    # The first that runs is what ratios are to.
    assert lines[2].count("(1.00)") == 2
    assert not any("\n" in line for line in lines)


def test_a_path_that_was_given_up_is_named_beside_its_speed(model, monkeypatch):
    settings = CompileSettings(backend=failing, source="a default", raises_failure=False)
    (line,) = lines_of(model, monkeypatch, by_default={"varlen_compile_config": settings})
    assert re.fullmatch(r"by_default: .*; prefill: packed, not compiled .*no such inst.*", line)
