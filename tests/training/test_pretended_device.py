"""A GRPO trainer on a GPU that only says it is one learns what it learns on the CPU."""

import accelerate
import pytest
import torch
from pretend_device import DEVICE, Pretended, pretend_device
from tiny_trainer import logged, tiny_trainer

import cb_rollout

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a GPU"),
]

CASES = {
    "plain": ({}, {}),
    "rollout's old log-probabilities": ({"old_logps": "rollout"}, {}),
    "replayed masks": ({"sampling_mask": "replay"}, {"top_p": 0.9}),
    "weights in a copy": ({"weight_sync": "copy", "verify_weight_sync": True}, {}),
    "guarded": (
        {"old_logps": "rollout", "max_logprob_drift": 0.5, "on_logprob_drift": "recompute"},
        {"num_iterations": 2},
    ),
}


def length_modulo_three(completions, **_):
    return [float(len(completion) % 3) for completion in completions]


def trained(output_dir, settings, trl_settings):
    """Losses and rewards of two steps, and how the rollout's decode steps ran."""
    trainer = tiny_trainer(
        output_dir,
        reward=length_modulo_three,
        num_hidden_layers=1,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        **trl_settings,
    )
    device = trainer.accelerator.device
    trainer.model.to(device)
    trainer.args.__dict__["_setup_devices"] = device
    config = cb_rollout.RolloutConfig(seed=1, verify_every_steps=1, **settings)
    with cb_rollout.attach(trainer, config) as generator:
        path = generator.manager.engine._runner.backend_selection.name
        trainer.train()
    return [*logged(trainer, "loss"), *logged(trainer, "reward")], path


@pytest.mark.parametrize("case", CASES)
def test_training_there_is_training_here(case, tmp_path, monkeypatch):
    expected, _ = trained(tmp_path / "here", *CASES[case])
    pretend_device(monkeypatch)
    # Trainers would begin to ask for streams, amp and peers.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda self: DEVICE))
    with Pretended():
        found, path = trained(tmp_path / "there", *CASES[case])
    assert path == "triton"
    assert len(found) >= 3
    assert any(found[: len(found) // 2])
    assert found == pytest.approx(expected, abs=1e-5)
