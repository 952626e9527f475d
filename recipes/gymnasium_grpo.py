"""An environment of gymnasium as TRL's `environment_factory`, rolled out by cb_rollout.

multi_turn_grpo.py with an environment that others wrote: FrozenLake, a walk over ice to a goal past
holes. The environment's action is the model's tool, its observation the tool's answer, and its
rewards add up to the completion's. The chat template must support tools, as those of Qwen3 and
Llama 3.1 do.

Install:  pip install gymnasium
Launch:   accelerate launch recipes/gymnasium_grpo.py --model Qwen/Qwen3-0.6B --max-steps 200
          accelerate launch recipes/gymnasium_grpo.py --model ./checkpoint
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import sys
from pathlib import Path

import gymnasium
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

RULES = "Walk from S to G with the move tool, one field at a time, and step on no hole (H)."
DIRECTIONS = ("left", "down", "right", "up")
MAX_MOVES = 12


class FrozenLake:
    """One walk; its public methods, except `reset` and `get_reward`, are the model's tools."""

    def __init__(self) -> None:
        self._env = gymnasium.make("FrozenLake-v1", is_slippery=False)

    def reset(self, seed: int = 0, **_) -> str:
        """Start a walk, and show the map."""
        place, _ = self._env.reset(seed=seed)
        self._reward, self._is_over = 0.0, False
        return f"\n{self._drawn(place)}"

    def move(self, direction: str) -> str:
        """Move one field.

        Args:
            direction: "left", "down", "right" or "up".

        Returns:
            The map, with your place as @, and whether the walk is over.
        """
        if self._is_over:
            return "the walk is over"
        action = DIRECTIONS.index(direction)
        place, reward, is_terminated, is_truncated, _ = self._env.step(action)
        self._reward += float(reward)
        self._is_over = is_terminated or is_truncated
        return self._drawn(place) + ("the walk is over" if self._is_over else "")

    def _drawn(self, place: int) -> str:
        rows = [[field.decode() for field in row] for row in self._env.unwrapped.desc]
        rows[place // len(rows[0])][place % len(rows[0])] = "@"
        return "".join("".join(row) + "\n" for row in rows)

    def get_reward(self) -> float:
        """Return 1 for a walk that reached the goal, else 0."""
        return self._reward


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gymnasium"))
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
    row = {"prompt": [{"role": "user", "content": RULES}]}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
        ),
        environment_factory=FrozenLake,
        train_dataset=Dataset.from_list(
            [row | {"seed": seed} for seed in range(args.max_steps * args.batch_size)]
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=MAX_MOVES,
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
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(tool_timeout_seconds=60)):
        trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        print(f"report {write_report(args.output_dir / 'cb_rollout')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
