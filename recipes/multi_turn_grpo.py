"""A game of many turns: TRL's `environment_factory`, rolled out by cb_rollout.

The model guesses a number between 1 and 100, and is told "higher" or "lower" until it is right or
out of turns. Each completion plays its own game; the game gives the reward, more for fewer guesses.
All games of a batch play at once, and each turn reuses the keys of the previous ones. The chat
template must support tools, as those of Qwen3 and Llama 3.1 do.

Launch:   accelerate launch recipes/multi_turn_grpo.py --model Qwen/Qwen3-0.6B --max-steps 200
          accelerate launch recipes/multi_turn_grpo.py --model ./checkpoint
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

RULES = (
    "I think of a number from 1 to 100. Find it with the guess tool, in as few turns as you can."
)
# Enough to find any number by bisection.
MAX_GUESSES = 7


class GuessingGame:
    """One game; its public methods, except `reset` and `get_reward`, are the model's tools."""

    def reset(self, secret: int = 1, **_) -> None:
        """Start a game with the row's number."""
        self._secret, self._num_guesses, self._nearest = secret, 0, 100

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess, from 1 to 100.

        Returns:
            "higher", "lower" or "right".
        """
        number = int(number)
        if self._nearest == 0 or self._num_guesses >= MAX_GUESSES:
            return "the game is over"
        self._num_guesses += 1
        self._nearest = min(self._nearest, abs(number - self._secret))
        if number == self._secret:
            return "right"
        return "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        """Return 0 for no guess, more for a nearer guess, up to 2 for a hit at once."""
        if not self._num_guesses:
            return 0.0
        if self._nearest:
            return 1 - self._nearest / 100
        return 1 + (MAX_GUESSES - self._num_guesses + 1) / MAX_GUESSES


def create_games(count: int) -> Dataset:
    """Create one row a game; its number goes to `reset`."""
    rng = random.Random(0)
    prompt = [{"role": "user", "content": RULES}]
    return Dataset.from_list(
        [{"prompt": prompt, "secret": rng.randint(1, 100)} for _ in range(count)]
    )


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/multi_turn"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=1024, help="of all turns")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    has_gpu = torch.cuda.is_available()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
        ),
        environment_factory=GuessingGame,
        train_dataset=create_games(args.max_steps * args.batch_size),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=MAX_GUESSES,
            learning_rate=args.learning_rate,
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            bf16=has_gpu,
            use_cpu=not has_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to=args.report_to,
        ),
    )
    trainer.accelerator.print(f"processes: {trainer.accelerator.num_processes}", flush=True)
    with cb_rollout.attach(trainer):
        trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        print(f"report {write_report(args.output_dir / 'cb_rollout')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
