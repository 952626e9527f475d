"""However the main thread ends, the process ends with it, traceback and all."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
# A process that hangs is killed and fails the test; a sound one ends long before.
TIMEOUT_SECONDS = 120

REWARD_RAISES = """
from tiny_trainer import tiny_trainer

def reward(completions, **_):
    raise ValueError("the reward function broke")

trainer = tiny_trainer(sys.argv[1], reward=reward)
cb_rollout.attach(trainer)
trainer.train()
"""

MAIN_THREAD_RAISES = """
generator = cb_rollout.RolloutGenerator(tiny_model())
params = cb_rollout.SamplingParams(max_new_tokens=400, ignore_eos=True)
generator.manager.start()
generator.manager.add_requests([[5, 6, 7]] * 64, sampling_params=params)
generator.manager.get_result(timeout=0.2)
raise ValueError("the main thread broke")
"""

ASLEEP = """
generator = cb_rollout.RolloutGenerator(tiny_model())
generator.generate_batch([[5, 6]], max_new_tokens=4)
generator.sleep()
raise ValueError("the main thread broke")
"""

INTERRUPTED = """
generator = cb_rollout.RolloutGenerator(tiny_model())
params = cb_rollout.SamplingParams(max_new_tokens=480, ignore_eos=True)
print("ready", flush=True)
while True:
    generator.generate_batch([[5, 6, 7]] * 64, sampling_params=params)
"""

PREAMBLE = """
import sys
import cb_rollout
from tiny import tiny_model
"""


@contextmanager
def started(script: str, output_dir: Path) -> Iterator[subprocess.Popen]:
    paths = [str(TESTS), str(TESTS / "training"), str(TESTS.parent)]
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, str(output_dir)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param(
            REWARD_RAISES, "ValueError: the reward function broke", marks=pytest.mark.slow
        ),
        pytest.param(
            MAIN_THREAD_RAISES, "ValueError: the main thread broke", marks=pytest.mark.slow
        ),
        pytest.param(ASLEEP, "ValueError: the main thread broke", marks=pytest.mark.slow),
    ],
)
def test_an_exception_ends_the_process_with_its_traceback(script, said, tmp_path):
    with started(script, tmp_path) as process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1
    assert "Traceback" in errors
    assert said in errors


@pytest.mark.slow
def test_ctrl_c_ends_the_process_with_its_traceback(tmp_path):
    with started(INTERRUPTED, tmp_path) as process:
        assert any(line == "ready\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert errors.rstrip().endswith("KeyboardInterrupt")
