"""Asynchronous GRPO on the CPU demo's task: generation and training overlap, in one process.

TRL's stock AsyncGRPOTrainer, rolled out by cb_rollout without a server: the engine generates in its
own thread, from its own copy of the weights, while the trainer computes losses on completions that
are up to two versions old. The synchronous GRPOTrainer then runs the same steps from the same
start, for comparison.

Launch:   python recipes/async_arithmetic.py
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about four
Prints last (held-out accuracy, sampled, before and after):

    asynchronous   41.6% ->  81.0%  in  18 s
    synchronous    41.6% ->  77.4%  in  39 s
"""

import argparse
import os
import random
import time
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from arithmetic_cpu import (
    CHECKPOINTING,
    MAX_COMPLETION,
    WARMUP_STEPS,
    create_model,
    create_tokenizer,
    draw_problems,
    is_right,
    reward,
    warm_start,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import cb_rollout
from cb_rollout.integrations.async_grpo.worker import AsyncRollouts

BATCH, GROUP = 128, 8


def shared_settings(args, name: str) -> dict:
    """Return the arguments of both trainers."""
    return {
        "output_dir": str(args.output_dir / name),
        "seed": args.seed,
        "max_steps": args.max_steps,
        "per_device_train_batch_size": BATCH,
        "num_generations": GROUP,
        "max_completion_length": MAX_COMPLETION,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        CHECKPOINTING: False,
    }


def run_asynchronous(checkpoint: str, tokenizer, train: Dataset, args):
    config = AsyncGRPOConfig(
        **shared_settings(args, "asynchronous"), token_budget=0, max_staleness=2
    )
    rollouts = AsyncRollouts(checkpoint, config, train, reward, processing_class=tokenizer)
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=config,
        train_dataset=train,
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def run_synchronous(checkpoint: str, tokenizer, train: Dataset, args):
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=train,
        args=GRPOConfig(
            **shared_settings(args, "synchronous"),
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
        ),
    )
    trainer.remove_callback(PrinterCallback)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(verify_every_steps=0)):
        trainer.train()
    return trainer


def held_out_accuracy(model, tokenizer, problems) -> float:
    model.set_attn_implementation("sdpa")
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    params = cb_rollout.SamplingParams(max_new_tokens=MAX_COMPLETION)
    with cb_rollout.RolloutGenerator(model, cb_rollout.RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch(prompts, sampling_params=params).values()
    tokens = [output.generated_tokens for output in outputs]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(map(is_right, texts, [problem.answer for problem in problems])) / len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/async_arithmetic"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=40, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    train = Dataset.from_list([problem._asdict() for problem in train])
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, args.warmup_steps, rng)
    checkpoint = str(args.output_dir / "start")
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    before = held_out_accuracy(model, tokenizer, held_out)

    for name, run in (("asynchronous", run_asynchronous), ("synchronous", run_synchronous)):
        started = time.perf_counter()
        trainer = run(checkpoint, tokenizer, train, args)
        seconds = time.perf_counter() - started
        after = held_out_accuracy(trainer.model, tokenizer, held_out)
        print(f"{name:<13} {before:6.1%} -> {after:6.1%}  in {seconds:3.0f} s", flush=True)


if __name__ == "__main__":
    main()
