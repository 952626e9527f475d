"""Print what it costs the processes of a tensor-parallel group to keep in step.

torchrun --nproc-per-node 2 scripts/measure/tensor_parallel.py

A model of 143 M parameters with random weights is split over the processes and samples 32
completions. Sent and received are the shares of a rollout's time in which a process gives or awaits
the decisions of the one that leads; medians of rounds.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.distributed import DistributedConfig

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.service.lockstep import EngineGroup

ROUNDS = 5
PROMPTS = [[5 + i, *range(3, 35)] for i in range(32)]
PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)


def create_model() -> PreTrainedModel:
    """Create a Qwen3 shape, split over all processes, with equal random weights."""
    config = Qwen3Config(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2560,
        vocab_size=32000,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    folder: list[str] = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    if not distributed.get_rank():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    distributed.barrier()
    split = DistributedConfig(tp_size=distributed.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=split).eval()


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Wrap a method so that its time is appended to `seconds`."""

    @wraps(method)
    def call(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = method(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    return call


def main() -> None:
    """Roll out in rounds, and print a line for each process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    waits: list[float] = []
    EngineGroup.send = timed(EngineGroup.send, waits)
    shares, steps = [], []
    with RolloutGenerator(create_model(), RolloutConfig(seed=0, num_blocks=256)) as generator:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        for _ in range(ROUNDS):
            waits.clear()
            started = time.perf_counter()
            generator.generate_batch(PROMPTS, sampling_params=PARAMS)
            seconds = time.perf_counter() - started
            shares.append(sum(waits) / seconds)
            steps.append(seconds / len(waits))
    lines: list[Any] = [None] * distributed.get_world_size()
    verb = "received" if rank else "sent"
    share, step = statistics.median(shares), statistics.median(steps)
    line = (
        f"rank {rank}: {verb} decisions in {share:.1%} of the time; a step of {step * 1e3:.1f} ms"
    )
    distributed.all_gather_object(lines, line)
    if not rank:
        print("\n".join(lines))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
