"""A small model learns to finish its sums: TRL's stock GRPOTrainer, rolled out by cb_rollout.

The task is a chain of sums, read from left to right, to be worked out step by step: "7*2-5+8" is
"7*2=14-5=9+8=17". A Qwen3 of 0.4 million parameters, with one token a character, is first trained
on such workings. Every step in them is right, but most break off after the second, and so does the
model: it starts out right on short chains only. GRPO rewards the final number and nothing else, and
the model learns to carry on to the end. Its completions then differ in length by six times, which
is what continuous batching is for.

Launch:   python recipes/arithmetic_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about two
Prints last (greedy and sampled accuracy are both on problems that no training saw):

    held-out accuracy, greedy             27.4% ->  97.8%
    held-out accuracy, sampled            47.6% ->  96.2%
    rollout tokens/s                     15,416
    rollout share of step time              25%
    largest |log-probability difference| 4.5e-06
    report                               runs/arithmetic/cb_rollout/report.html
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

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from transformers.masking_utils import sdpa_mask
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *"0123456789+-*="]
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MAX_TERMS, MAX_VALUE = 8, 20
# The longest working has 36 tokens and EOS; the rest is room for a model that errs.
MAX_COMPLETION = 44
# Share of the longer workings that break off after two steps, at the end of the warm start.
BREAK_RATE = 0.65
# A policy that hesitates between unlikely tokens amplifies the rounding of its own forward.
MIN_P = 0.5
# Noise on the warm start's embeddings, as a share of their standard deviation. A model that is
# robust to it does not amplify rounding.
BLUR = 0.4
WARMUP_STEPS, GRPO_STEPS = 900, 40
REQUIRED_GAIN, MAX_DRIFT = 0.20, 1e-5


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


def exact_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Compute attention in float64, where padding hardly changes a row's rounding."""
    groups = query.shape[1] // key.shape[1]
    output = scaled_dot_product_attention(
        query.double(),
        key.double().repeat_interleave(groups, 1),
        value.double().repeat_interleave(groups, 1),
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
    )
    return output.transpose(1, 2).to(query.dtype).contiguous(), None


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


def create_model() -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(
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
    # At their initial value of 1 these norms limit how sharp attention gets.
    for layer in model.model.layers:
        layer.self_attn.q_norm.requires_grad_(False)
        layer.self_attn.k_norm.requires_grad_(False)
    return model


def broken_off(worked: str, rate: float, rng: random.Random) -> str:
    """Return a working that may break off after the second step."""
    ends = [match.end() for match in re.finditer(r"=\d+", worked)]
    return worked[: ends[1]] if len(ends) > 2 and rng.random() < rate else worked


def packed_batch(rng: random.Random, break_rate: float) -> dict[str, torch.Tensor]:
    """Pack solved training problems into rows; positions restart, so none attends to another."""
    rows, width = 8, 256
    input_ids = torch.full((rows, width), PAD)
    labels = torch.full((rows, width), -100)
    position_ids = torch.arange(width).repeat(rows, 1)
    for row in range(rows):
        start = 0
        while True:
            problem = draw_problem(rng)
            if problem.is_held_out:
                continue
            working = broken_off(problem.worked, break_rate, rng)
            tokens = [WORDS.index(character) for character in problem.prompt + working] + [EOS]
            end = start + len(tokens)
            position_ids[row, start:] = torch.arange(width - start)
            if end > width:
                break
            input_ids[row, start:end] = torch.tensor(tokens)
            middle = start + len(problem.prompt)
            labels[row, middle:end] = input_ids[row, middle:end]
            start = end
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def warm_start(model: Qwen3ForCausalLM, num_steps: int, rng: random.Random) -> None:
    """Train on workings, of which more and more break off after the second step."""

    def blurred(_, __, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings + BLUR * embeddings.detach().std() * torch.randn_like(embeddings)

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.5)
    hook = model.get_input_embeddings().register_forward_hook(blurred)
    model.train()
    with tqdm(range(num_steps), desc="warm start", unit="step") as bar:
        for step in bar:
            done = step / num_steps
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 30) * (1 - 0.9 * done)
            batch = packed_batch(rng, BREAK_RATE * max(0.0, (done - 0.6) / 0.4))
            targets = batch.pop("labels")[:, 1:].flatten()
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss = cross_entropy(logits, targets, label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    hook.remove()


def accuracy(generator, tokenizer, problems: list[Problem], temperature: float) -> float:
    """Return the share of solved problems, one try each; temperature 0 is greedy."""
    outputs = generator.generate_batch(
        tokenizer([problem.prompt for problem in problems])["input_ids"],
        sampling_params=cb_rollout.SamplingParams(
            temperature=temperature, min_p=MIN_P, max_new_tokens=MAX_COMPLETION
        ),
    )
    tokens = [output.generated_tokens for output in outputs.values()]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(map(is_right, texts, [problem.answer for problem in problems])) / len(problems)


class RewardBar(TrainerCallback):
    """Show a progress bar with the reward, in place of every step's metrics."""

    def on_train_begin(self, args, state, control, **_):
        """Create the bar."""
        self.bar = tqdm(total=state.max_steps, desc="GRPO", unit="step")

    def on_log(self, args, state, control, logs, **_):
        """Update the bar with a step."""
        if "reward" in logs:
            length = logs["completions/mean_length"]
            self.bar.set_postfix(
                reward=f"{logs['reward']:.2f}", tokens=f"{length:.0f}", refresh=False
            )
            self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args, state, control, **_):
        """Close the bar."""
        self.bar.close()


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
            num_generations=8,
            max_completion_length=MAX_COMPLETION,
            temperature=1.0,
            min_p=MIN_P,
            learning_rate=4e-5,
            warmup_steps=5,
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
    trainer.add_callback(RewardBar())
    return trainer


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/arithmetic"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=GRPO_STEPS, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # Offline, wandb needs neither network nor account; WANDB_MODE=online overrides it.
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_DIR", str(args.output_dir))
    # trl 1.16 uses names that transformers 5.23 deprecates; a user cannot change that.
    warnings.filterwarnings("ignore", category=FutureWarning)

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, args.warmup_steps, rng)
    model.set_attn_implementation("exact")

    trainer = create_trainer(model, tokenizer, train, held_out[:16], args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig()) as generator:
        before = [accuracy(generator, tokenizer, held_out, t) for t in (0.0, 1.0)]
        trainer.train()
        generator.sync_weights()
        after = [accuracy(generator, tokenizer, held_out, t) for t in (0.0, 1.0)]

    steps = [logs for logs in trainer.state.log_history if "reward" in logs]
    drift = max(logs.get("rollout/logprob_drift_max", 0.0) for logs in steps)
    speed = sum(logs["rollout/tokens_per_second"] for logs in steps) / len(steps)
    share = sum(logs["rollout/step_share"] for logs in steps) / len(steps)
    report = write_report(args.output_dir / "cb_rollout")
    print()
    print(f"held-out accuracy, greedy            {before[0]:6.1%} -> {after[0]:6.1%}")
    print(f"held-out accuracy, sampled           {before[1]:6.1%} -> {after[1]:6.1%}")
    print(f"rollout tokens/s                     {speed:6,.0f}")
    print(f"rollout share of step time           {share:6.0%}")
    print(f"largest |log-probability difference| {drift:.1e}")
    print(f"report                               {report}")

    if args.warmup_steps < WARMUP_STEPS or args.max_steps < GRPO_STEPS:
        return 0
    return int(after[0] - before[0] < REQUIRED_GAIN or drift > MAX_DRIFT)


if __name__ == "__main__":
    sys.exit(main())
