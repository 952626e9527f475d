"""An agent that learns by playing: a stock OpenAI client talks to the policy while it trains.

The game is "higher or lower": the environment thinks of a digit, of some more often than of others,
and the policy has four guesses, each answered by ">" (it is higher), "<" or "=". It starts out with
random guesses, and learns which digits to try first.

The environment is a plain coroutine with the official `openai` client, as it would be for any
served model; it does not depend on the training. The sampled tokens come back with
log-probabilities and policy versions, become a `Trajectory`, and train the same weights in the same
process. A turn whose history differs from the sampled tokens is detected, and its history masked.

Launch:   python recipes/agent_openai.py
Hardware: two CPU cores, 1 GiB of memory, no network, no account
Minutes:  a few
Prints last (a turn is rewritten where the policy sampled a special token besides its digit, which
the chat leaves out):

    hits, first and last five steps        43.0% -> 72.7%
    largest |log-probability difference|  2.9e-06
    turns whose history was rewritten     31
"""

import argparse
import asyncio
import os
import random
import sys
from statistics import fmean

import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.rollout.trajectories import Sample, Trajectory

PAD, EOS, USER = 0, 1, 2
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *"0123456789?><="]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_GUESSES = 4
WARM_STEPS = 80
# Half of the secrets are 7, a quarter are 2, and the rest are any digit.
FAVOURITES = [7, 7, 2]


def create_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


def create_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def answer(secret: int, guess: str) -> str:
    """Return the environment's reply to a guess."""
    number = int(guess)
    return "=" if number == secret else (">" if secret > number else "<")


def learn_the_rules(model, tokenizer, optimizer) -> None:
    """Train on games of random guesses, so that the policy learns the format."""
    rng = random.Random(0)
    for _ in range(WARM_STEPS):
        games = []
        for _ in range(64):
            secret, messages, reply = rng.randrange(10), [], "?"
            for _ in range(MAX_GUESSES):
                guess = str(rng.randrange(10))
                messages.append({"role": "user", "content": reply})
                messages.append({"role": "assistant", "content": guess})
                reply = answer(secret, guess)
            games.append(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
        ids = torch.tensor(games)
        targets = ids[:, 1:].masked_fill(ids[:, 1:] == USER, -100)
        logits = model(input_ids=ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()


async def play(client: AsyncOpenAI, secret: int) -> tuple[Trajectory, float]:
    """Play one game through the endpoint; return its messages and the reward."""
    trajectory, reply = Trajectory(), "?"
    messages = []
    for turn in range(MAX_GUESSES):
        messages.append({"role": "user", "content": reply})
        response = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=2, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        trajectory.add_response(response)
        guess = response.choices[0].message.content
        if guess not in "0123456789" or len(guess) != 1:
            return trajectory, 0.0
        messages.append({"role": "assistant", "content": guess})
        reply = answer(secret, guess)
        if reply == "=":
            return trajectory, 1.0 - 0.1 * turn
    return trajectory, 0.0


async def play_all(base_url: str, secrets: list[int]) -> list[tuple[Trajectory, float]]:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        return await asyncio.gather(*(play(client, secret) for secret in secrets))


def train_on(model, samples: list[Sample], advantages: list[float]) -> float:
    """Backpropagate a policy-gradient loss; return the largest log-probability difference."""
    width = max(len(sample.token_ids) for sample in samples)

    def padded(rows, value):
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    ids = padded([s.token_ids for s in samples], PAD)
    chosen = padded([s.is_sampled for s in samples], False)[:, 1:]
    sampled = padded([s.logprobs for s in samples], 0.0)[:, 1:]
    logits = model(input_ids=ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    weights = torch.tensor(advantages)[:, None] * chosen
    (-(weights * logprobs).sum() / chosen.sum()).backward()
    return (logprobs - sampled)[chosen].abs().max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--games", type=int, default=60, help="played together, each step")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer, model = create_tokenizer(), create_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    learn_the_rules(model, tokenizer, optimizer)
    rng = random.Random(0)
    hits, largest_difference, num_drifts = [], 0.0, 0
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        server = generator.serve(port=0)
        for step in range(args.max_steps):
            secrets = [rng.choice([*FAVOURITES, rng.randrange(10)]) for _ in range(args.games)]
            games = asyncio.run(play_all(server.base_url, secrets))
            hits.append(fmean(reward > 0 for _, reward in games))
            # Games with the same secret form a group.
            rewards = {s: [] for s in secrets}
            for (_, reward), secret in zip(games, secrets, strict=True):
                rewards[secret].append(reward)
            samples, advantages = [], []
            for (trajectory, reward), secret in zip(games, secrets, strict=True):
                num_drifts += trajectory.num_drifts
                samples += trajectory.samples
                advantages += [reward - fmean(rewards[secret])] * len(trajectory.samples)
            difference = train_on(model, samples, advantages)
            largest_difference = max(largest_difference, difference)
            # The weights may change inside `pause`; later tokens carry a new policy version.
            with generator.manager.pause():
                optimizer.step()
                optimizer.zero_grad()
            print(f"step {step:3}  hits {hits[-1]:5.1%}  versions {generator.policy_version}")
    print(
        f"\nhits, first and last five steps        {fmean(hits[:5]):.1%} -> {fmean(hits[-5:]):.1%}"
    )
    print(f"largest |log-probability difference|  {largest_difference:.1e}")
    print(f"turns whose history was rewritten     {num_drifts}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
