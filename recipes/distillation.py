"""On-policy distillation: a small checkpoint learns from a large one on its own completions.

TRL's stock DistillationTrainer, rolled out by cb_rollout. The teacher scores every token that the
student samples; no reward is needed, and no answers.

Launch:   accelerate launch recipes/distillation.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B
          accelerate launch recipes/distillation.py --model ./a --teacher ./b --dataset ./t.jsonl
Hardware: one GPU that holds both models, or several; a CPU for tiny checkpoints
Prints last: the loss of the first and of the last step
"""

import argparse
import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

import cb_rollout


def load_prompts(name: str, is_chat: bool) -> Dataset:
    """Load the questions of a hub data set in GSM8K's format, or of a local JSONL."""
    if Path(name).exists():
        questions = load_dataset("json", data_files=name, split="train")
    else:
        questions = load_dataset(name, "main", split="train")

    def as_prompt(row):
        text = row["question"]
        return {"prompt": [{"role": "user", "content": text}] if is_chat else text}

    return questions.map(as_prompt, remove_columns=questions.column_names)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--teacher", default="Qwen/Qwen3-8B", help="hub id or local directory")
    parser.add_argument("--dataset", default="openai/gsm8k", help="hub id or local JSONL")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--max-memory-percent", type=float, default=0.3)
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    has_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
    )
    trainer = DistillationTrainer(
        model=model,
        teacher_model=args.teacher,
        train_dataset=load_prompts(args.dataset, tokenizer.chat_template is not None),
        processing_class=tokenizer,
        args=DistillationConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            max_completion_length=args.max_completion_length,
            learning_rate=args.learning_rate,
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
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    if trainer.accelerator.is_main_process:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
