"""A small model learns to spell words backward: problems and verifier of reasoning-gym.

reasoning-gym generates a hundred kinds of problems, and scores answers to them. Here a Qwen3 of 0.4
million parameters, with one token a character, is trained on answers for a short while, until it
spells some of them right. GRPO then trains it on reasoning-gym's own score alone. No held-out
problem is in any training.

Install:  pip install reasoning-gym
Launch:   python recipes/reasoning_gym_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about five
Prints last (accuracy is of sampled answers to problems that no training saw):

    held-out accuracy 35.2% -> 54.8%
"""

import argparse
import json
import random
import string
import sys
import zlib
from pathlib import Path

import reasoning_gym
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

# transformers 5.23 renamed the setting, and warns of its old name.
IS_RENAMED = hasattr(GRPOConfig, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if IS_RENAMED else "gradient_checkpointing"

# A data set of reasoning-gym and its settings.
TASK = {"name": "spell_backward", "max_word_len": 6}
PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *string.printable]
MAX_ANSWER = 12
WARMUP_STEPS, GRPO_STEPS = 500, 120


def is_held_out(entry: dict) -> bool:
    """Tell whether a problem is held out, by its hash, so that the sides never overlap."""
    return zlib.crc32(entry["question"].encode()) % 8 == 0


def draw_problems(count: int, seed: int, held_out: bool) -> list[dict]:
    """Draw `count` different problems from one side of the split."""
    found: dict[str, dict] = {}
    problems = reasoning_gym.create_dataset(**TASK, size=64 * count, seed=seed)
    for entry in problems:
        if is_held_out(entry) == held_out:
            found[entry["question"]] = entry
        if len(found) == count:
            break
    return list(found.values())


def score(completions: list[str], entry: list[str], **_) -> list[float]:
    """Return the score that reasoning-gym gives each answer, from 0 to 1."""
    verifier = reasoning_gym.create_dataset(**TASK, size=1)
    return [
        verifier.score_answer(text, json.loads(problem))
        for text, problem in zip(completions, entry, strict=True)
    ]


def is_right(completions: list[str], entry: list[str], **_) -> list[float]:
    """Return 1 where an answer is the right one; logged, and no part of the reward."""
    return [
        float(text == json.loads(problem)["answer"])
        for text, problem in zip(completions, entry, strict=True)
    ]


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
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def warm_start(model, tokenizer, problems: list[dict], num_steps: int, rng: random.Random) -> None:
    """Train on right answers; only they and their ends are learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in tqdm(range(num_steps), desc="warm start", unit="step", mininterval=10):
        batch_problems = rng.choices(problems, k=64)
        texts = [f"{entry['question']}{entry['answer']}<eos>" for entry in batch_problems]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        batch["labels"] = batch["input_ids"].clone()
        for row, entry in zip(batch["labels"], batch_problems, strict=True):
            row[: -len(entry["answer"]) - 1] = -100
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def as_rows(problems: list[dict]) -> Dataset:
    return Dataset.from_list(
        [{"prompt": entry["question"], "entry": json.dumps(entry)} for entry in problems]
    )


def create_trainer(model, tokenizer, train, held_out, args) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[score, is_right],
        train_dataset=as_rows(train),
        eval_dataset=as_rows(held_out),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=128,
            per_device_eval_batch_size=256,
            num_generations=8,
            num_generations_eval=1,
            reward_weights=[1.0, 0.0],
            max_completion_length=MAX_ANSWER,
            learning_rate=3e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            **{CHECKPOINTING: False},
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/reasoning_gym"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=GRPO_STEPS, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(4000, args.seed, held_out=False)
    held_out = draw_problems(args.num_held_out, args.seed, held_out=True)
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, train, args.warmup_steps, rng)

    trainer = create_trainer(model, tokenizer, train, held_out, args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(loss_forward="packed")):
        before = trainer.evaluate()["eval_rewards/is_right/mean"]
        trainer.train()
        after = trainer.evaluate()["eval_rewards/is_right/mean"]
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
