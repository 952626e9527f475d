"""A GRPO trainer on a GPU that only says it is one learns what it learns on the CPU."""

import accelerate
import pytest
import torch
from fast_path import pretend_cuda
from pretend_device import DEVICE, Pretended, pretend_device
from tiny import char_tokenizer, tiny_model
from tiny_trainer import logged, tiny_trainer

import cb_rollout
from cb_rollout.engine.core import Engine
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampler
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding

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
        path = generator.manager.engine.runner.backend_selection.name
        trainer.train()
    return [*logged(trainer, "loss"), *logged(trainer, "reward")], path


@pytest.mark.parametrize("case", CASES)
def test_training_there_is_training_here(case, tmp_path, monkeypatch):
    expected, _ = trained(tmp_path / "here", *CASES[case])
    pretend_device(monkeypatch)
    # Trainers would begin to ask for streams, amp and peers.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda self: DEVICE))
    # accelerate makes a process's own device the current one, and TRL's kernels run there.
    with Pretended(), torch.cuda.device(DEVICE):
        found, path = trained(tmp_path / "there", *CASES[case])
    assert path == "triton"
    assert len(found) >= 3
    assert any(found[: len(found) // 2])
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_trainer_of_a_bfloat16_model_captures_each_graph_once(tmp_path, monkeypatch):
    """accelerate wraps the model's forward after the generator was attached."""
    pretend_cuda(monkeypatch)
    captured, probed, dtypes = [], [], set()
    add, probe, sample = GraphedDecoding.add, Engine._probe, GraphSampler.sample

    def added(self, key, block_size):
        captured.append(key)
        add(self, key, block_size)

    def sampled(self, logits_BV, lines):
        dtypes.add(logits_BV.dtype)
        sample(self, logits_BV, lines)

    monkeypatch.setattr(GraphedDecoding, "add", added)
    monkeypatch.setattr(GraphSampler, "sample", sampled)
    monkeypatch.setattr(Engine, "_probe", lambda self: probed.append(1) or probe(self))
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    trainer = tiny_trainer(
        tmp_path,
        model=tiny_model("qwen3", len(char_tokenizer()), **shape).bfloat16(),
        bf16=True,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
    )
    config = cb_rollout.RolloutConfig(seed=1)
    with cb_rollout.attach(trainer, config) as generator:
        assert generator.manager.model is trainer.model
        trainer.train()
        assert "CUDA graphs: on" in generator.manager.decode_path
    assert hasattr(trainer.model, "_original_forward")
    assert len(captured) == len(set(captured)) > 0
    assert len(probed) == 1
    assert dtypes == {torch.bfloat16}
