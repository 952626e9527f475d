"""A trainer with `torch_compile=True` trains compiled, and its rollouts compile prefill."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import plain_logprobs
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.integrations.trl.backend import training_run
from cb_rollout.rollout import sampler
from cb_rollout.rollout.sampler import (
    STEPS_WORTH_COMPILING,
    TrainingRun,
    with_trainers_compilation,
    with_worthwhile_compilation,
)

# A trainer that compiles keeps its own forward, which a warning says where it was not asked for.
OWN_LOSS = RolloutConfig(loss_forward="trainer")


@pytest.fixture
def compiles(monkeypatch):
    """The arguments of a trainer that compiles, without C++."""
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        # transformers sets them, for good.
        monkeypatch.setenv(name, "no")
    return {"torch_compile": True, "torch_compile_backend": "eager", "num_hidden_layers": 1}


def test_a_rollout_compiles_prefill_as_its_trainer_compiles(tmp_path, compiles):
    trainer = tiny_trainer(tmp_path, **compiles)
    generator = attach(trainer, OWN_LOSS)
    settings = generator.manager.config.varlen_compile_config
    assert (settings.backend, settings.dynamic) == ("eager", True)
    assert generator.manager.config.decode_compile_config is None
    prompts = [[5, 6, 7], [8] * 9]
    outputs = generator.generate_batch(prompts, max_new_tokens=4).values()
    assert "compiled" in generator.manager.engine.paged_model.paths[0].text
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = plain_logprobs(unwrap(trainer.model), prompt, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
    generator.close()


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"varlen_compile_config": {"backend": "aot_eager"}}, "varlen_compile_config"),
        ({"default_compile_level": 2}, "default_compile_level=2"),
    ],
)
def test_what_the_config_says_comes_before_what_the_trainer_does(
    tmp_path, compiles, settings, source
):
    with attach(tiny_trainer(tmp_path, **compiles), replace(OWN_LOSS, **settings)) as generator:
        assert generator.manager.config.varlen_compile_config.source == source


def test_bitwise_numerics_leave_prefill_as_it_is(tmp_path, compiles):
    trainer = tiny_trainer(tmp_path, **compiles)
    config = as_trainers_config(replace(OWN_LOSS, numerics="bitwise"), 3)
    assert with_trainers_compilation(config, training_run(trainer)) == config


def run_of(num_steps, device="cuda"):
    return TrainingRun(
        model=None,
        tokenizer=None,
        generation_config=None,
        accelerator=SimpleNamespace(device=torch.device(device)),
        seed=0,
        num_steps=num_steps,
    )


def test_on_a_gpu_a_training_that_is_too_short_to_repay_it_compiles_no_decode_steps(caplog):
    caplog.set_level(logging.INFO, "cb_rollout")
    chosen = with_worthwhile_compilation(RolloutConfig(), run_of(STEPS_WORTH_COMPILING - 1))
    assert chosen == RolloutConfig(use_default_compile_configs=False)
    assert "at most 19999 of them, and compiling pays off after about 20000" in caplog.text


@pytest.mark.parametrize(
    ("settings", "run"),
    [
        ({}, run_of(STEPS_WORTH_COMPILING)),
        ({}, run_of(None)),
        ({}, run_of(1, "cpu")),
        ({"use_default_compile_configs": True}, run_of(1)),
        ({"default_compile_level": 2}, run_of(1)),
    ],
    ids=["long", "unknown", "cpu", "asked for", "a level"],
)
def test_a_long_training_and_the_users_settings_decide_otherwise(settings, run, caplog):
    caplog.set_level(logging.INFO, "cb_rollout")
    config = RolloutConfig(**settings)
    assert with_worthwhile_compilation(config, run) == config
    assert not caplog.text


def test_the_decode_steps_of_a_training_are_its_steps_times_the_longest_completion(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=3)
    assert training_run(trainer).num_steps == 3 * trainer.args.max_completion_length
    trainer.args.max_steps = -1
    assert training_run(trainer).num_steps is None


def test_attach_compiles_as_the_length_of_the_training_says(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "COMPILED_DEVICES", {"cpu"})
    with attach(tiny_trainer(tmp_path, max_steps=3), RolloutConfig()) as generator:
        assert generator.manager.config.use_default_compile_configs is False


# dynamo looks at what TRL 1.16 passes on, and instantiates a function of it (torch 2.13).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_trainer_trains_on_compiled_prefills(tmp_path, compiles):
    trainer = tiny_trainer(tmp_path, max_steps=2, **compiles)
    generator = attach(trainer, replace(OWN_LOSS, verify_every_steps=1))
    before = [parameter.detach().clone() for parameter in unwrap(trainer.model).parameters()]
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    after = unwrap(trainer.model).parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert generator.manager.engine.runner.compiled_prefill.graph is not None
    generator.close()
