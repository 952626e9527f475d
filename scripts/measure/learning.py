"""Train SmolLM2-135M-Instruct for equal minutes, attached and on TRL's own path, seed by seed.

    python scripts/measure/learning.py --save docs/benchmarks/learning_cpu.json

Each run is a process of its own, and stops at the first step that ends after its minutes. The task
and the trainer are those of `recipes/smollm2_cpu.py`. `scripts/pages/plots.py` draws the record.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "scripts")]

PATHS = ("cb_rollout", "TRL's own")

# Summed over a training; TRL's own path logs none of them.
COUNTS = ("rollout/tokens",)


def train(path: str, seed: int, minutes: float, num_held_out: int) -> dict:
    """Run one training, and return its curve and its accuracy on held-out problems."""
    import smollm2_cpu as recipe
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    import cb_rollout
    from smollm2 import smollm2_folder

    class StopInTime(TrainerCallback):
        """Record reward by seconds, and stop after the minutes."""

        def __init__(self) -> None:
            self.start = 0.0
            self.curve: list[tuple[float, float]] = []
            self.counts = dict.fromkeys(COUNTS, 0.0)

        def on_train_begin(self, args, state, control, **_):  # noqa: ANN001, ANN003, ANN202
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs, **_):  # noqa: ANN001, ANN003, ANN202
            if "reward" in logs:
                self.curve.append((time.perf_counter() - self.start, logs["reward"]))
                for name in COUNTS:
                    self.counts[name] += logs.get(name, 0.0)

        def on_step_end(self, args, state, control, **_):  # noqa: ANN001, ANN003, ANN202
            control.should_training_stop = time.perf_counter() - self.start > 60 * minutes

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["", "--model", str(smollm2_folder()), "--seed", str(seed)]
        sys.argv += ["--output-dir", folder, "--max-steps", "10000"]
        args = recipe.parsed_arguments()
        held_out = Path(folder, "held_out.jsonl")
        problems = recipe.draw_problems(num_held_out, 0, held_out=True)
        Dataset.from_list(problems).to_json(held_out)
        before = recipe.accuracy(args.model, held_out, Path(folder, "before.jsonl"))
        trainer = recipe.create_trainer(args)
        callback = StopInTime()
        trainer.add_callback(callback)
        attached = path == PATHS[0]
        with cb_rollout.attach(trainer) if attached else contextlib.nullcontext():
            trainer.train()
        trainer.save_model(f"{folder}/checkpoint")
        after = recipe.accuracy(f"{folder}/checkpoint", held_out, Path(folder, "after.jsonl"))
        return {
            "path": path,
            "seed": seed,
            "before": before,
            "after": after,
            "num_steps": len(callback.curve),
            "curve": callback.curve,
            "counts": callback.counts,
            "threads": torch.get_num_threads(),
        }


def table(runs: list[dict]) -> str:
    """Return the runs as a table."""
    lines = [f"{'path':<12}{'seed':>5}{'before':>9}{'after':>9}{'steps':>7}{'s/step':>8}"]
    for run in runs:
        seconds = run["curve"][-1][0] / run["num_steps"]
        lines.append(
            f"{run['path']:<12}{run['seed']:>5}{run['before']:>9.1%}{run['after']:>9.1%}"
            f"{run['num_steps']:>7}{seconds:>8.1f}"
        )
    for path in PATHS:
        gains = [run["after"] - run["before"] for run in runs if run["path"] == path]
        lines.append(f"{path}: mean gain {100 * statistics.mean(gains):.1f} points")
    return "\n".join(lines)


def main() -> None:
    """Run every seed by both paths in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10, help="of training, each run")
    parser.add_argument("--num-held-out", type=int, default=400)
    parser.add_argument("--save", type=Path, help="write the record here")
    parser.add_argument("--run", nargs=2, metavar=("PATH", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        path, seed = args.run
        with contextlib.redirect_stdout(sys.stderr):
            run = train(path, int(seed), args.minutes, args.num_held_out)
        print(json.dumps(run))
        return
    runs = []
    options = ["--minutes", str(args.minutes), "--num-held-out", str(args.num_held_out)]
    for seed in range(args.seeds):
        # The order turns, so that a slow spell of the machine meets both.
        for path in PATHS if seed % 2 == 0 else PATHS[::-1]:
            command = [sys.executable, __file__, *options, "--run", path, str(seed)]
            run = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            runs.append(json.loads(run.stdout.splitlines()[-1]))
            if args.save:
                record = {
                    "date": time.strftime("%Y-%m-%d"),
                    "device": platform.processor() or platform.machine(),
                    "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
                    "minutes": args.minutes,
                    "num_held_out": args.num_held_out,
                    "runs": runs,
                }
                args.save.write_text(json.dumps(record, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
