"""One process of several that train with GRPO, of which the last one fails in its second step."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tiny_trainer import share_of_sevens, tiny_trainer

from cb_rollout import RolloutConfig, attach

NUM_GENERATION_BATCHES = 2
# Rewards are computed this often before the failure.


class Failing:
    """A reward that raises, or takes its whole process away."""

    __name__ = "failing"

    def __init__(self, how: str) -> None:
        self.how, self.num_calls = how, 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        """Fail at the second call on the last process."""
        self.num_calls += 1
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if is_last and self.num_calls == NUM_GENERATION_BATCHES:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such verifier")
        return share_of_sevens(completions)


def main() -> None:
    """Train."""
    how, folder = sys.argv[1:]
    trainer = tiny_trainer(
        Path(folder) / os.environ["RANK"], reward=Failing(how), per_device_train_batch_size=8
    )
    # In one write, so that the lines of two processes do not mix.
    sys.stdout.write(f"process {os.getpid()} is one of {trainer.accelerator.num_processes}\n")
    sys.stdout.flush()
    with attach(trainer, RolloutConfig(verify_every_steps=0)):
        try:
            trainer.train()
        except ValueError:
            if how != "linger":
                raise
            # As in a notebook: the error is caught, and the process stays.
            threading.Event().wait()


if __name__ == "__main__":
    main()
