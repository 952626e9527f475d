"""Strategies train each row of the data set once an epoch, also over a checkpoint."""

import re
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
from counted_rows import (
    GROUP,
    PROMPTS,
    ROWS,
    SETTINGS,
    by_length,
    resumed_rows,
    times,
    trained_rows,
)
from datasets import Dataset
from nightly import some_slow_pairs
from tiny_trainer import tiny_trainer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts, Plain

GRPO = {}
RLOO = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
# Two generations a step; a generation of two steps.
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
DIVIDED = {
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "per_device_train_batch_size": GROUP,
}
BOTH = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "per_device_train_batch_size": GROUP,
}

GENERATIONS = {
    "a generation a step": {},
    "accumulated": ACCUMULATED,
    "divided": DIVIDED,
    "both": BOTH,
}
# Of a run that ends in the first epoch and of one in the second, never amid a generation.
STOPS = {
    "a generation a step": (5, 19),
    "accumulated": (3, 8),
    "divided": (6, 34),
    "both": (5, 19),
}

AHEAD = [
    PartialRollouts(num_extra_groups=3, max_staleness=3),
    PartialRollouts(num_extra_groups=7, max_staleness=1),
    OverSampling(num_extra_groups=3),
    OverSampling(num_extra_groups=2, num_extra_members=1),
]


SAMPLERS = {
    "partial, grpo": (AHEAD[0], GRPO),
    "partial, rloo": (AHEAD[0], RLOO),
    "over, grpo": (AHEAD[2], GRPO),
    "over, rloo": (AHEAD[2], RLOO),
}
# Each way to generate with one sampler by day, with all by night.
GENERATED = list(some_slow_pairs(list(GENERATIONS), list(SAMPLERS)))


@dataclass(frozen=True, kw_only=True)
class Dapo(DynamicSampling, PartialRollouts):
    name = "dapo"


def often_equal(prompts, completions, **_):
    """No advantage where the first summand is even."""
    return [
        float(len(completion)) if int(prompt[0]) % 2 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class Easiest(GRPOTrainer):
    """Begins with the lowest rows, in every epoch."""

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        sampler.shuffle = False
        return sampler


class Unseeded(GRPOTrainer):
    """Orders its rows otherwise in every run."""

    num_made = 0

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        Unseeded.num_made += 1
        sampler.generator.manual_seed(Unseeded.num_made)
        return sampler


class OtherLoader(GRPOTrainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


def test_partial_rollouts_train_each_row_once_an_epoch(tmp_path):
    trained, _ = trained_rows(tmp_path, AHEAD[0], num_train_epochs=2)
    assert Counter(trained[: 24 * GROUP]) == times(1)
    assert Counter(trained) == times(2)


@pytest.mark.slow
def test_a_run_stopped_amid_an_epoch_trains_each_row_once(tmp_path):
    trained, _ = resumed_rows(tmp_path, AHEAD[0], 5)
    assert Counter(trained) == times(1)


@pytest.mark.parametrize(("generation", "sampler"), GENERATED)
def test_sampling_ahead_trains_each_row_once_an_epoch(tmp_path, generation, sampler):
    strategy, trainer = SAMPLERS[sampler]
    settings = GENERATIONS[generation] | trainer
    trained, _ = trained_rows(tmp_path, strategy, num_train_epochs=2, **settings)
    assert Counter(trained[: 24 * GROUP]) == times(1)
    assert Counter(trained) == times(2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", AHEAD[1::2], ids=str)
def test_many_extra_groups_and_extra_members_train_each_row_once(tmp_path, strategy):
    trained, _ = resumed_rows(tmp_path, strategy, 12, num_train_epochs=2)
    assert Counter(trained[: 24 * GROUP]) == times(1)
    assert Counter(trained) == times(2)


@pytest.mark.parametrize(("generation", "sampler"), GENERATED)
def test_a_resumed_run_trains_rows_as_often_as_a_whole_one(tmp_path, generation, sampler):
    strategy, trainer = SAMPLERS[sampler]
    settings = GENERATIONS[generation] | trainer
    for step in STOPS[generation]:
        trained, _ = resumed_rows(
            tmp_path / str(step), strategy, step, num_train_epochs=2, **settings
        )
        assert Counter(trained[: 24 * GROUP]) == times(1)
        assert Counter(trained) == times(2)


def test_dynamic_sampling_offers_each_row_once_a_pass(tmp_path):
    strategy = DynamicSampling(max_dropped_groups=8)
    trained, scored = trained_rows(tmp_path, strategy, reward=often_equal)
    assert len(trained) == 24 * GROUP
    assert len(scored) > 24
    assert_each_is_offered_once(scored)


def assert_each_is_offered_once(scored):
    """In each pass; the last one may be amid the data set."""
    for start in range(0, len(scored), 24):
        counts = Counter(scored[start : start + 24])
        assert set(counts.values()) == {1}
        assert len(counts) == min(24, len(scored) - start)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_dynamic_sampling_goes_on_in_its_pass(tmp_path, trainer):
    strategy = DynamicSampling(max_dropped_groups=8)
    for step in (5, 13):
        _, scored = resumed_rows(
            *(tmp_path / str(step), strategy, step),
            num_train_epochs=2,
            reward=often_equal,
            **trainer,
        )
        assert_each_is_offered_once(scored)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Dapo(num_extra_groups=3, max_dropped_groups=8, max_staleness=3),
        DynamicSampling(num_extra_groups=3, max_dropped_groups=8),
    ],
    ids=str,
)
def test_no_row_is_offered_more_often_than_another(tmp_path, strategy):
    settings = {"num_train_epochs": 3, "reward": often_equal}
    _, whole = trained_rows(tmp_path / "whole", strategy, **settings)
    _, resumed = resumed_rows(tmp_path / "resumed", strategy, 13, **settings)
    for scored in (whole, resumed):
        counts = Counter(scored)
        assert len(scored) > 3 * 24
        # A row in flight at a pass's end is complete in the next one.
        assert max(counts.values()) - min(counts.values()) <= 2
        assert counts.keys() == set(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [22, 23])
def test_rows_that_fill_no_generation_are_left_out_as_the_trainers_sampler_does(tmp_path, num_rows):
    data = {"trainer_arguments": {"train_dataset": Dataset.from_list(ROWS[:num_rows])}}
    trained, _ = trained_rows(tmp_path, AHEAD[0], num_train_epochs=2, **data)
    for start in (0, 22 * GROUP):
        counts = Counter(trained[start : start + 22 * GROUP])
        assert set(counts.values()) == {GROUP}
        assert len(counts) == 22


@pytest.mark.slow
def test_a_checkpoint_amid_a_generation_trains_the_rest_of_it(tmp_path):
    trained, _ = resumed_rows(tmp_path, AHEAD[0], 7, **DIVIDED)
    assert Counter(trained) == times(1)


@pytest.mark.slow
def test_a_generation_that_no_checkpoint_keeps_is_sampled_again(tmp_path):
    trained, _ = trained_rows(tmp_path, AHEAD[0], stop_at=7, **DIVIDED)
    checkpoint = tmp_path / "checkpoint-7"
    (checkpoint / "cb_rollout_00000.pt").unlink()
    with pytest.warns(UserWarning, match="half done are sampled again"):
        others, _ = trained_rows(tmp_path, AHEAD[0], resume=str(checkpoint), **DIVIDED)
    # The fourth generation's first half was trained before, its second half after.
    assert len(trained + others) == 24 * GROUP
    counts = Counter(trained + others)
    assert sum(count != GROUP for count in counts.values()) <= 2
    assert all(abs(counts[prompt] - GROUP) <= GROUP // 2 for prompt in PROMPTS)


@pytest.mark.slow
def test_a_subclass_may_order_the_rows(tmp_path):
    settings = {"num_train_epochs": 2, "trainer_class": Easiest}
    trained, _ = resumed_rows(tmp_path, AHEAD[0], 17, **settings)
    first = trained[: 24 * GROUP]
    assert Counter(first) == times(1)
    assert Counter(trained) == times(2)
    # Nothing is sampled further ahead than the extra groups reach.
    assert set(first[: 2 * GROUP]) <= {row["prompt"] for row in ROWS[:5]}


@pytest.mark.slow
def test_an_order_that_is_not_the_checkpoints_warns_with_the_numbers(tmp_path):
    said = "had taken 12 rows of pass 1 .* 2 per generation on 1 .* The 4 rows that were waiting"
    with pytest.warns(UserWarning, match=said):
        trained, _ = resumed_rows(tmp_path, AHEAD[0], 4, trainer_class=Unseeded)
    assert len(trained) == 24 * GROUP


@pytest.mark.slow
def test_other_generations_than_the_checkpoints_warn_with_the_numbers(tmp_path):
    trained_rows(tmp_path, AHEAD[0], stop_at=4)
    checkpoint = str(tmp_path / "checkpoint-4")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        trained_rows(tmp_path, AHEAD[0], resume=checkpoint, generation_batch_size=8)
    said = "\n".join(str(warning.message) for warning in given)
    assert "generation_batch_size=4, and now it is 8" in said
    assert "the rows that were half done are sampled again" in said
    assert re.search("2 per generation .* this run takes 4 on 1", said)


@pytest.mark.slow
def test_a_checkpoint_without_a_strategy_goes_on_after_the_trainers_rows(tmp_path):
    trained, _ = trained_rows(tmp_path, Plain(), stop_at=5)
    others, _ = trained_rows(tmp_path, AHEAD[0], resume=str(tmp_path / "checkpoint-5"))
    assert Counter(trained + others) == times(1)


@pytest.mark.slow
def test_a_second_training_begins_anew(tmp_path):
    """Whatever the first left in flight."""
    trainer = tiny_trainer(tmp_path, **(SETTINGS | {"reward": by_length, "num_train_epochs": 1}))
    attach(trainer, RolloutConfig(old_logps="rollout"))
    use_strategy(trainer, AHEAD[0])
    score, seen = trainer._generate_and_score_completions, []

    def score_and_note(inputs):
        batch = score(inputs)
        seen.extend(trainer.processing_class.batch_decode(batch["prompt_ids"]))
        if len(seen) == 8 * GROUP:
            raise ZeroDivisionError("after four generations")
        return batch

    trainer._generate_and_score_completions = score_and_note
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    seen.append("of the first training")
    trainer.train()
    detach(trainer)
    assert Counter(seen[8 * GROUP + 1 :]) == times(1)


def test_a_loader_of_ones_own_is_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=OtherLoader)
    attach(trainer)
    with pytest.raises(ConfigurationError, match="OtherLoader's own get_train_dataloader, whose"):
        use_strategy(trainer, DynamicSampling())
    detach(trainer)
