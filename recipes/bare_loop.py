"""GRPO in plain PyTorch: sample groups, score them, step, and sync the weights.

No trainer class: the whole loop is in this file. The task is the CPU demo's: "7*2-5+8" is
to be worked out as "7*2=14-5=9+8=17", and only the final number is rewarded. A Qwen3 of 0.4 million
parameters first imitates workings that mostly break off after two steps; GRPO teaches it to go on.

Launch:   python recipes/bare_loop.py
Hardware: two CPU cores or a GPU, 1 GiB of memory, no network
Minutes:  about two
Prints last:

    held-out accuracy 57.6% -> 91.2%
"""

import argparse
import random
import re
import zlib

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, packed_logprobs

PAD, EOS = 0, 1
CHARACTERS = "#.0123456789+-*="
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
NUM_PROMPTS, GROUP_SIZE, CLIP = 16, 8, 0.2


def draw_problem(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """Draw a chain of sums and its working, from the training or the held-out side."""
    while True:
        value = rng.randint(1, 9)
        prompt = worked = str(value)
        for _ in range(rng.randint(1, 5)):
            term = rng.randint(1, 9)
            results = {sign: apply(value, term) for sign, apply in OPERATIONS.items()}
            sign = rng.choice([sign for sign in results if 0 <= results[sign] <= 20])
            value = results[sign]
            prompt, worked = f"{prompt}{sign}{term}", f"{worked}{sign}{term}={value}"
        if (zlib.crc32(prompt.encode()) % 8 == 0) == held_out:
            return prompt, worked


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def reward(worked: str, tokens: list[int]) -> float:
    """Return 1 for a finished completion with the right last number, else 0."""
    text = "".join(CHARACTERS[token] for token in tokens)
    found = re.search(r"=(\d+)\.$", text)
    return float(found is not None and found[1] == worked.rpartition("=")[2])


def padded(rows: list[list[float]], device: torch.device, value: int = PAD) -> torch.Tensor:
    tensors = [torch.tensor(row, device=device) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def create_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(CHARACTERS), hidden_size=128, intermediate_size=384,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=PAD,
            eos_token_id=EOS, bos_token_id=None,
        )
    )  # fmt: skip


def warm_start(model, optimizer, num_steps: int, rng: random.Random) -> None:
    """Train on workings, of which more and more break off after the second step."""
    for step in range(num_steps):
        rows, labels = [], []
        for prompt, worked in (draw_problem(rng) for _ in range(64)):
            steps = re.findall(r"^\d+|[-+*]\d+=\d+", worked)
            breaks_off = rng.random() < 0.65 * step / num_steps
            working = "".join(steps[:3] if breaks_off else steps)
            rows.append(encode(prompt + working + "."))
            labels.append([-100] * len(prompt) + rows[-1][len(prompt) :])
        logits = model(input_ids=padded(rows, model.device), use_cache=False).logits[:, :-1]
        targets = padded(labels, model.device, -100)[:, 1:]
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def grpo_loss(model, outputs, advantages: torch.Tensor) -> torch.Tensor:
    """Return the clipped loss, with the sampled log-probabilities as old ones.

    N: tokens of all completions.
    """
    device = advantages.device
    new_N = torch.cat(packed_logprobs(model, outputs))
    old_N = torch.tensor([logprob for o in outputs for logprob in o.logprobs], device=device)
    lengths = torch.tensor([len(o.generated_tokens) for o in outputs], device=device)
    advantages_N = advantages.repeat_interleave(lengths)
    ratio_N = (new_N - old_N).exp()
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio_N * advantages_N, clipped_N * advantages_N).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--warmup-steps", type=int, default=600, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=40, help="GRPO steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    model = create_model().to("cuda" if torch.cuda.is_available() else "cpu")
    warm_start(model, torch.optim.AdamW(model.parameters(), lr=2e-3), args.warmup_steps, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    params = SamplingParams(temperature=1.0, max_new_tokens=44)

    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:

        def rolled_out(problems, num_generations: int):
            """Return the completions of each problem, adjacent, and their rewards."""
            prompts = [encode(prompt) for prompt, _ in problems]
            outputs = generator.generate_batch(
                prompts, sampling_params=params, num_return_sequences=num_generations
            ).values()
            workings = [worked for _, worked in problems for _ in range(num_generations)]
            tokens = [output.generated_tokens for output in outputs]
            return list(outputs), torch.tensor(
                list(map(reward, workings, tokens)), device=model.device
            )

        held_out = [draw_problem(rng, held_out=True) for _ in range(512)]
        before = rolled_out(held_out, 1)[1].mean()
        for step in range(args.max_steps):
            problems = [draw_problem(rng) for _ in range(NUM_PROMPTS)]
            outputs, rewards = rolled_out(problems, GROUP_SIZE)
            groups = rewards.view(NUM_PROMPTS, GROUP_SIZE)
            spread = groups.std(1, keepdim=True) + 1e-4
            advantages = (groups - groups.mean(1, keepdim=True)) / spread
            grpo_loss(model, outputs, advantages.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            generator.record(outputs, rewards, advantages.flatten(), output_dir="runs/bare_loop")
            generator.sync_weights()
            print(f"step {step + 1}: reward {rewards.mean():.2f}", flush=True)
        after = rolled_out(held_out, 1)[1].mean()
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")


if __name__ == "__main__":
    main()
