"""Measure how far rollouts of SmolLM2-135M-Instruct are from plain forwards and from float64.

python scripts/measure/agreement.py    # three minutes on two cores

Writes `docs/benchmarks/agreement_cpu.json`; then run `python scripts/write_docs.py`.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.records import describe_machine, save_record
from cb_rollout import GenerationOutput, RolloutConfig, RolloutGenerator, SamplingParams
from smollm2 import smollm2_folder

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "How many legs does a spider have?",
    "Explain gravity to a child.",
    "What is 17 + 25?",
    "Name three primary colours.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "What causes the seasons?",
    "Tell me a short story about a fox and a crow.",
    "List the planets of the solar system in order.",
    "What is the difference between a list and a tuple in Python?",
    "Is the number 51 prime?",
)

# The attributes of accelerate's `Accelerator` that a generator reads.
BF16_TRAINER = SimpleNamespace(
    mixed_precision="bf16",
    process_index=0,
    num_processes=1,
    device=torch.device("cpu"),
    state=SimpleNamespace(),
)

PRECISIONS = ("float32", "bfloat16 weights", "float32 weights, bfloat16 autocast")


def chats(tokenizer: Any, num_chats: int = len(QUESTIONS)) -> list[list[int]]:
    """Return the token ids of chats, each a question."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in QUESTIONS[:num_chats]
    ]


def rollout(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    is_autocast: bool = False,
    **settings: Any,
) -> list[GenerationOutput]:
    """Return one completion of each prompt, sampled at temperature 1."""
    params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens)
    accelerator = BF16_TRAINER if is_autocast else None
    config = RolloutConfig(seed=0, **settings)
    with RolloutGenerator(model, config, accelerator=accelerator) as generator:
        return list(generator.generate_batch(prompts, sampling_params=params).values())


@torch.no_grad()
def forward_logprobs(
    model: PreTrainedModel, ids_BT: torch.Tensor, mask_BT: torch.Tensor, is_autocast: bool
) -> torch.Tensor:
    """Return the log-probability of each token after the first, `[B, T - 1]`."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        logits = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, :-1]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]


def plain_logprobs(
    model: PreTrainedModel, outputs: Sequence[GenerationOutput], is_autocast: bool = False
) -> torch.Tensor:
    """Return the log-probability of each sampled token, by a forward for each sequence alone."""
    parts = []
    for output in outputs:
        ids_BT = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        found = forward_logprobs(model, ids_BT, torch.ones_like(ids_BT), is_autocast)
        parts.append(found[0, len(output.prompt_ids) - 1 :])
    return torch.cat(parts)


def padded_logprobs(
    model: PreTrainedModel, outputs: Sequence[GenerationOutput], is_autocast: bool = False
) -> torch.Tensor:
    """Return the same by one batch as TRL pads it: prompts left, completions right."""
    width = max(len(output.prompt_ids) for output in outputs)
    length = max(len(output.generated_tokens) for output in outputs)
    ids_BT = torch.zeros(len(outputs), width + length, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, output in enumerate(outputs):
        start, end = width - len(output.prompt_ids), width + len(output.generated_tokens)
        ids_BT[row, start:end] = torch.tensor([*output.prompt_ids, *output.generated_tokens])
        mask_BT[row, start:end] = 1
    found = forward_logprobs(model, ids_BT, mask_BT, is_autocast)[:, width - 1 :]
    return found[mask_BT[:, width:].bool()]


def sampled_logprobs(outputs: Sequence[GenerationOutput]) -> torch.Tensor:
    """Return the log-probabilities that the rollout delivered."""
    return torch.tensor([value for output in outputs for value in output.logprobs])


def distance(some: torch.Tensor, others: torch.Tensor) -> dict[str, float]:
    """Return the mean and the largest difference, in nats."""
    nats = (some.double() - others.double()).abs()
    return {"mean": nats.mean().item(), "max": nats.max().item()}


def measure(
    model: PreTrainedModel, outputs: Sequence[GenerationOutput], is_autocast: bool = False
) -> dict[str, dict[str, float]]:
    """Return the distances between rollout, plain forward, padded forward and float64.

    Float64 computes with the weights as they are stored.
    """
    ours = sampled_logprobs(outputs)
    plain = plain_logprobs(model, outputs, is_autocast)
    padded = padded_logprobs(model, outputs, is_autocast)
    exact = plain_logprobs(copy.deepcopy(model).double(), outputs)
    return {
        "rollout to plain": distance(ours, plain),
        "padded to plain": distance(padded, plain),
        "rollout to float64": distance(ours, exact),
        "plain to float64": distance(plain, exact),
        "padded to float64": distance(padded, exact),
    }


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output-dir", type=Path, default=BENCHMARKS)
    args = parser.parse_args()
    folder = smollm2_folder()
    prompts = chats(AutoTokenizer.from_pretrained(folder))
    results, num_tokens = {}, {}
    for precision in PRECISIONS:
        is_half = precision.startswith("bfloat16")
        is_autocast = precision.endswith("autocast")
        dtype = torch.bfloat16 if is_half else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        outputs = rollout(model, prompts, args.max_new_tokens, is_autocast)
        results[precision] = measure(model, outputs, is_autocast)
        num_tokens[precision] = sum(len(output.generated_tokens) for output in outputs)
        for name, nats in results[precision].items():
            print(f"{precision:<36}{name:<20} mean {nats['mean']:.1e}  max {nats['max']:.1e}")
    record = {
        "bench": "agreement",
        **describe_machine("cpu"),
        "sequences": len(prompts),
        "tokens": num_tokens,
        "unit": "nats",
        "agreement": results,
    }
    print(save_record(record, args.output_dir, "cpu"))


if __name__ == "__main__":
    main()
