"""Trains with checkpoints: until it is killed amid a rollout, or on from there.

Arguments: what to do, a folder, and (to "resume") a file to write to.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tiny_trainer import share_of_sevens, tiny_trainer

from cb_rollout import RolloutConfig, attach

NUM_STEPS, KILLED_IN_STEP, KILLED_AT_FORWARD = 4, 3, 5
# The third step's rollout has a prefill and a dozen decode steps.


def train(folder: Path, resume: bool = False, is_killed: bool = False) -> dict[str, Any]:
    """Train, and return what was asked and how far samples were from the trainer's policy."""
    asked: list[list[str]] = []
    sampled: list[list[str]] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        asked.append(columns["prompts"])
        sampled.append(completions)
        return share_of_sevens(completions)

    trainer = tiny_trainer(
        folder,
        reward=reward,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=1,
        learning_rate=1e-2,
    )
    with attach(trainer, RolloutConfig(old_logps="trainer", verify_every_steps=1)) as generator:
        if is_killed:
            engine, num_forwards = generator.manager.engine, 0
            step = engine.step

            def step_until_killed() -> Any:
                nonlocal num_forwards
                num_forwards += generator.policy_version == KILLED_IN_STEP
                if num_forwards == KILLED_AT_FORWARD:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step()

            engine.step = step_until_killed
        trainer.train(resume_from_checkpoint=resume)
    steps = [row for row in trainer.state.log_history if "reward" in row]
    return {
        "prompts": asked,
        "completions": sampled,
        "steps": [row["step"] for row in steps],
        "differences": [row["sampling/sampling_logp_difference/max"] for row in steps],
        "drifts": [row["rollout/logprob_drift_max"] for row in steps],
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
    }


def main() -> None:
    """Do what was asked."""
    what, folder, *path = sys.argv[1:]
    killed = Path(folder) / "killed"
    if what == "kill":
        train(killed, is_killed=True)
        return
    results = {"resumed": train(killed, resume=True), "whole": train(Path(folder) / "whole")}
    Path(path[0]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
