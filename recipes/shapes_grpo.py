"""Counting shapes in pictures on a real checkpoint: TRL's stock GRPOTrainer on cb_rollout.

The GSM8K recipe with images: any vision-language model, and pictures drawn when it starts. A
picture holds circles and squares in three colours; the question is how many there are of one kind.
A completion is rewarded when the last number in it is right.

Launch:   accelerate launch recipes/shapes_grpo.py --model Qwen/Qwen2.5-VL-3B-Instruct
          accelerate launch recipes/shapes_grpo.py --model ./checkpoint
          accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/shapes_grpo.py
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import random
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

QUESTION = "How many {} {}s are in the picture? Answer with the number alone."
COLOURS, SHAPES = ("red", "green", "blue"), ("circle", "square")
# Pixels of a side; shapes stand in cells, so that none hides another.
SIDE, CELLS = 224, 4
MAX_SHAPES = 12


def draw_row(rng: random.Random) -> dict:
    """Draw a picture, and ask for one kind of its shapes."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    draw, size = ImageDraw.Draw(picture), SIDE // CELLS
    places = rng.sample(range(CELLS * CELLS), rng.randint(1, MAX_SHAPES))
    kinds = [(rng.choice(COLOURS), rng.choice(SHAPES)) for _ in places]
    for place, (colour, shape) in zip(places, kinds, strict=True):
        margin = rng.randint(4, size // 3)
        left, top = place % CELLS * size + margin, place // CELLS * size + margin
        corners = (left, top, left + size - 2 * margin, top + size - 2 * margin)
        (draw.ellipse if shape == "circle" else draw.rectangle)(corners, fill=colour)
    asked = rng.choice(kinds)
    prompt = [{"role": "user", "content": QUESTION.format(*asked)}]
    return {"prompt": prompt, "image": picture, "answer": kinds.count(asked)}


def reward(completions, answer, **_) -> list[float]:
    numbers = [re.findall(r"\d+", completion[-1]["content"]) for completion in completions]
    return [
        float(bool(found) and int(found[-1]) == wanted)
        for found, wanted in zip(numbers, answer, strict=True)
    ]


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="Qwen/Qwen2.5-VL-3B-Instruct", help="hub id or local directory"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-pictures", type=int, default=1000)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--max-memory-percent", type=float, default=0.4)
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    has_gpu = torch.cuda.is_available()
    processor = AutoProcessor.from_pretrained(args.model, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(
        args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
    )
    rng = random.Random(0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([draw_row(rng) for _ in range(args.num_pictures)]),
        processing_class=processor,
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
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
    config = cb_rollout.RolloutConfig(max_memory_percent=args.max_memory_percent)
    with cb_rollout.attach(trainer, config):
        trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        print(f"report {write_report(args.output_dir / 'cb_rollout')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
