"""Measure the loss over conversations whose turns share their history, beside TRL's own path.

python scripts/measure/tree.py            # an idle machine with over 24 GiB (TRL's own path)
python scripts/measure/tree.py --short    # few tokens and one round

SmolLM2-135M-Instruct on token ids drawn at random. Each turn of each conversation is a row: its
prompt is the history, its completion the answer. Conversations of a group have their first turns in
common. Three paths compute TRL's loss and its gradients from the same batch, in turns: TRL's own,
the packed loss with nothing shared but the prompts of equal rows, and the packed loss as it is.
Writes `docs/benchmarks/tree_cpu.json`.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.records import describe_machine, save_record
from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.packing import batch as packing
from cb_rollout.packing.prefix_tree import TreeRow, num_tree_tokens
from cb_rollout.packing.rows import PackedRow
from smollm2 import smollm2_folder

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"

NUM_TURNS, GROUP_SIZE = 8, 8
PADDING = 0

# Tokens of a prompt, of an answer, of what a tool says between two answers; rounds.
SIZES = {False: (64, 24, 8, 3), True: (24, 8, 4, 1)}


def conversations(
    rng: random.Random, sizes: Sequence[int], num_common_turns: int, vocabulary: int
) -> list[tuple[list[int], list[int]]]:
    """Return the turns of one group's conversations, each as history and answer."""

    def drawn(num_tokens: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(num_tokens)]

    num_prompt, num_answer, num_between = sizes
    start, rows = drawn(num_prompt), []
    common = [(drawn(num_answer), drawn(num_between)) for _ in range(num_common_turns)]
    for _ in range(GROUP_SIZE):
        history = start
        for turn in range(NUM_TURNS):
            new = drawn(num_answer), drawn(num_between)
            answer, between = common[turn] if turn < num_common_turns else new
            rows.append((history, answer))
            history = [*history, *answer, *between]
    return rows


def batch_of(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Return TRL's padded batch of these rows, every one with an advantage."""
    P, T = (max(len(row[part]) for row in rows) for part in (0, 1))
    generator = torch.Generator().manual_seed(0)
    left = [[PADDING] * (P - len(prompt)) + prompt for prompt, _ in rows]
    right = [answer + [PADDING] * (T - len(answer)) for _, answer in rows]
    mask = torch.tensor([[t < len(answer) for t in range(T)] for _, answer in rows]).long()
    return {
        "prompt_ids": torch.tensor(left),
        "prompt_mask": torch.tensor(
            [[p >= P - len(own) for p in range(P)] for own, _ in rows]
        ).long(),
        "completion_ids": torch.tensor(right),
        "completion_mask": mask,
        "advantages": torch.randn(len(rows), generator=generator),
        "num_items_in_batch": mask.sum(),
    }


@contextmanager
def sharing_prompts_alone() -> Iterator[None]:
    """Have rows share their prompts where these are equal, and nothing else."""
    own = packing.in_tree_order

    def of_equal_prompts(rows: Sequence[PackedRow], numbers: Iterable[int]) -> list[TreeRow]:
        tree: list[TreeRow] = []
        for number in sorted(numbers, key=lambda number: list(rows[number].prompt_ids)):
            prompt = rows[number].prompt_ids
            is_equal = bool(tree) and rows[tree[-1].number].prompt_ids == prompt
            tree.append(TreeRow(number, len(prompt) if is_equal else 0))
        return tree

    packing.in_tree_order = of_equal_prompts
    try:
        yield
    finally:
        packing.in_tree_order = own


def create_trainer(output_dir: str, model: str, num_rows: int) -> GRPOTrainer:
    """Return a trainer with TRL's settings, in float32, that takes all rows in one forward."""
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=output_dir,
            per_device_train_batch_size=num_rows,
            num_generations=GROUP_SIZE,
            report_to=[],
            use_cpu=True,
            bf16=False,
            # A batch made by hand has no ratios of sampled log-probabilities.
            vllm_importance_sampling_correction=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
    )


def learn(trainer: Any, batch: dict[str, Any]) -> float:
    """Compute loss and gradients, and return the seconds."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    started = time.perf_counter()
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    return time.perf_counter() - started


def gradient_norm(trainer: Any) -> float:
    """Return the norm of all gradients."""
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm())


def measured(trainer: Any, batch: dict[str, Any], num_rounds: int) -> dict[str, Any]:
    """Return tokens, seconds and the gradient's norm of each path."""
    ways = {"prompts alone": sharing_prompts_alone, "tree": nullcontext}
    found = {name: {"tokens": 0, "seconds": [], "gradient_norm": 0.0} for name in ("trl", *ways)}
    found["trl"]["tokens"] = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
    # The first batch after `attach` also compares forwards.
    few = {name: value[:4] if value.dim() else value for name, value in batch.items()}
    trainer.model.train()
    learn(trainer, few)
    for _ in range(num_rounds):
        found["trl"]["seconds"].append(learn(trainer, batch))
        found["trl"]["gradient_norm"] = gradient_norm(trainer)
        attach(trainer, RolloutConfig(loss_forward="packed", verify_every_steps=0))
        learn(trainer, few)
        for name, way in ways.items():
            with way():
                found[name]["seconds"].append(learn(trainer, batch))
            found[name]["gradient_norm"] = gradient_norm(trainer)
            tokens = trainer._metrics["train"]["rollout/loss_tokens_computed"][-1]
            found[name]["tokens"] = int(tokens)
        detach(trainer)
    return found


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--common-turns", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=BENCHMARKS)
    args = parser.parse_args()
    *sizes, num_rounds = SIZES[args.short]
    rows = conversations(random.Random(0), sizes, args.common_turns, 40_000)
    packed = [PackedRow(*row) for row in rows]
    num_needed = num_tree_tokens(packed)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = create_trainer(output_dir, str(smollm2_folder()), len(rows))
        found = measured(trainer, batch_of(rows), num_rounds)
    print(f"{len(rows)} rows, {sum(row.num_tokens for row in packed)} tokens, {num_needed} of tree")
    for name, path in found.items():
        path["tokens_to_tree"] = path["tokens"] / num_needed
        path["median_seconds"] = statistics.median(path["seconds"])
        print(
            f"{name:<15}{path['tokens']:>8} tokens, {path['tokens_to_tree']:5.2f} of tree, "
            f"{path['median_seconds']:7.1f} s, gradient {path['gradient_norm']:.6g}"
        )
    record = {
        "bench": "tree",
        **describe_machine("cpu"),
        "model": "SmolLM2-135M-Instruct",
        "turns": NUM_TURNS,
        "common_turns": args.common_turns,
        "group_size": GROUP_SIZE,
        "tokens_of_prompt_answer_between": sizes,
        "tree_tokens": num_needed,
        "paths": found,
    }
    print(save_record(record, args.output_dir, "cpu"))


if __name__ == "__main__":
    main()
