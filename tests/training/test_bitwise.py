"""A stock GRPO run with numerics="bitwise": no difference at any step, and the same run twice."""

import pytest
import torch
import trl.trainer.utils
from nightly import some_slow_pairs
from peft import LoraConfig
from tiny import tiny_model
from tiny_trainer import logged, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.engine.numerics import operators

FUSED_HEAD = trl.trainer.utils._ChunkedLogProbFunction


def trained(path, **settings) -> tuple[object, dict[str, torch.Tensor]]:
    trainer = tiny_trainer(path, max_steps=2)
    attach(trainer, RolloutConfig(numerics="bitwise", old_logps="trainer", **settings))
    trainer.train()
    detach(trainer)
    return trainer, {name: p.detach() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "loss_forward", [pytest.param("trainer", marks=pytest.mark.slow), "packed"]
)
def test_sampled_logprobs_equal_the_trainers_in_every_bit(tmp_path, loss_forward):
    trainer, weights = trained(tmp_path / "first", loss_forward=loss_forward)
    assert logged(trainer, "sampling/sampling_logp_difference/max") == [0.0, 0.0]
    for name in ("min", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == [1.0, 1.0]
    assert not operators.are_installed()
    assert trl.trainer.utils._ChunkedLogProbFunction is FUSED_HEAD
    _, again = trained(tmp_path / "second", loss_forward=loss_forward)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


DIFFERENCE = "sampling/sampling_logp_difference/max"
# Not as PEFT begins, where an adapter adds nothing.
LORA = LoraConfig(
    r=2,
    target_modules=["q_proj", "down_proj"],
    task_type="CAUSAL_LM",
    lora_alpha=16,
    init_lora_weights=False,
)


def adapted() -> dict[str, object]:
    return {"trainer_arguments": {"peft_config": LORA}}


def routed() -> dict[str, object]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    return {"model": tiny_model("qwen3_moe", vocab_size=99, **experts)}


def recomputed() -> dict[str, object]:
    return {"activation_checkpointing": True}


def recomputed_reentrant() -> dict[str, object]:
    return recomputed() | {"activation_checkpointing_kwargs": {"use_reentrant": True}}


WAYS = {
    "adapters": ({}, adapted),
    "adapters and a reference": ({}, lambda: adapted() | {"beta": 0.1}),
    "autocast": ({}, lambda: {"bf16": True}),
    "bfloat16": ({}, lambda: {"model": tiny_model(vocab_size=99).bfloat16()}),
    "checkpoints": ({}, recomputed),
    "reentrant checkpoints": ({}, recomputed_reentrant),
    "experts": ({}, routed),
    "experts taken again": ({"router_replay": True}, routed),
    "a temperature": ({}, lambda: {"temperature": 0.7, "top_k": 20}),
    "masks taken again": ({"sampling_mask": "replay"}, lambda: {"top_k": 20}),
    "a copy": ({"weight_sync": "copy"}, dict),
    "accumulated": (
        {},
        lambda: {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    ),
}


# Reentrant checkpoints, for one, have the trainer's own forward.
@pytest.mark.filterwarnings("ignore:loss_forward='packed' is switched off:UserWarning")
@pytest.mark.filterwarnings("ignore:top_k=20. completions are sampled from a part:UserWarning")
@pytest.mark.parametrize(
    ("way", "loss_forward"), list(some_slow_pairs(list(WAYS), ["trainer", "packed"], every=2))
)
def test_however_it_trains_no_bit_differs_and_a_second_run_is_the_same(tmp_path, way, loss_forward):
    config, settings = WAYS[way]
    weights = []
    for run in range(2):
        torch.manual_seed(0)
        few = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4}
        trainer = tiny_trainer(tmp_path / str(run), **(few | settings()))
        bitwise = {"numerics": "bitwise", "old_logps": "trainer", "loss_forward": loss_forward}
        attach(trainer, RolloutConfig(**(bitwise | config)))
        trainer.train()
        # The operators serve every model of the process until then.
        detach(trainer)
        assert logged(trainer, DIFFERENCE) == [0.0, 0.0]
        for name in ("min", "max"):
            assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == [1.0, 1.0]
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.slow
def test_rloo_has_no_difference(tmp_path):
    classes = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
    trainer = tiny_trainer(tmp_path, max_steps=2, **classes)
    attach(trainer, RolloutConfig(numerics="bitwise", verify_every_steps=1))
    trainer.train()
    detach(trainer)
    assert set(logged(trainer, "rollout/logprob_drift_max")) == {0.0}


def test_a_copy_that_merges_an_adapter_is_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, **adapted())
    with pytest.raises(ConfigurationError, match="a copy merges the adapter"):
        attach(trainer, RolloutConfig(numerics="bitwise", weight_sync="copy"))


def test_dropout_is_refused(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigurationError, match="trains with dropout"):
        attach(trainer, RolloutConfig(numerics="bitwise"))
