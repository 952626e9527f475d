"""What trainers do by default runs by the best paths, on the device it is for."""

import pytest
import torch
from device_laws import assert_captured, assert_trains

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("case", ["TRL's default precision", "LoRA on a float32 base"])
def test_steps_are_captured_and_give_what_the_trainers_forward_gives(case, caplog):
    assert_captured(case, DEVICE, float32=1e-4)
    assert "rollouts run slower" not in caplog.text


def test_a_trainer_in_its_default_precision_learns(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    assert_trains(tmp_path, DEVICE)
