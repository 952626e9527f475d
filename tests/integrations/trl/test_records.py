from types import SimpleNamespace

from cb_rollout.integrations.trl.records import TrainerRecords
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
