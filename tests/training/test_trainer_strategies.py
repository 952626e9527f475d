"""Strategies in the batches of a stock trainer: before its scores, and after them."""

from dataclasses import dataclass

import pytest
from datasets import Dataset
from playback import TOOLS, double, with_tools
from tiny import plain_logprobs, tiny_model
from tiny_trainer import PROBLEMS, tiny_trainer
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import TrainerStrategy, use_strategy
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts, Plain, Retrying

ANSWERED = [row | {"answer": sum(map(int, row["prompt"][:-1].split("+")))} for row in PROBLEMS]
# Lengths from 1 to 30 tokens.
UNEVEN = {
    "generation_kwargs": {"eos_token_id": list(range(1, 9))},
    "max_completion_length": 30,
    "trainer_arguments": {
        "train_dataset": Dataset.from_list(ANSWERED),
        "eval_dataset": Dataset.from_list(ANSWERED[:4]),
    },
}

VERIFIED = {"verify_every_steps": 1, "verify_num_sequences": 16, "max_logprob_drift": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Dapo(DynamicSampling, PartialRollouts):
    name = "dapo"


class Choosy(DynamicSampling):
    def keeps(self, group):
        return group.num_tokens > 8


def by_length(prompts, completions, answer, **_):
    """Checks that a row came with its own columns."""
    for prompt, right in zip(prompts, answer, strict=True):
        assert sum(map(int, prompt[:-1].split("+"))) == right
    return [float(len(completion)) for completion in completions]


def groups_of(trainer):
    """What a trainer's strategy samples ahead; None: it has no strategy that does."""
    parts = trainer.vllm_generation.parts
    return next((part.groups for part in parts if isinstance(part, TrainerStrategy)), None)


def trained(output_dir, strategy, config=None, **settings):
    """A trained trainer, its batches with their outputs, each policy, and the collector."""
    trainer = tiny_trainer(output_dir, **({"reward": by_length} | UNEVEN | settings))
    generator = attach(trainer, RolloutConfig(**(VERIFIED | (config or {}))))
    policies, sync = {}, generator.sync_weights

    def sync_and_keep(*arguments):
        report = sync(*arguments)
        # A copy of the trainer's module would still run the original's forward.
        policy = tiny_model(vocab_size=99)
        policy.load_state_dict(trainer.model.state_dict())
        policies[report.policy_version] = policy
        return report

    generator.sync_weights = sync_and_keep
    score, batches = trainer._generate_and_score_completions, []

    def score_and_keep(inputs):
        batch = score(inputs)
        if trainer.model.training:
            batches.append((batch, list(trainer.vllm_generation.context.outputs)))
        return batch

    trainer._generate_and_score_completions = score_and_keep
    use_strategy(trainer, strategy)
    groups = groups_of(trainer)
    trainer.train()
    assert trainer.model.training or trainer.args.eval_strategy != "no"
    assert not generator.manager.loop.is_live()
    assert generator.manager.engine.status().kv_bytes == 0
    detach(trainer)
    return trainer, batches, policies, groups


def assert_each_token_is_its_own_policys(batches, policies):
    for batch, outputs in batches:
        assert len(batch["advantages"]) == len(outputs) == 16
        for row, output in enumerate(outputs):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
            mask = batch["completion_mask"][row].bool()
            tokens = batch["completion_ids"][row][mask].tolist()
            assert (prompt, tokens) == (output.prompt_ids, output.generated_tokens)
            logprobs = batch["sampling_per_token_logps"][row][mask].tolist()
            start = 0
            for version, count in output.policy_versions:
                expected = plain_logprobs(policies[version], prompt, tokens)[start : start + count]
                assert logprobs[start : start + count] == pytest.approx(expected, abs=1e-5)
                start += count
            assert start == len(tokens)
    names = [output.request_id for _, outputs in batches for output in outputs]
    assert len(set(names)) == len(names)


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.fast_cases("strategy1")
@pytest.mark.parametrize(
    "strategy",
    [OverSampling(num_extra_groups=3), OverSampling(num_extra_groups=0, num_extra_members=4)],
)
def test_over_sampling_keeps_what_is_complete_first_and_counts_the_rest(tmp_path, strategy):
    trainer, batches, policies, groups = trained(tmp_path, strategy)
    assert len(batches) == 3
    assert_each_token_is_its_own_policys(batches, policies)
    for number, (_, outputs) in enumerate(batches, 1):
        assert {version for o in outputs for version, _ in o.policy_versions} == {number}
    stats, num_extra = groups.stats, 24 if strategy.num_extra_groups else 8
    assert stats.submitted == 3 * (16 + num_extra)
    assert (stats.kept, stats.cancelled) == (3 * 16, 3 * num_extra)
    assert groups.num_in_flight == 0
    assert logged(trainer, "rollout/policy_version") == [1, 2, 3]
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-5
    assert sum(logged(trainer, "rollout/tokens_discarded")) == stats.tokens_discarded


@pytest.mark.parametrize("old_logps", ["auto", pytest.param("rollout", marks=pytest.mark.slow)])
def test_partial_rollouts_carry_tokens_with_the_versions_they_were_sampled_under(
    tmp_path, old_logps
):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
    trainer, batches, policies, groups = trained(
        tmp_path,
        PartialRollouts(num_extra_groups=3, max_staleness=3),
        {"old_logps": old_logps},
        vllm_importance_sampling_mode="token_truncate",
        **evaluated,
    )
    assert len(batches) == 6
    assert_each_token_is_its_own_policys(batches, policies)
    spanning = [o for _, outputs in batches for o in outputs if len(o.policy_versions) > 1]
    assert spanning
    stats = groups.stats
    assert stats.kept == 6 * 16
    assert stats.submitted == stats.kept + stats.cancelled
    assert stats.dropped == stats.failed == groups.num_in_flight == 0
    assert logged(trainer, "rollout/groups_carried") == [3] * 6
    assert 1 <= max(logged(trainer, "rollout/staleness_max")) <= 3
    # Of the tokens that the trainer's own policy sampled.
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    for version, (batch, outputs) in enumerate(batches, 1):
        for row, output in enumerate(outputs):
            mask = batch["completion_mask"][row].bool()
            old = batch["old_per_token_logps"][row][mask].tolist()
            expected = output.logprobs
            if old_logps == "auto":
                # Tokens of older policies make the trainer recompute them.
                prompt, tokens = output.prompt_ids, output.generated_tokens
                expected = plain_logprobs(policies[version], prompt, tokens)
            assert old == pytest.approx(expected, abs=1e-5)


@pytest.mark.fast_cases("strategy1-config1")
@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        (OverSampling(num_extra_groups=3), {}),
        (Dapo(num_extra_groups=2, max_dropped_groups=9), {"old_logps": "rollout"}),
    ],
)
def test_rloo_takes_strategies_too(tmp_path, strategy, config):
    classes = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
    trainer = tiny_trainer(tmp_path, reward=by_length, **(UNEVEN | classes))
    attach(trainer, RolloutConfig(**(VERIFIED | config)))
    use_strategy(trainer, strategy)
    batches = kept_batches(trainer)
    groups = groups_of(trainer)
    trainer.train()
    assert len(batches) == 3
    for batch in batches:
        assert len(batch["advantages"]) == 16
        assert all(batch["advantages"][n : n + 8].any() for n in (0, 8))
    assert groups.stats.submitted == groups.stats.kept + groups.stats.cancelled > 3 * 16
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    detach(trainer)


def test_what_is_carried_stands_still_whatever_else_is_generated(tmp_path):
    trainer = tiny_trainer(tmp_path, **({"reward": by_length} | UNEVEN))
    generator = attach(trainer, RolloutConfig(release_cache="never"))
    use_strategy(trainer, PartialRollouts(num_extra_groups=3))
    compute_loss, seen = trainer.compute_loss, []

    def compute_loss_beside(model, inputs, *rest, **named):
        generator.generate_batch([[5, 6, 7]], max_new_tokens=1)
        loss = compute_loss(model, inputs, *rest, **named)
        seen.append((generator.is_asleep, generator.manager.loop.is_live(), model.training))
        return loss

    trainer.compute_loss = compute_loss_beside
    trainer.train()
    assert [(is_asleep, is_training) for is_asleep, _, is_training in seen] == [(True, True)] * 3
    # Extra groups may all end in time: then nothing is carried into that step.
    assert any(is_live for _, is_live, _ in seen)
    detach(trainer)


@pytest.mark.slow
def test_strategies_are_combined_and_replay_goes_with_them(tmp_path):
    num_scored = []

    def often_equal(prompts, completions, **_):
        num_scored.append(len(prompts))
        return [
            float(len(completion)) if int(prompt[0]) % 2 else 1.0
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    trainer, _, _, groups = trained(
        tmp_path,
        Dapo(num_extra_groups=2, max_dropped_groups=9),
        {"sampling_mask": "replay", "old_logps": "rollout"},
        reward=often_equal,
        top_p=0.9,
    )
    assert sum(logged(trainer, "rollout/groups_dropped")) > 0
    # What the trainer scored, of which some was dropped afterwards.
    assert groups.stats.kept == sum(num_scored) > 3 * 16
    assert groups.stats.submitted == groups.stats.kept + groups.stats.cancelled
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5


class Annealing(TrainerCallback):
    """Shortens and cools a trainer's sampling at each step, and samples otherwise to evaluate."""

    def __init__(self, trainer):
        self.config, self.trainer = trainer.generation_config, trainer

    def on_step_end(self, args, state, control, **_):
        self.config.update(temperature=0.25, max_new_tokens=2)
        self.trainer.evaluate()
        step = state.global_step
        self.config.update(temperature=1 - step / 8, max_new_tokens=12 - 2 * step)


@pytest.mark.filterwarnings("ignore:temperature=.* is used")
@pytest.mark.parametrize(
    "strategy",
    [None, OverSampling(num_extra_groups=1), OverSampling(num_extra_members=2), DynamicSampling()],
    ids=["none", "more groups", "more members", "dynamic"],
)
def test_groups_are_sampled_by_the_generation_config_of_their_step(tmp_path, strategy):
    trainer = tiny_trainer(tmp_path)
    with attach(trainer, RolloutConfig(verify_every_steps=0)):
        if strategy is not None:
            use_strategy(trainer, strategy)
        backend = trainer.vllm_generation
        sample, found = backend.sample, []

        def sampled(*arguments):
            outputs = sample(*arguments)
            if trainer.model.training:
                longest = max(len(output.generated_tokens) for output in outputs)
                temperatures = {output.temperature for output in outputs}
                found.append((backend.context.step, temperatures, longest))
            return outputs

        backend.sample = sampled
        trainer.add_callback(Annealing(trainer))
        trainer.train()
    expected = [(1, {1.0}, 12), (2, {0.875}, 10), (3, {0.75}, 8)]
    assert sorted(dict.fromkeys(step for step, *_ in found)) == [1, 2, 3]
    assert all(entry in expected for entry in found), found


def test_detach_and_plain_take_a_strategy_away(tmp_path):
    trainer = tiny_trainer(tmp_path, **({"reward": by_length} | UNEVEN))
    own = dict(vars(trainer))
    with pytest.raises(ConfigurationError, match=r"use_strategy: .* call cb_rollout\.attach"):
        use_strategy(trainer, DynamicSampling())
    generator = attach(trainer)
    scoring = trainer._generate_and_score_completions
    use_strategy(trainer, OverSampling())
    use_strategy(trainer, PartialRollouts())
    use_strategy(trainer, Plain())
    assert trainer._generate_and_score_completions == scoring
    assert groups_of(trainer) is None
    use_strategy(trainer, PartialRollouts(num_extra_groups=3))
    groups = groups_of(trainer)
    inputs = [dict(row) for row in ANSWERED[:2] for _ in range(8)]
    trainer.model.train()
    trainer._generate_and_score_completions(inputs)
    assert groups.num_in_flight == 24
    detach(trainer)
    assert groups.num_in_flight == 0
    assert not generator.manager.is_running()
    assert vars(trainer).keys() - own.keys() == set()
    assert "_generate_and_score_completions" not in vars(trainer)


def other_completions(prompts, trainer):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("strategy", "settings", "said"),
    [
        (Retrying(), {}, "scores them itself, so none can be retried"),
        (Choosy(), {}, r"Choosy\.keeps\(\) under GRPOTrainer"),
        (Dapo(), {"scale_rewards": "batch"}, "scale_rewards='batch', which mixes groups"),
        (
            OverSampling(),
            {"trainer_arguments": {"rollout_func": other_completions}},
            "OverSampling does not work with rollout_func, which samples for itself",
        ),
        (
            PartialRollouts(),
            {"vllm_importance_sampling_correction": False},
            "the loss would treat them as the current policy's; set that",
        ),
        (
            PartialRollouts(),
            {"trainer_class": RLOOTrainer, "config_class": RLOOConfig},
            r"as the current policy's; set that \(RLOO has no such setting\), or old_logps=",
        ),
        (
            DynamicSampling(),
            {
                "trainer_class": RLOOTrainer,
                "config_class": RLOOConfig,
                "normalize_advantages": True,
            },
            "normalize_advantages=True, which mixes groups",
        ),
    ],
)
def test_what_has_no_place_in_the_batch_is_refused(tmp_path, strategy, settings, said):
    trainer = tiny_trainer(tmp_path, **settings)
    attach(trainer)
    before = dict(vars(trainer))
    with pytest.raises(ConfigurationError, match=said):
        use_strategy(trainer, strategy)
    assert vars(trainer) == before
    detach(trainer)


def test_turns_cannot_be_sampled_ahead(tmp_path, monkeypatch):
    trainer = tiny_trainer(
        tmp_path,
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"tools": [double]},
        **TOOLS,
    )
    attach(trainer)
    with pytest.raises(ConfigurationError, match="tools, whose later turns begin when a batch is"):
        use_strategy(trainer, PartialRollouts())
    detach(trainer)


def test_a_failing_reward_leaves_nothing_running(tmp_path):
    def failing(completions, **_):
        raise ZeroDivisionError("no reward today")

    trainer = tiny_trainer(tmp_path, **(UNEVEN | {"reward": failing}))
    generator = attach(trainer)
    use_strategy(trainer, PartialRollouts(num_extra_groups=2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert generator.is_asleep
    detach(trainer)
    assert not generator.manager.loop.is_live()


def often_equal(prompts, completions, **_):
    """No advantage where the first summand is even."""
    return [
        len(completion) % 7 + completion.count("7") if int(prompt[0]) % 2 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def kept_batches(trainer):
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
    with attach(trainer, RolloutConfig()) as generator:
        generate_batch = generator.generate_batch

        def generate_and_keep(*args, **kwargs):
            outputs = generate_batch(*args, **kwargs)
            for output in outputs.values():
                key = (*output.prompt_ids, -1, *output.generated_tokens)
                sampled[key] = output.logprobs
            return outputs

        generator.generate_batch = generate_and_keep
        use_strategy(trainer, DynamicSampling())
        batches = kept_batches(trainer)
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
            if "old_per_token_logps" in batch:
                old = batch["old_per_token_logps"][row][mask].tolist()
                assert old == pytest.approx(logprobs, abs=1e-5)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert sum(log["rollout/groups_dropped"] for log in logs) > 0


def test_at_its_bound_a_batch_keeps_groups_as_they_come(tmp_path):
    trainer = tiny_trainer(tmp_path, reward=lambda completions, **_: [1.0] * len(completions))
    with attach(trainer, RolloutConfig()):
        use_strategy(trainer, DynamicSampling(max_dropped_groups=3))
        batches = kept_batches(trainer)
        trainer.args.max_steps = 1
        trainer.train()
    assert batches[0]["advantages"].shape == (16,)
    assert not batches[0]["advantages"].any()
    assert trainer.state.log_history[0]["rollout/groups_dropped"] == 3


def test_settings_that_mix_groups_are_refused_and_plain_changes_nothing(tmp_path):
    trainer = tiny_trainer(tmp_path, scale_rewards="batch")
    attach(trainer)
    with pytest.raises(ConfigurationError, match="scale_rewards='batch', which mixes groups"):
        use_strategy(trainer, DynamicSampling())
    before = trainer._generate_and_score_completions
    use_strategy(trainer, Plain())
    assert trainer._generate_and_score_completions == before
    detach(trainer)
