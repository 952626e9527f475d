from types import SimpleNamespace

import pytest
import torch

from cb_rollout.integrations.trl.records import TrainerRecords
from cb_rollout.integrations.trl.scoring import TrainerScoring
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.run_records import list_runs


def test_each_training_is_a_run_with_the_evaluation_before_the_first(tmp_path):
    settings = SimpleNamespace(output_dir=tmp_path, report_to=[])
    records = TrainerRecords(SimpleNamespace(args=settings), num_sequences=0)
    records.write_log(0, {"eval_reward": 0.1}, Durations())
    for from_step in (0, 0, 2):
        records.begin_training(from_step)
        for step in range(from_step + 1, from_step + 4):
            records.write_log(step, {"reward": 0.5}, Durations())
    first, second, resumed = list_runs(tmp_path)
    assert (first.steps, second.steps) == ([0, 1, 2, 3], [1, 2, 3])
    assert (resumed.continues, resumed.steps) == ({second.run_id: 2}, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_takes_its_own_part_of_the_gathered_rewards(rank):
    # tests/distributed/test_saved.py holds the same on real processes.
    gathered_BF = torch.tensor([[float(row), 10.0 * row] for row in range(6)])
    accelerator = SimpleNamespace(process_index=rank, num_processes=3)
    rows = ["a", "b"]
    scoring = SimpleNamespace(
        _calculate_rewards=lambda *_: gathered_BF,
        _rows=rows,
        _trainer=SimpleNamespace(reward_weights=torch.tensor([1.0, 0.5]), accelerator=accelerator),
        _backend=SimpleNamespace(context=SimpleNamespace(rows=[*rows], rewards=[], all_rewards=[])),
    )
    TrainerScoring.calculate_rewards(scoring, [{}, {}], rows, [], [])
    context = scoring._backend.context
    assert context.rewards == [6.0 * row for row in (2 * rank, 2 * rank + 1)]
    assert context.all_rewards == [6.0 * row for row in range(6)]
