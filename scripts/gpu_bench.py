"""Decode on a CUDA device: what share of its bandwidth is reached, and beside which peers.

    python scripts/gpu_bench.py --output gpu.json            # needs one CUDA device, no network
    python scripts/gpu_bench.py --shapes 8B --seconds 100

Models have Qwen3 shapes and random bfloat16 weights. Every figure is a median, or says what it is;
a part that does not fit the time is named in the table as skipped.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import cb_rollout
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072, "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 12288, "tie_word_embeddings": False},
}  # fmt: skip
VOCABULARY = 151936
ROWS, PROMPT, GROUP = 256, 256, 8
SHORT, LONG = 16, 80
# A decode step's time is the difference of two rollouts, of so many tokens each, over the steps
# between them: prefill and start cancel out.


def create_model(shape: str, device: str) -> Qwen3ForCausalLM:
    """Random weights, made on the device."""
    config = Qwen3Config(
        **SHAPES[shape], vocab_size=VOCABULARY, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def seconds(work: Callable[[], object]) -> float:
    """What `work` takes, the device's part included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def bandwidth() -> float:
    """Bytes per second of a large copy, counting those read and those written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source)) for _ in range(8)]
    return 2 * source.nbytes / statistics.median(times[3:])


def prompts(num_groups: int, length: int = PROMPT) -> list[list[int]]:
    """Random prompts, each repeated for its group."""
    draws = random.Random(0)
    rows = [[draws.randrange(2, VOCABULARY) for _ in range(length)] for _ in range(num_groups)]
    return [row for row in rows for _ in range(GROUP)]


@contextmanager
def generator_of(model: Any, **settings: Any) -> Iterator[RolloutGenerator]:
    """A generator that keeps its cache between rollouts."""
    config = RolloutConfig(seed=0, release_cache="never", **settings)
    with RolloutGenerator(model, config) as generator:
        yield generator


def decode_step(generator: RolloutGenerator, rows: int, repetitions: int) -> list[float]:
    """Seconds of one decode step of so many rows."""
    params, inputs = SamplingParams(ignore_eos=True), prompts(max(1, rows // GROUP))[:rows]

    def rollout(length: int) -> float:
        return seconds(
            lambda: generator.generate_batch(inputs, sampling_params=params, max_new_tokens=length)
        )

    rollout(LONG)
    return [(rollout(LONG) - rollout(SHORT)) / (LONG - SHORT) for _ in range(repetitions)]


def bytes_per_step(model: Any, rows: int, bytes_per_token: int) -> int:
    """What must be read: every weight but the embedding's other rows, and every row's keys once.

    A group's shared prompt is counted once.
    """
    weights = sum(p.nbytes for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    own = rows * (SHORT + LONG) / 2
    return int(weights + (own + rows / GROUP * PROMPT) * bytes_per_token)


def bench_decode(shape: str, model: Any, peak: float) -> Iterator[dict[str, Any]]:
    """Decode steps under graphs, without, and gathered."""
    for rows in (ROWS, 32, 1):
        for path, graphs in (("graphs", True), ("kernels", False), ("gathered", False)):
            if path == "gathered" and (shape != "0.6B" or rows == 1):
                continue
            if path == "kernels" and rows == 32:
                continue
            with generator_of(model, use_cuda_graph=graphs) as generator:
                engine = generator.manager.engine
                if path == "gathered":
                    engine._runner.decoding = None
                step = statistics.median(decode_step(generator, rows, 3))
                moved = bytes_per_step(model, rows, engine.layout.bytes_per_token)
                yield {
                    "what": f"{shape} decode, {rows} rows, {path}",
                    "step_ms": 1000 * step,
                    "tokens_per_second": rows / step,
                    "share_of_bandwidth": moved / step / peak,
                }


def bench_lifecycle(shape: str, model: Any) -> Iterator[dict[str, Any]]:
    """A weight sync that keeps its graphs, and sleep and wake of a large pool."""
    with generator_of(model, use_cuda_graph=True) as generator:
        params = SamplingParams(ignore_eos=True, max_new_tokens=4)
        generator.generate_batch(prompts(1), sampling_params=params)
        graphs = generator.manager.engine._graphs.num_graphs
        syncs = [seconds(generator.sync_weights) for _ in range(9)]
        generator.generate_batch(prompts(1), sampling_params=params)
        assert generator.manager.engine._graphs.num_graphs == graphs
        yield {"what": f"{shape} sync_weights, graphs kept", "ms": 1000 * statistics.median(syncs)}
        per_block = generator.manager.engine.layout.bytes_per_token * 32
    free = torch.cuda.mem_get_info()[0]
    gib = min(40, int(free / (1 << 30) * 0.8))
    with generator_of(model, use_cuda_graph=True, num_blocks=(gib << 30) // per_block) as generator:
        run = lambda: generator.generate_batch(prompts(1), sampling_params=params)  # noqa: E731
        run()
        awake = statistics.median(seconds(run) for _ in range(3))
        sleeps, wakes = [], []
        for _ in range(3):
            sleeps.append(seconds(generator.sleep))
            generator.wake()
            wakes.append(seconds(run) - awake)
        yield {"what": f"{shape} sleep, {gib} GiB pool", "ms": 1000 * statistics.median(sleeps)}
        yield {
            "what": f"{shape} wake, {gib} GiB pool (longer first rollout)",
            "ms": 1000 * statistics.median(wakes),
        }


def lengths_of(kind: str, count: int) -> list[int]:
    """How many tokens each completion is forced to have."""
    draws = random.Random(0)
    if kind == "equal":
        return [64] * count
    return [min(1024, max(1, int(draws.lognormvariate(5.0, 0.9)))) for _ in range(count)]


def bench_rollout(model: Any, kind: str) -> Iterator[dict[str, Any]]:
    """One rollout beside the peers, each after one to warm up; useful tokens per second."""
    inputs = prompts(16)
    lengths = lengths_of(kind, len(inputs))
    params = SamplingParams(ignore_eos=True)
    name = {"equal": "64 tokens each", "tailed": "long-tailed, at most 1024"}[kind]

    def said(contender: str, taken: float) -> dict[str, Any]:
        return {
            "what": f"0.6B rollout of {len(inputs)}, {name}: {contender}",
            "seconds": taken,
            "tokens_per_second": sum(lengths) / taken,
        }

    with generator_of(model) as generator:
        run = lambda: generator.generate_batch(  # noqa: E731
            inputs, sampling_params=params, max_new_tokens=lengths
        )
        run()
        yield said("cb_rollout", min(seconds(run) for _ in range(2)))

    def generate() -> None:
        model.generate(
            torch.tensor(inputs, device=model.device),
            attention_mask=torch.ones(len(inputs), PROMPT, dtype=torch.int64, device=model.device),
            do_sample=True, top_k=0, max_new_tokens=max(lengths), min_new_tokens=max(lengths),
            pad_token_id=0,
        )  # fmt: skip

    if kind == "equal":
        seconds(generate)
    yield said("model.generate", seconds(generate))
    if kind == "equal":
        yield said("transformers CB", transformers_seconds(model, inputs, lengths))


def transformers_seconds(model: Any, inputs: list[list[int]], lengths: list[int]) -> float:
    """One rollout by transformers' own manager, after one to warm up."""
    names = ContinuousBatchingConfig.__dataclass_fields__
    page = {"page_size" if "page_size" in names else "block_size": 32}
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **page, return_logprobs=True, max_memory_percent=0.5
        ),
    )
    manager.start()

    def run() -> None:
        for prompt, length in zip(inputs, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        num_done = 0
        while num_done < len(inputs):
            output = manager.get_result(timeout=60)
            assert output is not None, "no result within a minute"
            assert output.error is None, output.error
            num_done += output.is_finished()

    try:
        run()
        return seconds(run)
    finally:
        manager.stop(block=True)
        model.set_attn_implementation(attention)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    figures = {
        "step_ms": "{:8.2f} ms/step", "ms": "{:8.2f} ms", "seconds": "{:8.2f} s",
        "tokens_per_second": "{:10,.0f} tokens/s", "share_of_bandwidth": "{:5.0%} of bandwidth",
    }  # fmt: skip
    shown = [text.format(row[name]) for name, text in figures.items() if name in row]
    return f"{row['what']:<66}{'  '.join(shown) or row['note']}"


def machine() -> dict[str, Any]:
    """What was measured on, and with which versions."""
    versions = {}
    for package in ("torch", "triton", "transformers", "flash_attn"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cb_rollout": cb_rollout.__version__,
        **versions,
    }


def main() -> None:
    """Measure what fits the time, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B", "4B", "0.6B"])
    parser.add_argument("--seconds", type=float, default=270.0, help="no new part starts after")
    parser.add_argument("--output", type=Path, help="where to write JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing was measured.")
    deadline = time.perf_counter() + options.seconds
    rows: list[dict[str, Any]] = []
    peak = bandwidth()
    record = machine() | {"copy_bytes_per_second": peak, "rows": rows}
    print(machine(), f"copy bandwidth {peak / 1e12:.2f} TB/s", sep="\n")

    def add(row: dict[str, Any]) -> None:
        """Kept at once: what comes later may run out of time."""
        rows.append(row)
        print(line(row), flush=True)
        if options.output:
            options.output.write_text(json.dumps(record, indent=2) + "\n")

    for shape in options.shapes:
        torch.cuda.reset_peak_memory_stats()
        model = create_model(shape, "cuda")
        for name, measure in parts(shape, model, peak).items():
            if time.perf_counter() > deadline:
                add({"what": f"{shape} {name}", "note": "skipped: no time left"})
                continue
            try:
                for row in measure():
                    add(row)
            except Exception as error:  # noqa: BLE001 - one part's failure is a row of the table
                add({"what": f"{shape} {name}", "note": f"{type(error).__name__}: {error}"})
        peak_gib = torch.cuda.max_memory_allocated() / (1 << 30)
        add({"what": f"{shape} peak memory", "note": f"{peak_gib:.1f} GiB allocated"})
        del model
        torch.cuda.empty_cache()
    print("", *map(line, rows), sep="\n")


def parts(shape: str, model: Any, peak: float) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """What is measured of a model, the surest first."""
    measured: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "decode": lambda: bench_decode(shape, model, peak),
        "lifecycle": lambda: bench_lifecycle(shape, model),
    }
    if shape == "0.6B":
        for kind in ("tailed", "equal"):
            measured[f"rollout, {kind}"] = lambda kind=kind: bench_rollout(model, kind)
    return measured


if __name__ == "__main__":
    main()
