"""What top-p, top-k and min-p cut away is told, measured, or replayed in the loss."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from playback import TOOLS, double, watched, with_tools
from tiny_trainer import PROBLEMS, logged, tiny_trainer
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach

QUICK = {"per_device_train_batch_size": 16, "num_generations": 8, "optim": "sgd"}
SEQUENCES = {"vllm_importance_sampling_mode": "sequence_truncate"}
RATIO = "sampling/importance_sampling_ratio/mean"


def trained(output_dir, config, **settings):
    trainer = tiny_trainer(output_dir, **(QUICK | settings))
    generator = attach(trainer, RolloutConfig(**config))
    record = watched(trainer)
    trainer.train()
    generator.close()
    return trainer, record


def test_the_true_ratios_are_far_from_one_and_a_warning_says_how_far(tmp_path):
    with pytest.warns(
        UserWarning, match=r"top_p=0\.8: .*at least 0\.8 of each .*, e\*\*-3 over 12"
    ):
        trainer, _ = trained(tmp_path, {"logprobs_mode": "processed"}, top_p=0.8, **SEQUENCES)
    assert max(logged(trainer, RATIO)) < 0.5
    masses = logged(trainer, "rollout/log_kept_mass")
    assert all(math.log(0.8) <= mass < 0 for mass in masses)
    assert min(logged(trainer, "rollout/kept_tokens")) > 1
    assert not logged(trainer, "rollout/logprob_drift_max")  # two distributions, nothing to compare


def test_policy_log_probabilities_hide_what_was_cut_and_a_warning_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"top_k=20: .*nothing corrects the difference"):
        trainer, _ = trained(tmp_path, {}, top_k=20, **SEQUENCES)
    assert logged(trainer, RATIO) == pytest.approx([1] * 3, abs=1e-4)


@pytest.mark.fast_cases("top_p")
@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1, "temperature": 0.7}],
    ids=["top_p", "top_k", "min_p"],
)
def test_replayed_the_ratios_are_one(tmp_path, truncation):
    config = {"sampling_mask": "replay", "old_logps": "trainer", "verify_every_steps": 1}
    trainer, _ = trained(tmp_path, config, **truncation, **SEQUENCES)
    assert logged(trainer, RATIO) == pytest.approx([1] * 3, abs=1e-4)
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5


def test_the_kept_sets_are_those_of_the_sampling_when_the_weights_have_moved(tmp_path):
    settings = {"num_iterations": 4, "max_steps": 4, "learning_rate": 0.5, "top_p": 0.8}
    trainer, record = trained(tmp_path, {"sampling_mask": "replay"}, **settings)
    assert len(record.turns) == 1
    assert all(map(math.isfinite, record.losses))
    # The first pass is on policy; later ones moved, within the same sets.
    assert record.losses[0] != record.losses[3]
    assert all(torch.isfinite(g).all() for grads in record.gradients for g in grads.values())
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("trainer_class", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_replay_and_sampled_old_log_probabilities_go_together(tmp_path, trainer_class):
    classes = {}
    if trainer_class == "rloo":
        classes = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
    settings = {"steps_per_generation": 2, "max_steps": 2, "top_p": 0.8} | classes
    replay = {"sampling_mask": "replay", "verify_every_steps": 0}
    _, ours = trained(tmp_path / "a", replay | {"old_logps": "rollout"}, **settings)
    _, theirs = trained(tmp_path / "b", replay, **settings)
    assert ours.turns == theirs.turns
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_adapters_and_their_reference_are_replayed(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    settings = {"beta": 0.1, "top_p": 0.8, "trainer_arguments": {"peft_config": lora}}
    config = {"sampling_mask": "replay", "old_logps": "rollout", "verify_every_steps": 1}
    trainer, _ = trained(tmp_path, config, **settings)
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    # A fresh adapter changes nothing, so policy and reference agree over the same sets.
    assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)
    # Of a nucleus, not of all 99 tokens.
    assert max(logged(trainer, "entropy")) < 0.95 * math.log(99)


@pytest.mark.slow
def test_each_turn_of_a_tool_loop_is_replayed_with_its_own_sets(tmp_path, monkeypatch):
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS[:8]]
    trainer = tiny_trainer(
        tmp_path,
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"train_dataset": Dataset.from_list(rows), "tools": [double]},
        **(QUICK | TOOLS | {"max_steps": 2, "top_k": 20}),
    )
    generator = attach(
        trainer, RolloutConfig(sampling_mask="replay", old_logps="trainer", verify_every_steps=1)
    )
    record = watched(trainer)
    trainer.train()
    generator.close()
    assert len(record.turns) > 2
    assert logged(trainer, RATIO) == pytest.approx([1] * 2, abs=1e-4)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5


def test_penalties_cannot_be_replayed(tmp_path):
    trainer = tiny_trainer(tmp_path, top_p=0.8, repetition_penalty=1.1)
    with pytest.raises(ConfigurationError, match=r"not penalties.*repetition_penalty"):
        attach(trainer, RolloutConfig(sampling_mask="replay"))


def test_completions_of_somebody_else_cannot_be_replayed(tmp_path):
    def other(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[0.0] * len(i) for i in ids]}

    trainer = tiny_trainer(tmp_path, top_p=0.8, trainer_arguments={"rollout_func": other})
    generator = attach(trainer, RolloutConfig(sampling_mask="replay"))
    with pytest.raises(ConfigurationError, match="make_rollout_func"):
        trainer.train()
    generator.close()


def test_settings_that_change_logits_are_warned_of_by_both_names(tmp_path):
    given = {"suppress_tokens": [7], "min_new_tokens": 2, "bad_words_ids": [[5, 6]]}
    trainer = tiny_trainer(tmp_path, repetition_penalty=1.1, generation_kwargs=given)
    with pytest.warns(UserWarning, match="completions are sampled from changed logits") as caught:
        attach(trainer).close()
    said = str(caught[0].message)
    assert said.startswith("repetition_penalty, logit_bias (suppress_tokens, sequence_bias of ")
    assert "bad_words (bad_words_ids), min_new_tokens: " in said
    assert "nothing corrects the difference" in said
    assert caught[0].filename == __file__


def test_the_image_token_that_the_trainer_itself_forbids_is_not_warned_of(tmp_path):
    trainer = tiny_trainer(tmp_path, generation_kwargs={"suppress_tokens": [7]})
    trainer.model.config.image_token_id = 7
    attach(trainer).close()


def test_a_temperature_that_the_loss_does_not_know_is_warned_of(tmp_path):
    trainer = tiny_trainer(tmp_path, generation_kwargs={"temperature": 0.5})
    with pytest.warns(UserWarning, match=r"temperature=0\.5 .*, but the loss divides logits by 1"):
        attach(trainer).close()


def test_a_temperature_that_was_changed_before_attach_is_warned_of(tmp_path):
    """TRL fixes the loss's when the trainer is made."""
    trainer = tiny_trainer(tmp_path)
    trainer.temperature = trainer.generation_config.temperature = 0.5
    with pytest.warns(UserWarning, match=r"temperature=0\.5 .*, but the loss divides logits by 1"):
        attach(trainer).close()


def test_another_trainer_of_the_model_that_changes_the_losss_temperature_is_warned_of(tmp_path):
    trainer = tiny_trainer(tmp_path / "first", max_steps=2)
    with attach(trainer, RolloutConfig(old_logps="rollout")):
        tiny_trainer(tmp_path / "second", model=trainer.model, temperature=0.5)
        with pytest.warns(UserWarning, match=r"=1 is used .*, but the loss divides logits by 0\.5"):
            trainer.train()


class Anneals(TrainerCallback):
    """Sets another temperature on the trainer after its first step."""

    def __init__(self, trainer):
        self._trainer = trainer

    def on_step_end(self, args, state, control, **_):
        self._trainer.temperature = self._trainer.generation_config.temperature = 0.5


@pytest.mark.filterwarnings("ignore:temperature=0.5 is used")
def test_old_logprobs_are_recomputed_once_the_temperature_is_not_the_losss(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=4, num_iterations=2, steps_per_generation=1)
    trainer.add_callback(Anneals(trainer))
    recomputed = []
    with attach(trainer, RolloutConfig(old_logps="auto", verify_every_steps=1000)):
        score = trainer._generate_and_score_completions

        def scored(inputs):
            batch = score(inputs)
            mask = batch["completion_mask"].bool()
            distance = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
            recomputed.append(distance[mask].abs().max().item())
            return batch

        trainer._generate_and_score_completions = scored
        with pytest.warns(
            UserWarning, match=r"temperature=0\.5 .*, but the loss divides logits by 1"
        ):
            trainer.train()
    assert recomputed[0] <= 1e-5
    assert max(recomputed[1:]) > 0.01
