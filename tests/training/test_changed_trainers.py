"""What a trainer, its class or a reward function changes after `attach` is followed."""

import functools

import pytest
import torch
from tiny_trainer import logged, share_of_sevens, tiny_trainer
from transformers import TrainerCallback
from trl import GRPOTrainer

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    SamplingParams,
    SavedRollouts,
    attach,
    detach,
    make_rollout_func,
)
from cb_rollout.integrations.trl import use_strategy
from cb_rollout.strategies import DynamicSampling

RATIO = "sampling/importance_sampling_ratio"


def completions_of(trainer):
    """Note the completions of each rollout."""
    rollouts = []
    generate = trainer.vllm_generation.generate

    def noted(*arguments, **named):
        generated = generate(*arguments, **named)
        rollouts.append(generated[1])
        return generated

    trainer.vllm_generation.generate = noted
    return rollouts


class Anneals(TrainerCallback):
    """Makes decoding next to greedy after the first step, and completions longer."""

    trainer = None

    def on_step_end(self, *_, **__):
        self.trainer.generation_config.temperature = 0.01
        self.trainer.generation_config.max_new_tokens = 20


@pytest.mark.filterwarnings("ignore:temperature=.* is used:UserWarning")
def test_a_generation_config_that_a_callback_changes_is_followed(tmp_path):
    callback = Anneals()
    trainer = callback.trainer = tiny_trainer(tmp_path, trainer_arguments={"callbacks": [callback]})
    with attach(trainer, RolloutConfig(seed=0)):
        rollouts = completions_of(trainer)
        trainer.train()
    first, second, _ = rollouts
    assert len(set(map(tuple, first))) > 8
    assert len(set(map(tuple, second))) <= 4
    assert max(map(len, first)) == 12
    assert max(map(len, second)) == 20


def test_an_evaluation_that_decodes_greedily_does_so(tmp_path):
    class Greedy(GRPOTrainer):
        def evaluate(self, *arguments, **named):
            self.generation_config.do_sample = False
            try:
                return super().evaluate(*arguments, **named)
            finally:
                self.generation_config.do_sample = True

    trainer = tiny_trainer(tmp_path, trainer_class=Greedy, max_steps=2)
    with attach(trainer, RolloutConfig(seed=0)):
        rollouts = completions_of(trainer)
        trainer.evaluate()
        num_prompts = len({*map(tuple, rollouts[0])})
        assert num_prompts <= 2
        rollouts.clear()
        trainer.train()
        assert len(set(map(tuple, rollouts[0]))) > 8


@pytest.mark.filterwarnings("ignore:old_logps='auto'. sampled log-probabilities differ:UserWarning")
def test_saved_rollouts_of_a_policy_that_learned_otherwise_keep_their_ratio(tmp_path):
    folder = str(tmp_path / "rollouts")
    first = tiny_trainer(tmp_path, learning_rate=1e-4)
    attach(first, RolloutConfig(seed=0, save_rollouts=folder))
    first.train()
    detach(first)
    second = tiny_trainer(tmp_path, learning_rate=3e-1)
    attach(second, SavedRollouts(folder))
    second.train()
    detach(second)
    assert logged(second, f"{RATIO}/mean")[0] == pytest.approx(1, abs=1e-4)
    assert all(abs(ratio - 1) > 1e-2 for ratio in logged(second, f"{RATIO}/min")[1:])


@pytest.mark.parametrize("old_logps", ["auto", pytest.param("trainer", marks=pytest.mark.slow)])
def test_old_log_probabilities_of_a_trainer_class_stay_in_the_batch(tmp_path, old_logps):
    batches = []

    class Old(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"] - 0.15
            return batch

        def compute_loss(self, model, inputs, *rest, **named):
            batches.append(inputs)
            return super().compute_loss(model, inputs, *rest, **named)

    trainer = tiny_trainer(tmp_path, trainer_class=Old)
    with attach(trainer, RolloutConfig(seed=0, old_logps=old_logps)):
        trainer.train()
    assert len(batches) == 3
    for batch in batches:
        distance = batch["sampling_per_token_logps"] - batch["old_per_token_logps"]
        assert distance.mean() == pytest.approx(0.15, abs=1e-4)


def test_a_loss_that_a_function_wraps_gets_the_rows_without_an_advantage(tmp_path):
    """Here it trains on all rows alike, so rows without an advantage have a gradient."""
    seen = []
    trainer = tiny_trainer(tmp_path, reward=lambda completions, **_: [1.0] * len(completions))
    own = trainer._compute_loss

    @functools.wraps(own)
    def all_rows(model, inputs):
        inputs = dict(inputs, advantages=torch.ones_like(inputs["advantages"]))
        return own(model, inputs)

    trainer._compute_loss = all_rows
    with attach(trainer, RolloutConfig(seed=0)):
        trainer.train()
    seen = logged(trainer, "grad_norm")
    assert len(seen) == 3
    assert min(seen) > 0
    assert logged(trainer, "rollout/rows_left_out") == [0, 0, 0]


def test_dynamic_sampling_refuses_a_class_whose_rows_need_not_stand_in_groups(tmp_path):
    class Sorted(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions(inputs)

    trainer = tiny_trainer(tmp_path, trainer_class=Sorted)
    refused = pytest.raises(ConfigurationError, match=r"Sorted\._generate_and_score_completions")
    with attach(trainer, RolloutConfig(seed=0)), refused:
        use_strategy(trainer, DynamicSampling())


@pytest.mark.filterwarnings("ignore:old_logps='auto'. sampled log-prob:UserWarning")
@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(temperature=0.3), "another policy"),
        (SamplingParams(top_k=5), "from a part of the distribution"),
        (SamplingParams(repetition_penalty=1.5), "from changed logits"),
    ],
)
def test_sampling_parameters_of_a_rollout_func_are_checked(tmp_path, params, words):
    arguments = {"rollout_func": make_rollout_func(params)}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, max_steps=1)
    with attach(trainer, RolloutConfig(seed=0)), pytest.warns(UserWarning, match=words):
        trainer.train()


def test_replayed_masks_refuse_penalties_of_a_rollout_func(tmp_path):
    arguments = {"rollout_func": make_rollout_func(SamplingParams(repetition_penalty=1.5))}
    trainer = tiny_trainer(tmp_path, trainer_arguments=arguments, max_steps=1)
    refused = pytest.raises(ConfigurationError, match="sampling_mask='replay'")
    with attach(trainer, RolloutConfig(seed=0, sampling_mask="replay")), refused:
        trainer.train()


def test_a_reward_function_may_write_into_the_lists_that_it_gets(tmp_path):
    def pops(completions, completion_ids, **_):
        for ids in completion_ids:
            ids.pop()
        return share_of_sevens(completions)

    folder = str(tmp_path / "rollouts")
    trainer = tiny_trainer(tmp_path, reward=pops)
    attach(trainer, RolloutConfig(seed=0, save_rollouts=folder))
    trainer.train()
    detach(trainer)
    second = tiny_trainer(tmp_path)
    attach(second, SavedRollouts(folder))
    second.train()
    detach(second)
    assert len(logged(second, "loss")) == 3
