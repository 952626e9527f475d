"""Print the memory plan before and after a first optimizer step, and the memory freed by sleep.

For docs/memory.md, on the CPU: a Qwen3 shape, AdamW, a rollout that keeps its cache while training.

python scripts/measure/memory.py
"""

import argparse
import time

import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

MIB = 1 << 20
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
PROMPT_TOKENS, NEW_TOKENS, NUM_SEQUENCES = 256, 16, 32


def resident_mib() -> float:
    """Return the process's resident size."""
    return psutil.Process().memory_info().rss / MIB


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    prompts = [[(7 * i + j) % 8000 for j in range(PROMPT_TOKENS)] for i in range(NUM_SEQUENCES)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    config = RolloutConfig(seed=0, max_requests_per_batch=NUM_SEQUENCES, release_cache="never")
    with RolloutGenerator(model, config, optimizer=optimizer) as generator:
        print(f"before the first step:\n{generator.memory_plan()}\n")
        generator.generate_batch(prompts, sampling_params=params)
        ids = torch.tensor(prompts[:8])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        generator.sync_weights()
        print(f"after it:\n{generator.memory_plan()}\n")
        generator.generate_batch(prompts, sampling_params=params)
        pool, awake = generator.metrics()["rollout/kv_bytes"] / MIB, resident_mib()
        started = time.perf_counter()
        generator.sleep()
        seconds = time.perf_counter() - started
        print(
            f"a pool of {pool:.0f} MiB; resident {awake:.0f} MiB awake, {resident_mib():.0f} MiB "
            f"asleep; sleep() took {1000 * seconds:.0f} ms"
        )


if __name__ == "__main__":
    main()
