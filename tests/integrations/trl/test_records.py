import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from tiny_trainer import logged, tiny_trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.parts import RolloutContext
from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.integrations.trl.scoring import TrainerScoring
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import iterate_rollouts, list_runs, read_metrics
from cb_rollout.rollout.recording.distributions import DRIFT, LOGPROBS, RATIO


def test_each_training_is_a_run_with_the_evaluation_before_the_first(tmp_path):
    settings = SimpleNamespace(output_dir=tmp_path, report_to=[])
    records = TrainerRecords(SimpleNamespace(args=settings), 0, Durations())
    records.log(0, {"eval_reward": 0.1})
    for from_step in (0, 0, 2):
        records.begin_training(from_step, None)
        for step in range(from_step + 1, from_step + 4):
            records.log(step, {"reward": 0.5})
    first, second, resumed = list_runs(tmp_path)
    assert (first.steps, second.steps) == ([0, 1, 2, 3], [1, 2, 3])
    assert (resumed.continues, resumed.steps) == ({second.run_id: 2}, [1, 2, 3, 4, 5])


def a_row(number, logprobs, is_sampled):
    tokens = [5] * len(is_sampled)
    return LossRow(number, [3], tokens, is_sampled, logprobs, versions=[1] * len(tokens))


def test_the_distributions_are_of_every_sampled_token_that_the_loss_counts(tmp_path):
    # tests/training/test_recorded_loop.py holds the same on a trainer and a run of wandb.
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=tmp_path, report_to=["wandb"]),
        num_generations=2,
        state=SimpleNamespace(global_step=0),
    )
    records = TrainerRecords(trainer, 0, Durations())
    rows = [
        # The second token is a tool's.
        a_row(0, [-1.0, 0.0, -2.0], [True, False, True]),
        # The loss leaves the last one out, and the third row has no numbers.
        a_row(1, [-3.0, -4.0], [True, True]),
        a_row(2, None, [True]),
    ]
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    batch = {"completion_mask": mask_BT, "advantages": torch.zeros(3)}
    context = RolloutContext("train", rows=rows, rewards=[0.0] * 3, all_rewards=[0.0] * 4)
    records.scored(context, rows, batch)
    # In another order, in two forwards, and once more in a second epoch.
    trained_BT = torch.tensor([[-1.5, -9.0, -1.0], [-3.25, -9.0, -9.0], [-9.0] * 3])
    for order in ([1, 2], [0], [0, 1, 2]):
        some = [rows[number] for number in order]
        records.computed(some, trained_BT[order], trained_BT[order])
    values = records._distributions.values()
    assert values[LOGPROBS].tolist() == [-1.0, -2.0, -3.0]
    assert values[DRIFT].tolist() == [0.25, 0.5, -1.0]
    assert values[RATIO] == pytest.approx(np.exp([-0.25, -0.5, 1.0]))
    # An evaluation's log leaves them to the training's, which ends them.
    records.log(1, {"eval_reward": 0.1})
    assert LOGPROBS in records._distributions.values()
    records.log(1, {"reward": 0.1})
    assert records._distributions.values() == {}


@pytest.mark.parametrize("report_to", [[], ["tensorboard"]])
def test_without_wandb_no_distribution_is_kept(tmp_path, report_to):
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=tmp_path, report_to=report_to),
        num_generations=1,
        state=SimpleNamespace(global_step=0),
    )
    records = TrainerRecords(trainer, 0, Durations())
    rows = [a_row(0, [-1.0], [True])]
    batch = {"completion_mask": torch.ones(1, 1), "advantages": torch.zeros(1)}
    context = RolloutContext("train", rows=rows, rewards=[0.0], all_rewards=[0.0])
    records.scored(context, rows, batch)
    records.computed(rows, torch.tensor([[-1.0]]), torch.tensor([[1.0]]))
    assert records._distributions.values() == {}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_takes_its_own_part_of_the_gathered_rewards(rank):
    # tests/distributed/test_saved.py holds the same on real processes.
    gathered_BF = torch.tensor([[float(row), 10.0 * row] for row in range(6)])
    accelerator = SimpleNamespace(process_index=rank, num_processes=3)
    rows = ["a", "b"]
    scoring = SimpleNamespace(
        _calculate_rewards=lambda *_: gathered_BF,
        _state=SimpleNamespace(rows=rows),
        _trainer=SimpleNamespace(reward_weights=torch.tensor([1.0, 0.5]), accelerator=accelerator),
        _backend=SimpleNamespace(context=SimpleNamespace(rows=[*rows], rewards=[], all_rewards=[])),
    )
    TrainerScoring.calculate_rewards(scoring, [{}, {}], rows, [], [])
    context = scoring._backend.context
    assert context.rewards == [6.0 * row for row in (2 * rank, 2 * rank + 1)]
    assert context.all_rewards == [6.0 * row for row in range(6)]


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_completion_that_nothing_scored_has_no_reward_in_any_record(tmp_path, trainer_class):
    def first_half(completions, **_):
        return [float(n) if n % 2 else None for n in range(len(completions))]

    config_class = GRPOConfig if trainer_class is GRPOTrainer else RLOOConfig
    trainer = tiny_trainer(
        tmp_path,
        trainer_class=trainer_class,
        config_class=config_class,
        reward=first_half,
        max_steps=1,
        num_hidden_layers=1,
    )
    saved = tmp_path / "saved"
    attach(trainer, RolloutConfig(save_rollouts=str(saved), record_num_sequences=16))
    trainer.train()
    detach(trainer)
    expected = [float(n) if n % 2 else None for n in range(16)]
    # The trainer shuffles the batch.
    recorded = [sequence.reward for sequence in iterate_rollouts(tmp_path)]
    assert Counter(recorded) == Counter(expected)
    (path,) = saved.iterdir()
    assert parquet.read_table(path)["reward"].to_pylist() == expected
    mean = sum(range(1, 16, 2)) / 8
    assert logged(trainer, "reward") == [mean]
    (rewards,) = [step.group_rewards for step in read_metrics(tmp_path) if step.group_rewards]
    scored = [reward for group in rewards for reward in group if not math.isnan(reward)]
    assert sum(scored) / len(scored) == mean
