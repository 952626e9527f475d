"""Tools on a real checkpoint: TRL's `tools`, rolled out by cb_rollout.

gsm8k_grpo.py plus a tool: the model may call a calculator any number of times, in its chat
template's own format, before its final answer. Each turn reuses the keys of the previous ones. The
chat template must support tools, as those of Qwen3 and Llama 3.1 do.

Launch:   accelerate launch recipes/tools_grpo.py --model Qwen/Qwen3-0.6B --max-steps 200
          accelerate launch recipes/tools_grpo.py --model ./checkpoint --dataset ./train.jsonl
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import ast
import operator
import re
import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

QUESTION = "{}\nUse the calculator for every calculation, and end with #### and the number alone."
MARKED = re.compile(r"####\s*(-?[\d,.]*\d)")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, as "(3 + 4) * 12".

    Returns:
        The result.
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{expression!r} is not arithmetic")

    return f"{value(ast.parse(expression, mode='eval').body):g}"


def reward(completions, answer, **_) -> list[float]:
    """Return 1 where the last turn ends in the gold number."""
    texts = [turns[-1].get("content") or "" for turns in completions]
    found = [MARKED.findall(text) for text in texts]
    gold = [MARKED.findall(text) for text in answer]
    return [
        float(bool(ours) and bool(theirs) and number(ours[-1]) == number(theirs[-1]))
        for ours, theirs in zip(found, gold, strict=True)
    ]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def load_questions(name: str) -> Dataset:
    """Load questions and answers of a hub data set, or of a local JSONL with the same keys."""
    if Path(name).exists():
        questions = load_dataset("json", data_files=name, split="train")
    else:
        questions = load_dataset(name, "main", split="train")

    def as_prompt(row):
        return {"prompt": [{"role": "user", "content": QUESTION.format(row["question"])}]}

    return questions.map(as_prompt, remove_columns=["question"])


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--dataset", default="openai/gsm8k", help="hub id or local JSONL")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/tools"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=1024, help="of all turns")
    parser.add_argument("--max-calls", type=int, default=8, help="turns with calls")
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
        reward_funcs=reward,
        tools=[calculate],
        train_dataset=load_questions(args.dataset),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=args.max_calls,
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
