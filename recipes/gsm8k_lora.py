"""Grade-school mathematics with LoRA: gsm8k_grpo.py, with only adapters trained.

Rollouts run a copy with the adapters merged, on a GPU that has room for it and where FSDP2 or
ZeRO-3 shards the model; elsewhere the training module, with the adapters unmerged.

Launch:   accelerate launch recipes/gsm8k_lora.py --model Qwen/Qwen3-4B --max-steps 200
          accelerate launch --config_file recipes/accelerate/fsdp2.yaml recipes/gsm8k_lora.py
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

QUESTION = "{}\nThink step by step, and end with #### and the number alone."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARKED = re.compile(r"####\s*(-?[\d,.]*\d)|\\boxed\{\s*(-?[\d,.]*\d)\s*\}")


def final_number(text: str) -> float | None:
    """Return the final number of a solution; None if it has none."""
    marked = [first or second for first, second in MARKED.findall(text)]
    found = marked or NUMBER.findall(text)
    try:
        return float(found[-1].replace(",", "")) if found else None
    except ValueError:
        return None


def reward(completions, answer, **_) -> list[float]:
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [
        float((found := final_number(text)) is not None and found == final_number(gold))
        for text, gold in zip(texts, answer, strict=True)
    ]


def load_questions(name: str, split: str, is_chat: bool) -> Dataset:
    """Load questions and answers of a hub data set, or of a local JSONL with the same keys."""
    if Path(name).exists():
        questions = load_dataset("json", data_files=name, split="train")
    else:
        questions = load_dataset(name, "main", split=split)

    def as_prompt(row):
        text = QUESTION.format(row["question"])
        return {"prompt": [{"role": "user", "content": text}] if is_chat else text}

    return questions.map(as_prompt, remove_columns=["question"])


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--dataset", default="openai/gsm8k", help="hub id or local JSONL")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/gsm8k_lora"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--max-memory-percent", type=float, default=0.4)
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    has_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=load_questions(args.dataset, "train", tokenizer.chat_template is not None),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.lora_rank, target_modules="all-linear"),
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
