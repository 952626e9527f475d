"""Measure the loss of a model with recurrent layers, its prompt once or in each row.

python scripts/measure/forks.py    # minutes on two cores

A group of completions of one prompt, on token ids and weights drawn at random in the shape of
LFM2-350M: ten short convolutions and six attentions. Log-probabilities and their gradients are
computed with rows that are padded, and from the states that one forward of the prompt leaves, in
turns. Writes `docs/benchmarks/forks_cpu.json`.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Lfm2Config

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.records import describe_machine, save_record
from cb_rollout.packing.batch import PackingLayout, pack
from cb_rollout.packing.logprobs import _scored
from cb_rollout.packing.rows import PackedRow

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"

ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)
SHAPE = {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": [
        "full_attention" if layer in ATTENTION_LAYERS else "conv" for layer in range(16)
    ],
}
LAYOUTS = (PackingLayout.PADDED, PackingLayout.FORKED_STATES)


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=BENCHMARKS)
    args = parser.parse_args()
    rng = random.Random(0)

    def drawn(num_tokens: int) -> list[int]:
        return [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(num_tokens)]

    prompt = drawn(args.prompt_tokens)
    rows = [PackedRow(prompt, drawn(args.completion_tokens)) for _ in range(args.group_size)]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Lfm2Config(**SHAPE)).train()
    found = {layout.value: {"seconds": [], "gradient_norm": 0.0} for layout in LAYOUTS}
    logprobs = {}
    for _ in range(args.rounds):
        for layout in LAYOUTS:
            path = found[layout.value]
            batches = pack(rows, range(len(rows)), layout, torch.device("cpu"))
            path["tokens"] = sum(batch.num_tokens for batch in batches)
            model.zero_grad()
            started = time.perf_counter()
            scored = torch.cat(list(_scored(model, rows, layout).values()))
            scored.sum().backward()
            path["seconds"].append(time.perf_counter() - started)
            norms = [p.grad.norm() for p in model.parameters()]
            path["gradient_norm"] = float(torch.stack(norms).norm())
            logprobs[layout] = scored.detach()
    largest = float((logprobs[LAYOUTS[0]] - logprobs[LAYOUTS[1]]).abs().max())
    for name, path in found.items():
        path["median_seconds"] = statistics.median(path["seconds"])
        print(
            f"{name:<15}{path['tokens']:>6} tokens, {path['median_seconds']:7.1f} s, gradient "
            f"{path['gradient_norm']:.6g}"
        )
    padded, forked = (found[layout.value]["median_seconds"] for layout in LAYOUTS)
    print(f"{padded / forked:.2f} times as fast, log-probabilities within {largest:.1e}")
    record = {
        "bench": "forks",
        **describe_machine("cpu"),
        "model": "LFM2-350M, random weights",
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "prompt_tokens": args.prompt_tokens,
        "completion_tokens": args.completion_tokens,
        "group_size": args.group_size,
        "times_as_fast": padded / forked,
        "largest_difference": largest,
        "paths": found,
    }
    print(save_record(record, args.output_dir, "cpu"))


if __name__ == "__main__":
    main()
