"""Print the time of the host's part of a decode step under CUDA graphs, split by part.

An engine of a tiny model of 36 layers decodes on the CPU, as one with CUDA graphs does, but a
replay computes nothing and every row samples token 0. So all that is timed is Python: scheduling,
launching, reading results, appending tokens and delivering. No device is needed; where there is
one, the driver adds a launch, a copy or two and an event to each step. The whole step is processor
time of its thread; parts are by the clock, so a busy machine makes them longer. Compare the
fastest.

python scripts/gpu/host.py --rows 256
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.profile import Spans, WrappedFunction, wrapped
from cb_rollout import RolloutConfig, SamplingParams
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.core import Engine
from cb_rollout.engine.cuda_graphs.capture import Replay
from cb_rollout.engine.cuda_graphs.decode_path import CudaGraphDecoding
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, PendingStep
from cb_rollout.engine.kv_cache.block_manager import BlockManager
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.tools.bench import timed

CPU = torch.device("cpu")

PARTS = (
    WrappedFunction("deliver", EngineLoop, "_deliver"),
    WrappedFunction("choose the next step's rows", CudaGraphDecoding, "_launch_next"),
    WrappedFunction("assign blocks", BlockManager, "extend_ahead"),
    WrappedFunction("launch", GraphedDecoding, "launch"),
    WrappedFunction("read the results", PendingStep, "read"),
    WrappedFunction("count computed tokens", Scheduler, "complete_decode"),
    WrappedFunction("append tokens", TokenSampler, "append"),
    WrappedFunction("retire", Scheduler, "retire_running"),
    WrappedFunction("load rows that joined", GraphedDecoding, "load"),
)
REST = "the rest"


def decoding_loop(num_rows: int, num_layers: int, prompt_tokens: int, group: int) -> EngineLoop:
    """Return a loop whose engine decodes so many sequences, in groups of a prompt each."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**shape, **heads, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config)
    settings = RolloutConfig(max_requests_per_batch=num_rows, seed=0)
    engine = Engine(model, settings)
    loop = EngineLoop(engine)
    params = SamplingParams(ignore_eos=True, max_new_tokens=10_000)
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=[2 + number // group] * prompt_tokens,
            params=params,
            max_new_tokens=10_000,
            stop_tokens=frozenset((1,)),
            seed=number,
            group=number // group,
        )
        for number in range(num_rows)
    ]
    loop.submit(requests, OutputQueue())
    while not all(request.num_generated for request in requests):
        loop.begin_turn()
        loop.step()
    graphs = empty_graphs(engine, num_rows)
    block_size = engine.config.block_size
    path = CudaGraphDecoding(engine.runner, graphs, block_size, looks_ahead=True)
    engine._executor.reset(path)
    return loop


def empty_graphs(engine: Engine, num_rows: int) -> GraphedDecoding:
    """Return graphs that compute nothing, and sample token 0 for every row."""

    def capture(step: Replay) -> Replay:
        return lambda: graphs._sampler.results

    backend = TritonBackend(engine.paged_model.layout, CPU)
    graphs = GraphedDecoding(engine.runner, backend, num_rows, capture=capture)
    # That the logits make a distribution, and leave a token to sample.
    graphs._sampler.results[:, 2:4] = 1
    graphs.check_weights()
    graphs.capture_sizes(engine.config.block_size)
    return graphs


def milliseconds(step: Callable[[], None]) -> float:
    """Return the processor time of the calling thread in a step."""
    started = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - started) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="sequences of each prompt")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    loop = decoding_loop(args.rows, args.layers, args.prompt, args.group)

    def step() -> None:
        loop.begin_turn()
        loop.step()

    for _ in range(20):
        step()
    totals = [milliseconds(step) for _ in range(args.steps)]
    parts: dict[str, list[float]] = {name: [] for name in (*(p.name for p in PARTS[:-1]), REST)}
    with wrapped(PARTS) as spans:
        for _ in range(args.steps):
            spans.clear()
            total = 1000 * timed(step)
            own = {name: _own(spans, name) for name in parts}
            own[REST] = total - sum(own.values())
            for name in parts:
                parts[name].append(own[name])
    executor = loop.engine._executor
    loads = []
    with wrapped(PARTS[-1:]) as spans:
        for _ in range(20):
            executor.settle()
            spans.clear()
            step()
            loads.append(_own(spans, PARTS[-1].name))
    print(f"{args.rows} rows, {args.layers} layers, {args.steps} steps, ms a step")
    print(f"{'':<34}{'median':>8}{'fastest':>9}")
    rows = {"whole step": totals} | {f"  {name}": values for name, values in parts.items()}
    for name, values in (rows | {f"{PARTS[-1].name} (not each step)": loads}).items():
        print(f"{name:<34}{statistics.median(values):>8.3f}{min(values):>9.3f}")


def _own(spans: Spans, name: str) -> float:
    return 1000 * sum(seconds for path, seconds in spans.seconds.items() if path[-1] == name)


if __name__ == "__main__":
    main()
