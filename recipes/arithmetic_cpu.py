"""A small model learns to show its working: TRL's stock GRPOTrainer, rolled out by cb_rollout.

The task is a chain of sums, read from left to right: "7*2-5+8" is 17. A Qwen3 of 0.4 million
parameters, with one token a character, is first trained on solved chains. Every solution is right,
but most give the bare result, "~17"; the others work it out, "7*2=14-5=9+8=17". A long chain cannot
be done in the head, so the model starts out answering at once and mostly wrong. GRPO then rewards
the final number and nothing else, and the model finds that working it out is what pays: its
completions grow from 3 tokens to between 7 and 50, which is what continuous batching is for.

Launch:   python recipes/arithmetic_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network
Minutes:  about four
Prints last:
    held-out accuracy, greedy          18.4% ->  86.2%
    held-out accuracy, temperature 1   26.0% ->  84.0%
    rollout tokens/s                   4,000
    rollout share of step time         50%
    largest |log-probability diff.|    2.1e-06
    report                             runs/arithmetic/cb_rollout/report.html
"""

import argparse
import os
import random
import re
import sys
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.report import write_report

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *"0123456789+-*=~"]
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MAX_TERMS, MAX_VALUE = 10, 50
MAX_COMPLETION = 56
# The longest working is 47 tokens and its end; the rest is room for a model that errs.
FULL_STEPS, REQUIRED_GAIN, MAX_DRIFT = 150, 0.20, 1e-5


class Problem(NamedTuple):
    """A chain of sums, its working, and its result."""

    prompt: str
    worked: str
    answer: int

    @property
    def is_held_out(self) -> bool:
        """Whether training never sees it; a property of the problem, so the sets cannot overlap."""
        return zlib.crc32(self.prompt.encode()) % 8 == 0


def draw_problem(rng: random.Random) -> Problem:
    value = rng.randint(1, 9)
    prompt = worked = str(value)
    for _ in range(rng.randint(2, MAX_TERMS) - 1):
        term = rng.randint(1, 9)
        results = {sign: apply(value, term) for sign, apply in OPERATIONS.items()}
        sign = rng.choice([sign for sign in "+-*" if 0 <= results[sign] <= MAX_VALUE])
        value = results[sign]
        prompt, worked = f"{prompt}{sign}{term}", f"{worked}{sign}{term}={value}"
    return Problem(prompt, worked, value)


def draw_problems(rng: random.Random, count: int, held_out: bool) -> list[Problem]:
    """`count` different problems of one side of the split."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng)
        if problem.is_held_out == held_out:
            found[problem.prompt] = problem
    return list(found.values())


def is_right(completion: str, answer: int) -> bool:
    """Whether the completion ends in the number asked for."""
    last = re.search(r"[=~](\d+)$", completion)
    return last is not None and int(last[1]) == answer


def reward(completions: list[str], answer: list[int], **_) -> list[float]:
    return [float(is_right(text, wanted)) for text, wanted in zip(completions, answer, strict=True)]


def create_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def create_model() -> Qwen3ForCausalLM:
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    ids = {"vocab_size": len(WORDS), "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    return Qwen3ForCausalLM(
        Qwen3Config(**shape, **heads, **ids, tie_word_embeddings=True, max_position_embeddings=256)
    )


def packed_batch(rng: random.Random, bare_share: float) -> dict[str, torch.Tensor]:
    """Solved training problems, as many to a row as fit; positions restart, so none sees another."""
    rows, width = 8, 256
    batch = {
        "input_ids": torch.full((rows, width), PAD),
        "labels": torch.full((rows, width), -100),
        "position_ids": torch.arange(width).repeat(rows, 1),
    }
    for row in range(rows):
        start = 0
        while True:
            problem = draw_problem(rng)
            if problem.is_held_out:
                continue
            solution = f"~{problem.answer}" if rng.random() < bare_share else problem.worked
            prompt = [WORDS.index(character) for character in problem.prompt]
            target = [WORDS.index(character) for character in solution] + [EOS]
            middle, end = start + len(prompt), start + len(prompt) + len(target)
            batch["position_ids"][row, start:] = torch.arange(width - start)
            if end > width:
                break
            batch["input_ids"][row, start:end] = torch.tensor(prompt + target)
            batch["labels"][row, middle:end] = torch.tensor(target)
            start = end
    return batch


def warm_start(model: Qwen3ForCausalLM, steps: int, rng: random.Random) -> None:
    """Plain supervised training: first on workings alone, then ever more bare results among them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    model.train()
    with tqdm(range(steps), desc="warm start", unit="step") as bar:
        for step in bar:
            done = step / steps
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 30) * (1 - 0.9 * done)
            loss = model(**packed_batch(rng, max(0.0, 2 * done - 1.2)), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def accuracy(generator, tokenizer, problems: list[Problem], temperature: float) -> float:
    """Share of problems solved, each tried once; temperature 0 is greedy."""
    outputs = generator.generate_batch(
        tokenizer([problem.prompt for problem in problems])["input_ids"],
        sampling_params=cb_rollout.SamplingParams(
            temperature=temperature, max_new_tokens=MAX_COMPLETION
        ),
    )
    tokens = [output.generated_tokens for output in outputs.values()]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(map(is_right, texts, [problem.answer for problem in problems])) / len(problems)


class ProgressBar(TrainerCallback):
    """One line that shows the reward rise, instead of every step's metrics."""

    def on_train_begin(self, args, state, control, **_):
        self.bar = tqdm(total=state.max_steps, desc="GRPO", unit="step")

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            length = logs["completions/mean_length"]
            self.bar.set_postfix(reward=f"{logs['reward']:.2f}", tokens=f"{length:.0f}")
            self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


def create_trainer(model, tokenizer, train, held_out, args) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([problem._asdict() for problem in train]),
        eval_dataset=Dataset.from_list([problem._asdict() for problem in held_out]),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=MAX_COMPLETION,
            temperature=1.0,
            learning_rate=1e-4,
            warmup_steps=5,
            lr_scheduler_type="linear",
            loss_type="dapo",
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            eval_strategy="steps",
            eval_steps=max(1, args.max_steps // 2),
            per_device_eval_batch_size=128,
            logging_steps=1,
            save_strategy="no",
            report_to="wandb",
            run_name="arithmetic_cpu",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressBar())
    return trainer


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--warmup-steps", type=int, default=600, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=FULL_STEPS, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_DIR", str(args.output_dir))

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, args.warmup_steps, rng)

    trainer = create_trainer(model, tokenizer, train, held_out[:16], args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig()) as generator:
        before = [accuracy(generator, tokenizer, held_out, t) for t in (0.0, 1.0)]
        trainer.train()
        generator.sync_weights()
        after = [accuracy(generator, tokenizer, held_out, t) for t in (0.0, 1.0)]

    steps = [logs for logs in trainer.state.log_history if "reward" in logs]
    drift = max(logs["sampling/sampling_logp_difference/max"] for logs in steps)
    speed = sum(logs["rollout/tokens_per_second"] for logs in steps) / len(steps)
    share = sum(logs["rollout/step_share"] for logs in steps) / len(steps)
    report = write_report(args.output_dir / "cb_rollout")
    print(f"held-out accuracy, greedy          {before[0]:6.1%} -> {after[0]:6.1%}")
    print(f"held-out accuracy, temperature 1   {before[1]:6.1%} -> {after[1]:6.1%}")
    print(f"rollout tokens/s                   {speed:6,.0f}")
    print(f"rollout share of step time         {share:6.1%}")
    print(f"largest |log-probability diff.|    {drift:.1e}")
    print(f"report                             {report}")
    is_full_length = args.max_steps >= FULL_STEPS
    has_learned = after[0] - before[0] >= REQUIRED_GAIN and drift <= MAX_DRIFT
    return int(is_full_length and not has_learned)


if __name__ == "__main__":
    sys.exit(main())
