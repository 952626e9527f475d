"""A small model learns to finish its sums: TRL's stock GRPOTrainer, rolled out by cb_rollout.

The task is a chain of sums, read from left to right, to be worked out step by step: "7*2-5+8" is
"7*2=14-5=9+8=17". A Qwen3 of 0.4 million parameters, with one token a character, is first trained
on such workings. Every step in them is right, but many break off after the second, and so does the
model. GRPO rewards the final number and nothing else, and the model learns to carry on to the end.
Its completions then differ in length by six times, which is what continuous batching is for.

Launch:   python recipes/arithmetic_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about one
Prints last (on two cores with AVX-512; accuracy is of sampled answers to problems that no training
saw):

    held-out accuracy                     40.8% ->  79.5%
    rollout tokens/s                     31,469
    rollout share of step time              38%
    largest |log-probability difference| 1.1e-05
    report                               runs/arithmetic/cb_rollout/report.html

The difference is between the log-probabilities of sampled tokens and those that the trainer's own
forward gives them, every tenth step. Both are float32, summed in another order: 1e-6 to 1e-5 is
normal, and a few 1e-5 at most. With --numerics bitwise both are summed in one order, and it is 0.
"""

import argparse
import random
import re
import sys
import warnings
import zlib
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, ProgressCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

# transformers 5.23 renamed the setting, and warns of its old name.
IS_RENAMED = hasattr(GRPOConfig, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if IS_RENAMED else "gradient_checkpointing"
# trl 1.16 reads a name of transformers that it deprecates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *"0123456789+-*="]
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MAX_TERMS, MAX_VALUE = 8, 20
# The longest working has 36 tokens and EOS; the rest is room for a model that errs.
MAX_COMPLETION = 44
# Share of the workings that break off after two steps, at the end of the warm start.
BREAK_RATE = 0.65
WARMUP_STEPS, GRPO_STEPS = 600, 40
REQUIRED_GAIN, MAX_DRIFT = 0.20, 5e-5


class Problem(NamedTuple):
    """A chain of sums, its working, and its result."""

    prompt: str
    worked: str
    answer: int

    @property
    def is_held_out(self) -> bool:
        """Tell whether the problem is held out, by its hash, so that the sides never overlap."""
        return zlib.crc32(self.prompt.encode()) % 8 == 0


def draw_problem(rng: random.Random) -> Problem:
    value = rng.randint(1, 9)
    prompt = worked = str(value)
    for _ in range(rng.randint(2, MAX_TERMS) - 1):
        term = rng.randint(1, 9)
        results = {sign: apply(value, term) for sign, apply in OPERATIONS.items()}
        sign = rng.choice([sign for sign in results if 0 <= results[sign] <= MAX_VALUE])
        value = results[sign]
        prompt, worked = f"{prompt}{sign}{term}", f"{worked}{sign}{term}={value}"
    return Problem(prompt, worked, value)


def draw_problems(rng: random.Random, count: int, held_out: bool) -> list[Problem]:
    """Draw `count` different problems from one side of the split."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng)
        if problem.is_held_out == held_out:
            found[problem.prompt] = problem
    return list(found.values())


def is_right(completion: str, answer: int) -> bool:
    """Tell whether the completion ends in the right number."""
    last = re.search(r"=(\d+)$", completion)
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
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def first_steps(worked: str) -> str:
    """Return the first two steps of a working."""
    return re.findall(r"^(?:.*?=\d+){1,2}", worked)[0]


def create_batch(tokenizer, problems: list[Problem], workings: list[str]):
    """Return the input of a forward; only workings and their ends are learned."""
    texts = [p.prompt + working + "<eos>" for p, working in zip(problems, workings, strict=True)]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    batch["labels"] = batch["input_ids"].clone()
    for row, working in zip(batch["labels"], workings, strict=True):
        row[: -len(working) - 1] = -100
    return batch


def warm_start(model, tokenizer, num_steps: int, rng: random.Random) -> None:
    """Train on workings, of which more and more break off after the second step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in tqdm(range(num_steps), desc="warm start", unit="step"):
        problems = draw_problems(rng, 64, held_out=False)
        break_rate = BREAK_RATE * step / num_steps
        workings = [
            first_steps(problem.worked) if rng.random() < break_rate else problem.worked
            for problem in problems
        ]
        model(**create_batch(tokenizer, problems, workings)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class RewardBar(ProgressCallback):
    """Show the reward beside the progress bar, in place of every step's metrics."""

    def on_log(self, args, state, control, logs, **_):
        """Show the reward of a step."""
        if "reward" in logs:
            self.training_bar.set_postfix(reward=f"{logs['reward']:.2f}", refresh=False)


def create_trainer(model, tokenizer, train, held_out, args) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([problem._asdict() for problem in train]),
        eval_dataset=Dataset.from_list([problem._asdict() for problem in held_out]),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=128,
            per_device_eval_batch_size=256,
            num_generations=8,
            num_generations_eval=1,
            max_completion_length=MAX_COMPLETION,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            **{CHECKPOINTING: False},
        ),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(RewardBar)
    return trainer


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=GRPO_STEPS, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    parser.add_argument("--numerics", choices=["fast", "bitwise"], default="fast")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, args.warmup_steps, rng)

    trainer = create_trainer(model, tokenizer, train, held_out, args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(numerics=args.numerics)):
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        after = trainer.evaluate()["eval_reward"]

    def logged(name: str) -> list[float]:
        return [logs[name] for logs in trainer.state.log_history if name in logs]

    drift = max(logged("rollout/logprob_drift_max"))
    print()
    print(f"held-out accuracy                    {before:6.1%} -> {after:6.1%}")
    print(f"rollout tokens/s                     {mean(logged('rollout/tokens_per_second')):6,.0f}")
    print(f"rollout share of step time           {mean(logged('rollout/step_share')):6.0%}")
    print(f"largest |log-probability difference| {f'{drift:.1e}' if drift else '0'}")
    print(f"report                               {write_report(args.output_dir / 'cb_rollout')}")

    max_drift = 0 if args.numerics == "bitwise" else MAX_DRIFT
    if args.warmup_steps < WARMUP_STEPS or args.max_steps < GRPO_STEPS:
        return int(drift > max_drift)
    return int(after - before < REQUIRED_GAIN or drift > max_drift)


if __name__ == "__main__":
    sys.exit(main())
