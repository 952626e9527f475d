"""Dynamic sampling in the batches of a stock trainer."""

import pytest
from tiny_trainer import tiny_trainer

import cb_rollout
from cb_rollout import ConfigurationError, RolloutConfig
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import DynamicSampling, Plain


def often_equal(prompts, completions, **_):
    """No advantage where the first summand is even."""
    return [
        len(completion) % 7 + completion.count("7") if int(prompt[0]) % 2 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def watched(trainer):
    """The trainer's batches, as its loss gets them."""
    batches, inner = [], trainer._generate_and_score_completions

    def generate_and_score(inputs):
        batches.append(inner(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = generate_and_score
    return batches


def test_a_batch_holds_only_groups_with_an_advantage_and_their_own_tokens(tmp_path):
    trainer = tiny_trainer(tmp_path, reward=often_equal, max_steps=2)
    sampled = {}
    with cb_rollout.attach(trainer, RolloutConfig()) as generator:
        generate_batch = generator.generate_batch

        def generate_and_keep(*args, **kwargs):
            outputs = generate_batch(*args, **kwargs)
            for output in outputs.values():
                key = (*output.prompt_ids, -1, *output.generated_tokens)
                sampled[key] = output.logprobs
            return outputs

        generator.generate_batch = generate_and_keep
        use_strategy(trainer, DynamicSampling())
        batches = watched(trainer)
        trainer.train()
    assert len(batches) == 2
    for batch in batches:
        groups = batch["advantages"].view(-1, 8)
        assert groups.shape[0] == 2
        assert (groups != 0).any(1).all()
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
        for row in range(16):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            mask = batch["completion_mask"][row].bool()
            key = (*prompt, -1, *batch["completion_ids"][row][mask].tolist())
            logprobs = batch["sampling_per_token_logps"][row][mask].tolist()
            assert logprobs == pytest.approx(sampled[key])
            old = batch["old_per_token_logps"][row][mask].tolist()
            assert old == pytest.approx(logprobs, abs=1e-5)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert sum(log["rollout/groups_dropped"] for log in logs) > 0


def test_at_its_bound_a_batch_keeps_groups_as_they_come(tmp_path):
    trainer = tiny_trainer(tmp_path, reward=lambda completions, **_: [1.0] * len(completions))
    with cb_rollout.attach(trainer, RolloutConfig()):
        use_strategy(trainer, DynamicSampling(max_dropped_groups=3))
        batches = watched(trainer)
        trainer.args.max_steps = 1
        trainer.train()
    assert batches[0]["advantages"].shape == (16,)
    assert not batches[0]["advantages"].any()
    assert trainer.state.log_history[0]["rollout/groups_dropped"] == 3


def test_settings_that_mix_groups_are_refused_and_plain_changes_nothing(tmp_path):
    trainer = tiny_trainer(tmp_path, scale_rewards="batch")
    with pytest.raises(ConfigurationError, match="scale_rewards='batch', which mixes groups"):
        use_strategy(trainer, DynamicSampling())
    before = trainer._generate_and_score_completions
    use_strategy(trainer, Plain())
    assert trainer._generate_and_score_completions == before
