"""Trains under a strategy, and notes every row that the loss sees and the weights at the end.

As a program: trains until it is killed amid a rollout, on from there, or whole. Arguments: what to
do, a strategy's name, a folder, and a file to write to.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from counted_rows import SETTINGS, by_length
from tiny_trainer import tiny_trainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts, Plain, Strategy

STRATEGIES: dict[str, Strategy] = {
    "plain": Plain(),
    "over": OverSampling(num_extra_groups=2, num_extra_members=1),
    "dynamic": DynamicSampling(max_dropped_groups=8),
    "partial": PartialRollouts(num_extra_groups=3, max_staleness=2),
}
NUM_STEPS = 6
# The rollout of the next step has begun then.
KILLED_AFTER = 3
KILLED_AT_FORWARD = 4


def often_equal(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward without an advantage where the first summand is 3 or more."""
    rewards = by_length(completions)
    return [
        reward if int(prompt[0]) < 3 else 1.0
        for prompt, reward in zip(prompts, rewards, strict=True)
    ]


class Row(NamedTuple):
    """A row of a loss."""

    step: int
    tokens: tuple[list[int], list[int]]
    logprobs: list[float]
    versions: list[int]


class Run:
    """A training of six steps, and what it trained on."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy | None,
        resume: Path | bool | None = None,
        is_attached: bool = False,
        is_killed: bool = False,
        old_logps: str = "rollout",
        **settings: Any,
    ) -> None:
        """Train; `is_attached`: detach in `close`, so that it may train again.

        Without a strategy the trainer's own loader hands out the rows.
        """
        self.trained: list[Row] = []
        defaults = {
            "reward": often_equal,
            "max_steps": NUM_STEPS,
            "num_train_epochs": 2,
            "num_hidden_layers": 1,
        }
        self._trainer = trainer = tiny_trainer(folder, **(SETTINGS | defaults | settings))
        generator = attach(trainer, RolloutConfig(old_logps=old_logps))
        if strategy is not None:
            use_strategy(trainer, strategy)
        if is_killed:
            _kill_later(generator)
        self._compute_loss = trainer.compute_loss
        trainer.compute_loss = self._note
        self.train(resume)
        if not is_attached:
            self.close()

    def train(self, resume: Path | bool | None) -> None:
        if isinstance(resume, Path):
            self._trainer.train(resume_from_checkpoint=str(resume))
        else:
            self._trainer.train(resume_from_checkpoint=resume)
        state = self._trainer.model.state_dict()
        self.weights = {name: weight.clone() for name, weight in state.items()}

    def close(self) -> None:
        detach(self._trainer)

    def _note(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        # An evaluation computes losses too.
        rows = inputs["rollout_rows"] if model.training else ()
        for row in rows:
            self.trained.append(
                Row(
                    step=self._trainer.state.global_step,
                    tokens=(list(row.prompt_ids), list(row.completion_ids)),
                    logprobs=list(row.logprobs or []),
                    versions=[version or 0 for version in row.versions],
                )
            )
        return self._compute_loss(model, inputs, *rest, **named)


def assert_same_end(resumed: Run, whole: Run) -> None:
    """Compare a run with the steps of another that it has too, and the weights of both."""
    first_step = resumed.trained[0].step
    expected = [row for row in whole.trained if row.step >= first_step]
    for field in ("step", "tokens", "versions"):
        assert [getattr(row, field) for row in resumed.trained] == [
            getattr(row, field) for row in expected
        ]
    for row, other in zip(resumed.trained, expected, strict=True):
        torch.testing.assert_close(row.logprobs, other.logprobs, rtol=0, atol=1e-5)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=0, atol=1e-6)


def _kill_later(generator: Any) -> None:
    """Kill this process amid the rollout after a checkpoint."""
    engine = generator.manager.engine
    step = engine.step
    num_forwards = 0

    def step_until_killed() -> Any:
        nonlocal num_forwards
        num_forwards += generator.policy_version == KILLED_AFTER + 1
        if num_forwards == KILLED_AT_FORWARD:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    engine.step = step_until_killed


def main() -> None:
    """Do what was asked."""
    what, name, folder, *path = sys.argv[1:]
    strategy = STRATEGIES[name]
    saving = {"save_strategy": "steps", "save_steps": 1}
    if what == "kill":
        Run(Path(folder), strategy, is_killed=True, **saving)
        return
    if what == "resume":
        run = Run(Path(folder), strategy, resume=True, **saving)
    else:
        run = Run(Path(folder) / "whole", strategy)
    rows = [row._asdict() for row in run.trained]
    weights = {name: weight.flatten().tolist() for name, weight in run.weights.items()}
    Path(path[0]).write_text(json.dumps({"rows": rows, "weights": weights}))


if __name__ == "__main__":
    main()
