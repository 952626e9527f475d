"""Measure decode steps, GRPO steps and rollouts on a CUDA device: bandwidth reached, and peers.

    python scripts/gpu/bench.py --output gpu.json            # needs one CUDA device, no network
    python scripts/gpu/bench.py --shapes 8B --seconds 100
    python scripts/gpu/bench.py --parts peers vllm   # vLLM if CB_ROLLOUT_VLLM_PYTHON names one

Models have Qwen3 shapes and random weights, in bfloat16 but for `grpo`. Figures are medians unless
they say otherwise; a part for which no time is left is named in the table as skipped. Before a
decode step is timed, log-probabilities of eight sequences are compared with the model's plain
forward. The exit status is 1 if a part failed, or if they differ by more than rounding.
"""

import argparse
import faulthandler
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.attention import bench_stages
from benchmarks.harness.contenders import Contender, generate, ours, transformers_batching
from benchmarks.harness.records import describe_machine
from benchmarks.peers.vllm_process import vllm_contenders
from benchmarks.roofline.machine import bandwidth
from benchmarks.sizes import MODELS, QWEN3
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench import (
    Workload,
    create_model,
    long_tailed_lengths,
    random_prompts,
    timed,
)

GIB = 1 << 30
DEVICE = "cuda:0"
ROWS, PROMPT, GROUP = 256, 256, 8

# A decode step's time is the difference of two rollouts of these lengths, over the steps between
# them: prefill and start cancel out.
SHORT, LONG = 16, 80

# Sequences that are compared before a step of their path is timed.
NUM_VERIFIED = 8

# Of the bench of a model; only the smallest model trains, and runs beside peers.
PARTS = ("decode", "lifecycle", "stages", "compile", "grpo", "compile_grpo", "peers", "vllm")
SMALLEST_PARTS = {"grpo", "compile_grpo", "peers", "vllm"}

# Parts that only fill the cache of compiled code for others run when they are asked for.
DEFAULT_PARTS = tuple(name for name in PARTS if not name.startswith("compile"))

# Blocks of the cache of an engine that only compiles, beside others on the card.
FEW_BLOCKS = 1024

# Seconds without a row after which every thread's place is printed, and printed again.
HANG_SECONDS = 45

# What CUDA says of an error after which it refuses every call of the process.
STICKY = ("illegal memory access", "misaligned address", "unspecified launch failure")

# Lengths of the completions of a rollout.
KINDS = ("equal", "tailed")

# Rows of the table.
Rows = Iterator[dict[str, Any]]


def prompts(model: Any, num_groups: int) -> list[list[int]]:
    """Return random prompts, each repeated for its group."""
    made = random_prompts(random.Random(0), num_groups, (PROMPT, PROMPT), model.config.vocab_size)
    return [prompt for prompt in made for _ in range(GROUP)]


@contextmanager
def generator_of(model: Any, **settings: Any) -> Iterator[RolloutGenerator]:
    """Create a generator that keeps its cache between rollouts."""
    config = RolloutConfig(seed=0, release_cache="never", **settings)
    with RolloutGenerator(model, config) as generator:
        yield generator


def decode_step(generator: RolloutGenerator, rows: int, repetitions: int) -> list[float]:
    """Return the seconds of one decode step of `rows` rows."""
    params = SamplingParams(ignore_eos=True)
    inputs = prompts(generator.manager.model, max(1, rows // GROUP))[:rows]

    def rollout(length: int) -> float:
        return timed(
            lambda: generator.generate_batch(inputs, sampling_params=params, max_new_tokens=length)
        )

    rollout(LONG)
    return [(rollout(LONG) - rollout(SHORT)) / (LONG - SHORT) for _ in range(repetitions)]


def verified(generator: RolloutGenerator, rows: int) -> dict[str, Any]:
    """Compare a rollout of `rows` rows with plain forwards; return how far it is off, in nats."""
    inputs = prompts(generator.manager.model, max(1, rows // GROUP))[:rows]
    params = SamplingParams(ignore_eos=True)
    generator.generate_batch(inputs, sampling_params=params, max_new_tokens=LONG)
    report = generator.verify(NUM_VERIFIED)
    figures = {"drift_mean": report.mean, "drift_max": report.max}
    if report.agreement is not None and not report.agreement:
        figures["error"] = f"is off the plain forward: {report.agreement}"
    return figures


def bytes_per_step(model: Any, rows: int, bytes_per_token: int) -> int:
    """Return the bytes that a decode step must read: weights, and every row's keys and values once.

    An untied embedding is not counted, and a group's shared prompt is counted once.
    """
    weights = sum(p.nbytes for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    own = rows * (SHORT + LONG) / 2
    return int(weights + (own + rows / GROUP * PROMPT) * bytes_per_token)


OWN_FORWARD = {"use_default_compile_configs": False}

PATHS: dict[str, dict[str, Any]] = {
    "graphs": {"use_cuda_graph": True, **OWN_FORWARD},
    "graphs, compiled": {"use_cuda_graph": True, "use_default_compile_configs": True},
    "graphs, none ahead": {"use_cuda_graph": True, "use_async_batching": False, **OWN_FORWARD},
    "kernels": {"use_cuda_graph": False},
    "gathered": {"use_cuda_graph": False},
}


# Rows of the step and its path, in the order of their time: compiling a step takes longest. All
# paths on the smallest model, the main ones on the others.
MAIN_STEPS = (
    *((ROWS, "graphs"), (32, "graphs"), (1, "graphs")),
    *((ROWS, "graphs, compiled"), (ROWS, "kernels")),
)
OTHER_STEPS = ((1, "kernels"), (32, "gathered"), (ROWS, "gathered"), (ROWS, "graphs, none ahead"))
COMPARED = {"0.6B": MAIN_STEPS + OTHER_STEPS, "4B": MAIN_STEPS, "8B": MAIN_STEPS}


def bench_decode(shape: str, model: Any, peak: float) -> Rows:
    """Verify and time decode steps of each path: graphs, compiled and not, kernels, gathered."""
    for rows, path in COMPARED[shape]:
        # No larger graph is captured.
        with generator_of(model, max_requests_per_batch=rows, **PATHS[path]) as generator:
            engine = generator.manager.engine
            if path == "gathered":
                gathered = replace(engine.runner.execution, attention_backend=None)
                engine.runner.use(gathered)
            drift = verified(generator, rows)
            step = statistics.median(decode_step(generator, rows, 3))
            moved = bytes_per_step(model, rows, engine.paged_model.layout.bytes_per_token)
            yield {
                "what": f"{shape} decode, {rows} rows, {path}",
                "step_ms": 1000 * step,
                "tokens_per_second": rows / step,
                "share_of_bandwidth": moved / step / peak,
                "decode_path": generator.manager.decode_path,
                **drift,
            }


def bench_compilation(shape: str, model: Any) -> Rows:
    """Compile a model's decode step into the cache of compiled code, and time that."""
    begun = time.perf_counter()
    settings = {"max_requests_per_batch": ROWS, "max_cached_graphs": 1, "num_blocks": FEW_BLOCKS}
    with generator_of(model, **settings, **PATHS["graphs, compiled"]) as generator:
        seconds = time.perf_counter() - begun
        path = generator.manager.decode_path
    yield {"what": f"{shape} compilation", "seconds": seconds, "decode_path": path}


def bench_grpo_compilation() -> Rows:
    """Compile the step that the rollouts of `grpo` take into the cache, and time that."""
    # TRL and datasets may be missing.
    from benchmarks import grpo

    settings = {"max_cached_graphs": 1, "num_blocks": FEW_BLOCKS}
    begun = time.perf_counter()
    path = grpo.attached_path(grpo.SIZES, DEVICE, **settings, **PATHS["graphs, compiled"])
    seconds = time.perf_counter() - begun
    yield {"what": "0.6B GRPO compilation", "seconds": seconds, "decode_path": path}


def bench_lifecycle(shape: str, model: Any) -> Rows:
    """Time a weight sync that keeps its graphs, and sleep and wake of a large pool."""
    inputs, params = prompts(model, 1), SamplingParams(ignore_eos=True, max_new_tokens=4)
    settings = {"max_requests_per_batch": GROUP, **PATHS["graphs"]}
    with generator_of(model, **settings) as generator:
        generator.generate_batch(inputs, sampling_params=params)
        graphs = generator.manager.engine.paged_model.decode_path.graphs
        num_graphs = graphs.num_graphs
        syncs = [timed(generator.sync_weights) for _ in range(9)]
        generator.generate_batch(inputs, sampling_params=params)
        assert graphs.num_graphs == num_graphs
        yield {"what": f"{shape} sync_weights, graphs kept", "ms": 1000 * statistics.median(syncs)}
        per_block = generator.manager.engine.paged_model.layout.bytes_per_token * 32
    gib = min(40, int(torch.cuda.mem_get_info()[0] / GIB * 0.8))
    with generator_of(model, num_blocks=gib * GIB // per_block, **settings) as generator:
        run = lambda: generator.generate_batch(inputs, sampling_params=params)  # noqa: E731
        run()
        awake = statistics.median(timed(run) for _ in range(3))
        sleeps, wakes = [], []
        for _ in range(3):
            sleeps.append(timed(generator.sleep))
            generator.wake()
            wakes.append(timed(run) - awake)
        yield {"what": f"{shape} sleep, {gib} GiB pool", "ms": 1000 * statistics.median(sleeps)}
        yield {
            "what": f"{shape} wake, {gib} GiB pool (longer first rollout)",
            "ms": 1000 * statistics.median(wakes),
        }


def rollout_workload(model: Any, kind: str) -> Workload:
    """Return groups whose completions are "equal" or "tailed" in length."""
    inputs = prompts(model, 16)
    is_equal = kind == "equal"
    tailed = long_tailed_lengths(random.Random(0), len(inputs), 5.0, 1024)
    return Workload(inputs, [64] * len(inputs) if is_equal else tailed)


def bench_grpo() -> Rows:
    """Time GRPO steps of the smallest model: by graphs, then by compiled ones."""
    # TRL and datasets may be missing.
    from benchmarks import grpo

    for path in ("graphs", "graphs, compiled"):
        for row in grpo.bench_grpo(grpo.SIZES, DEVICE, **PATHS[path]):
            yield row | {"what": f"0.6B {row['what']}, {path}"}


def bench_peers(model: Any) -> Rows:
    """Time rollouts of this package and of its peers in this process."""
    for kind in KINDS:
        contenders = {"cb_rollout": ours(release_cache="never")}
        if kind == "equal":
            # Half, since memory of the previous contender may not be free yet.
            contenders["transformers CB"] = transformers_batching(max_memory_percent=0.5)
        contenders["model.generate"] = generate(ROWS)
        yield from bench_rollout(model, kind, contenders)


def bench_vllm(model: Any) -> Rows:
    """Time rollouts of vLLM, where the environment names its Python; its start may take minutes."""
    workloads = [rollout_workload(model, kind) for kind in KINDS]
    with vllm_contenders(model, workloads) as contenders:
        for kind in KINDS:
            yield from bench_rollout(model, kind, contenders)


def bench_rollout(model: Any, kind: str, contenders: dict[str, Contender]) -> Rows:
    """Time one rollout of each contender, each after one that warms up; one may fail alone."""
    workload, is_equal = rollout_workload(model, kind), kind == "equal"
    name = "64 tokens each" if is_equal else "long-tailed, at most 1024"
    for contender, made in contenders.items():
        what = f"0.6B rollout of {len(workload.prompts)}, {name}: {contender}"
        # `generate` takes too long on long tails to run twice.
        warm_ups = 0 if contender == "model.generate" and not is_equal else 1
        try:
            taken = rollout_seconds(made, model, workload, warm_ups)
        except Exception as error:  # noqa: BLE001 - the others go on
            yield {"what": what, "error": f"{type(error).__name__}: {error}"}
            continue
        per_second = workload.num_tokens / taken
        yield {"what": what, "seconds": taken, "tokens_per_second": per_second}


def rollout_seconds(contender: Contender, model: Any, workload: Workload, warm_ups: int) -> float:
    """Return the seconds of a contender's rollout."""
    with contender.create(model, workload) as run:
        for _ in range(warm_ups):
            run(workload)
        return timed(lambda: run(workload))


def line(row: dict[str, Any]) -> str:
    """Format one line of the table."""
    figures = {
        "step_ms": "{:8.2f} ms/step", "ms": "{:8.2f} ms", "seconds": "{:8.2f} s",
        "tokens_per_second": "{:10,.0f} tokens/s", "share_of_bandwidth": "{:5.0%} of bandwidth",
        "rollout_seconds": "rollout {:.2f} s", "loss_seconds": "loss {:.2f} s",
        "sync_seconds": "sync {:.3f} s", "graphs": "{} graphs",
        "drift_mean": "drift {:.1e}", "drift_max": "at most {:.1e}",
        "error": "{}", "note": "{}",
    }  # fmt: skip
    shown = [text.format(row[name]) for name, text in figures.items() if name in row]
    return f"{row['what']:<66}{'  '.join(shown)}"


def parts(shape: str, peak: float) -> dict[str, Callable[[], Rows]]:
    """Return the parts of a model's bench, the most robust first."""
    model = cache(partial(create_model, QWEN3[shape], DEVICE))
    measured: dict[str, Callable[[], Rows]] = {
        "decode": lambda: bench_decode(shape, model(), peak),
        "lifecycle": lambda: bench_lifecycle(shape, model()),
        "stages": lambda: bench_stages(shape, QWEN3[shape], DEVICE, peak),
        "compile": lambda: bench_compilation(shape, model()),
    }
    if shape == "0.6B":
        measured |= {
            "grpo": bench_grpo,
            "compile_grpo": bench_grpo_compilation,
            "peers": lambda: bench_peers(model()),
            "vllm": lambda: bench_vllm(model()),
        }
    return measured


def bench_shape(shape: str, peak: float, deadline: float, chosen: Sequence[str]) -> Rows:
    """Run the parts of one model until the deadline; a part that fails is a row of the table.

    After an error that leaves CUDA unusable in this process, no further part runs.
    """
    torch.cuda.reset_peak_memory_stats()
    for name, measure in parts(shape, peak).items():
        if name not in chosen:
            continue
        if time.perf_counter() > deadline:
            yield {"what": f"{shape} {name}", "note": "skipped: no time left"}
            continue
        try:
            yield from measure()
        except Exception as error:  # noqa: BLE001 - the other parts go on
            yield {"what": f"{shape} {name}", "error": f"{type(error).__name__}: {error}"}
            if any(said in str(error) for said in STICKY):
                return
    peak_gib = torch.cuda.max_memory_allocated() / GIB
    yield {"what": f"{shape} peak memory", "note": f"{peak_gib:.1f} GiB allocated"}


def write(path: Path, record: dict[str, Any]) -> None:
    """Write JSON that is whole whenever this process is killed."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    unfinished.replace(path)


def main() -> None:
    """Run every shape until the deadline, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=QWEN3, default=["8B", "4B", "0.6B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=DEFAULT_PARTS)
    parser.add_argument("--seconds", type=float, default=270.0, help="no new part starts after")
    parser.add_argument("--output", type=Path, help="where to write JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing was measured.")
    faulthandler.dump_traceback_later(HANG_SECONDS, repeat=True)
    deadline = time.perf_counter() + options.seconds
    rows: list[dict[str, Any]] = []
    machine, peak = describe_machine(DEVICE), bandwidth(MODELS["0.6b"].copied_bytes, DEVICE)
    record = machine | {"copy_bytes_per_second": peak, "rows": rows}
    print(machine, f"copy bandwidth {peak / 1e12:.2f} TB/s", sep="\n")
    shapes = ["0.6B"] if SMALLEST_PARTS.issuperset(options.parts) else options.shapes
    for shape in shapes:
        for row in bench_shape(shape, peak, deadline, options.parts):
            # Written at once, since a later row may run out of time.
            faulthandler.dump_traceback_later(HANG_SECONDS, repeat=True)
            rows.append(row)
            print(line(row), flush=True)
            if options.output:
                write(options.output, record)
        torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    print("", *map(line, rows), sep="\n")
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
