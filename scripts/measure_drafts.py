"""Print the rollout time of each epoch of the demo, with drafts and without.

The demo's model (recipes/arithmetic_cpu.py) trains on a few problems several times, once with the
default settings and once with `num_speculative_tokens=0`. From the second epoch on, drafts are
found in the completions of the epoch before. Both runs sample the same tokens.

python scripts/measure_drafts.py --repetitions 3
"""

import argparse
import copy
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import cb_rollout

sys.path.append(str(Path(__file__).parent.parent / "recipes"))
import arithmetic_cpu as demo

STEPS_PER_EPOCH, PROMPTS_PER_STEP = 4, 16
CONFIGS = {"drafts": {}, "no drafts": {"num_speculative_tokens": 0}}


def trained_logs(model: Any, tokenizer: Any, args: argparse.Namespace, **settings: Any) -> list:
    """Train a copy of the model; return the logs of each step."""
    rng = random.Random(args.seed)
    train = demo.draw_problems(rng, STEPS_PER_EPOCH * PROMPTS_PER_STEP, held_out=False)
    model = copy.deepcopy(model)
    trainer = demo.create_trainer(model, tokenizer, train, train[:1], args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(verify_every_steps=0, **settings)):
        trainer.train()
    return [logs for logs in trainer.state.log_history if "rollout/seconds" in logs]


def epoch_sums(logs: list, name: str) -> list[float]:
    """Return a metric's sum over each epoch."""
    values = [step.get(name, 0.0) for step in logs]
    return [sum(values[i : i + STEPS_PER_EPOCH]) for i in range(0, len(values), STEPS_PER_EPOCH)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup-steps", type=int, default=demo.WARMUP_STEPS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1, help="runs of each, in turns")
    parser.add_argument("--model", help="directory of a warm-started model; written if missing")
    args = parser.parse_args()
    args.max_steps = args.epochs * STEPS_PER_EPOCH
    torch.manual_seed(args.seed)
    tokenizer, model = demo.create_tokenizer(), demo.create_model()
    if args.model and Path(args.model).exists():
        model = type(model).from_pretrained(args.model)
    else:
        demo.warm_start(model, tokenizer, args.warmup_steps, random.Random(args.seed))
        if args.model:
            model.save_pretrained(args.model)
    runs: dict[str, list[list]] = {name: [] for name in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = Path(folder)
        for _ in range(args.repetitions):
            for name, settings in CONFIGS.items():
                runs[name].append(trained_logs(model, tokenizer, args, **settings))
    seconds = {
        name: [
            statistics.median(values)
            for values in zip(*(epoch_sums(logs, "rollout/seconds") for logs in many), strict=True)
        ]
        for name, many in runs.items()
    }
    logs = runs["drafts"][0]
    drafted = epoch_sums(logs, "rollout/drafted_tokens")
    accepted = epoch_sums(logs, "rollout/accepted_tokens")
    print(f"{'epoch':<7}{'drafts, s':>11}{'without, s':>12}{'ratio':>7}{'accepted of drafted':>22}")
    for epoch, (ours, plain) in enumerate(zip(*seconds.values(), strict=True)):
        shares = f"{accepted[epoch]:,.0f} of {drafted[epoch]:,.0f}"
        print(f"{epoch + 1:<7}{ours:>11.2f}{plain:>12.2f}{plain / ours:>7.2f}{shares:>22}")
    names = ("completions/mean_length", "reward")
    pairs = zip(logs, runs["no drafts"][0], strict=True)
    same = [all(ours[name] == plain[name] for name in names) for ours, plain in pairs]
    print(f"steps with equal lengths and rewards: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
