"""Online DPO: a checkpoint learns to prefer the better of two completions that it has sampled.

TRL's stock OnlineDPOTrainer, rolled out by cb_rollout. A reward function compares the two; here the
shorter completion that ends is better.

Launch:   accelerate launch recipes/online_dpo.py --model Qwen/Qwen3-0.6B --max-steps 200
          accelerate launch recipes/online_dpo.py --model ./checkpoint --dataset ./train.jsonl
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: the mean length of the completions in the first and in the last step
"""

import argparse
import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

import cb_rollout


def reward(completions, **_) -> list[float]:
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [1 / (1 + len(text)) for text in texts]


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
    parser.add_argument("--dataset", default="openai/gsm8k", help="hub id or local JSONL")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/online_dpo"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="pairs a process and step")
    parser.add_argument("--max-new-tokens", type=int, default=256)
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
    trainer = OnlineDPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=load_prompts(args.dataset, tokenizer.chat_template is not None),
        processing_class=tokenizer,
        args=OnlineDPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens,
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
    steps = [logs for logs in trainer.state.log_history if "rollout/tokens" in logs]
    lengths = [logs["rollout/tokens"] / (2 * args.batch_size) for logs in steps]
    if trainer.accelerator.is_main_process:
        print(f"tokens a completion {lengths[0]:.0f} -> {lengths[-1]:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
