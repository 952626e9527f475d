"""Times cb_rollout beside its peers, in one process, and writes what it measured as JSON.

    python scripts/bench.py rollout            # one rollout: prompts in, completions out
    python scripts/bench.py step               # one GRPO step through TRL
    python scripts/bench.py sync               # a weight sync, beside bare tensor copies
    python scripts/bench.py strategies         # over-sampling and its like, against plain
    python scripts/bench.py serve              # the same requests over HTTP on this machine
    python scripts/bench.py scaling            # from one request at once to 1,024
    python scripts/bench.py bookkeeping        # what a decode step takes beside its forward
    python scripts/bench.py roofline           # what this machine can do at most

Contenders take turns, so that a slow spell of the machine meets all of them; figures are medians
over the repetitions, and only ratios within one run mean anything.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    TrainerCallback,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.engine.runner import ModelRunner
from cb_rollout.engine.sampling import TokenGiver
from cb_rollout.manager import ContinuousBatchingManager
from cb_rollout.strategies import (
    DynamicSampling,
    Flight,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    Plain,
)

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"
NUM_PROMPTS, NUM_COMPLETIONS = 16, 8
SEED = 0
STEPS_PER_TURN = 1
STRATEGY_STEPS = 4
EOS, MEAN_LENGTH = 1, 50
# The mean completion of a GRPO step; the longest allowed is 256.


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each completion is forced to have."""

    prompts: list[list[int]]
    """One per completion; equal neighbours form a group."""
    lengths: list[int]
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """Useful tokens: those that were asked for."""
        return sum(self.lengths)


def create_model(device: str, tied: bool = True) -> Qwen3ForCausalLM:
    """Random weights in the Qwen3 shape."""
    torch.manual_seed(SEED)
    shape = {
        "cpu": {
            "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
            "intermediate_size": 768,
        },
        "cuda": {
            "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3072, "max_position_embeddings": 40960,
        },
    }[device]  # fmt: skip
    config = Qwen3Config(**shape, eos_token_id=EOS, pad_token_id=0, tie_word_embeddings=tied)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Qwen3ForCausalLM(config).to(device=device, dtype=dtype).eval()


@torch.no_grad()
def end_after(model: Qwen3ForCausalLM, mean_length: int) -> None:
    """Make the end equally likely after every token, so that lengths are geometric.

    One coordinate of the residual stream is made constant, and only the end reads it.
    """
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[EOS] = 0.0
    ids = torch.randint(3, model.config.vocab_size, (8, 64), device=model.device)
    hidden = model.model(ids).last_hidden_state.float()
    others = (hidden @ model.lm_head.weight.float().T).logsumexp(-1).mean()
    wanted = others - torch.tensor(mean_length - 1.0, device=model.device).log()
    model.lm_head.weight[EOS, 0] = wanted / hidden[..., 0].mean()


def create_workload(device: str, equal: bool) -> Workload:
    """Long-tailed completions in groups; or, `equal`, prompts of their own and 64 tokens each."""
    draws = random.Random(SEED)
    is_cpu = device == "cpu"
    vocab_size = 2048 if is_cpu else 151936
    low, high = (20, 60) if is_cpu else (256, 512)
    mean, longest = (3.6, 512) if is_cpu else (6.0, 4096)
    num_prompts, repeats = (
        (NUM_PROMPTS * NUM_COMPLETIONS, 1) if equal else (NUM_PROMPTS, NUM_COMPLETIONS)
    )
    prompts = [
        [draws.randrange(2, vocab_size) for _ in range(draws.randint(low, high))]
        for _ in range(num_prompts)
    ]
    lengths = [
        64 if equal else min(longest, max(1, int(draws.lognormvariate(mean, 0.9))))
        for _ in range(NUM_PROMPTS * NUM_COMPLETIONS)
    ]
    return Workload([p for p in prompts for _ in range(repeats)], lengths, vocab_size)


class StopAtLengths(StoppingCriteria):
    """Ends every row of `generate` at its own length, and the batch when all are done."""

    def __init__(self, prompt_width: int, lengths: list[int], device: torch.device) -> None:
        self.ends = prompt_width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Which rows are done."""
        return input_ids.shape[1] >= self.ends


Contender = Callable[[], AbstractContextManager[Callable[[], None]]]
# Makes what a contender needs, gives what is timed, and takes everything away again.


@contextmanager
def generate_contender(
    model: Any, workload: Workload, batch_size: int
) -> Iterator[Callable[[], None]]:
    """`model.generate` on left-padded batches, without log-probabilities: at its best."""

    def run() -> None:
        for start in range(0, len(workload.prompts), batch_size):
            prompts = workload.prompts[start : start + batch_size]
            lengths = workload.lengths[start : start + batch_size]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
            )
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[StopAtLengths(width, lengths, model.device)],
            )
            assert output.shape[1] == width + max(lengths), "generate ended elsewhere than asked"

    yield run


@contextmanager
def transformers_contender(model: Any, workload: Workload) -> Iterator[Callable[[], None]]:
    """Transformers' own persistent manager, with log-probabilities."""
    names = ContinuousBatchingConfig.__dataclass_fields__
    page_size = {"page_size" if "page_size" in names else "block_size": 32}
    sizes = {"num_blocks": 1024, "max_batch_tokens": 1024} if model.device.type == "cpu" else {}
    config = ContinuousBatchingConfig(**page_size, **sizes, return_logprobs=True)
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=512,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    model.destroy_cached_continuous_batching_manager()
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(
        generation_config=sampling, continuous_batching_config=config
    )
    manager.start()

    def run() -> None:
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        num_done = 0
        while num_done < len(workload.prompts):
            output = manager.get_result(timeout=60)
            assert output is not None, "no result within a minute"
            assert output.error is None, output.error
            if output.is_finished():
                num_done += 1
                assert len(output.logprobs) == len(output.generated_tokens)

    try:
        yield run
    finally:
        manager.stop(block=True)
        manager.destroy()
        model.set_attn_implementation(attention)


@contextmanager
def cb_rollout_contender(model: Any, workload: Workload) -> Iterator[Callable[[], None]]:
    """This package, with its defaults."""
    params = cb_rollout.SamplingParams(ignore_eos=True)

    def run() -> None:
        outputs = generator.generate_batch(
            workload.prompts, sampling_params=params, max_new_tokens=workload.lengths
        ).values()
        assert all(len(o.logprobs) == len(o.generated_tokens) for o in outputs)
        generator.sync_weights()

    with cb_rollout.RolloutGenerator(model, cb_rollout.RolloutConfig(seed=SEED)) as generator:
        yield run


def timed(work: Callable[[], None]) -> float:
    """Seconds that `work` takes, what it started on the device included."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def interleaved(contenders: dict[str, Contender], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each contender's repetitions, after one to warm up, taking turns.

    Each is made anew for its turn: transformers' manager changes the model's attention while it
    lives.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, create in contenders.items():
            with create() as run:
                timed(run)
                seconds[name].append(timed(run))
            print(
                f"  {repetition + 1}/{repetitions} {name:<28}{seconds[name][-1]:8.2f} s", flush=True
            )
    return seconds


def bench_rollout(device: str, repetitions: int, batch_size: int | None = None) -> dict[str, Any]:
    """Useful tokens per second of one rollout, long-tailed groups and equal lengths.

    `generate` runs in batches of what is best for it on the CPU model, which `--batch-size` shows.
    """
    results = {}
    for kind, equal in (("long_tailed_groups", False), ("equal_lengths", True)):
        model, workload = create_model(device), create_workload(device, equal)
        batch = batch_size or (128 if equal else 64)
        print(f"rollout, {kind}: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
        contenders = {
            "cb_rollout": lambda m=model, w=workload: cb_rollout_contender(m, w),
            "transformers CB": lambda m=model, w=workload: transformers_contender(m, w),
            "model.generate": lambda m=model, w=workload, b=batch: generate_contender(m, w, b),
        }
        seconds = interleaved(contenders, repetitions)
        results[kind] = {
            name: summary([workload.num_tokens / s for s in values], "tokens_per_second")
            for name, values in seconds.items()
        }
    return results


def summary(values: list[float], unit: str) -> dict[str, Any]:
    """Median and spread."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "unit": unit,
    }


def char_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a word, so that prompts of any ids can be written as text."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, vocab_size))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


SAMPLED_OLD_LOGPS = "cb_rollout, old_logps=rollout"
# The contender of a step that saves the forward of the old log-probabilities.


class StepClock(TrainerCallback):
    """Seconds of each optimizer step, from before its rollout to after its update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before the rollout."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the update."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def step_seconds(device: str, workload: Workload, kind: str, num_steps: int) -> list[float]:
    """Seconds of each GRPO step of one trainer, after one to warm up."""
    model = create_model(device, tied=False)
    end_after(model, MEAN_LENGTH)
    tokenizer = char_tokenizer(workload.vocab_size)
    prompts = [
        " ".join(f"w{max(3, token)}" for token in prompt)
        for prompt in workload.prompts[::NUM_COMPLETIONS]
    ]
    settings: dict[str, Any] = {}
    if kind == "TRL continuous batching":
        settings = {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 1024, "page_size": 32},
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [len(c) % 7 for c in completions],
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(), max_steps=1 + num_steps, report_to=[],
                bf16=device != "cpu", use_cpu=device == "cpu",
                per_device_train_batch_size=NUM_PROMPTS * NUM_COMPLETIONS,
                num_generations=NUM_COMPLETIONS, max_completion_length=256, learning_rate=1e-6,
                disable_tqdm=True, save_strategy="no", logging_strategy="no", beta=0.0,
                activation_checkpointing=False, shuffle_dataset=False, **settings,
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
        )  # fmt: skip
    if kind.startswith("cb_rollout"):
        old_logps = "rollout" if kind == SAMPLED_OLD_LOGPS else "trainer"
        config = cb_rollout.RolloutConfig(
            record_num_sequences=0, verify_every_steps=0, old_logps=old_logps
        )
        cb_rollout.attach(trainer, config)
    trainer.vllm_importance_sampling_mode = "token_truncate"
    trainer.remove_callback(PrinterCallback)
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds[1:]


def bench_step(device: str, repetitions: int) -> dict[str, Any]:
    """Seconds of one GRPO step, through each generation path of TRL that is installed here."""
    workload = create_workload(device, equal=False)
    kinds = ("cb_rollout", SAMPLED_OLD_LOGPS, "TRL continuous batching", "TRL generate")
    print("step: vLLM, TRL's third path, is not installed here and is left out")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(repetitions):
        for kind in kinds:
            seconds[kind] += step_seconds(device, workload, kind, STEPS_PER_TURN)
            values = " ".join(f"{value:.2f}" for value in seconds[kind][-STEPS_PER_TURN:])
            print(f"  {repetition + 1}/{repetitions} {kind:<28}{values} s", flush=True)
    return {"grpo_step": {name: summary(values, "seconds") for name, values in seconds.items()}}


def bench_roofline(device: str, repetitions: int) -> dict[str, Any]:
    """Matrix-multiply rate at the decode shapes, and copy bandwidth."""
    del repetitions
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    left = torch.randn(128, 256, device=device, dtype=dtype)
    right = torch.randn(256, 768, device=device, dtype=dtype)
    source = torch.randn(64 * 1024 * 1024 // 4, device=device)
    target = torch.empty_like(source)

    def best_seconds(work: Callable[[], Any], count: int) -> float:
        work()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(count):
                work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / count)
        return min(times)

    flops = 2 * 128 * 256 * 768 / best_seconds(lambda: left @ right, 200)
    bandwidth = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), 10)
    parameters = sum(p.numel() for p in create_model(device).parameters())
    return {
        "machine": {
            "matmul_gflops": flops / 1e9,
            "copy_gb_per_second": bandwidth / 1e9,
            "matmul_bound_tokens_per_second": flops / (2 * parameters),
        }
    }


def bench_bookkeeping(device: str, repetitions: int) -> dict[str, Any]:
    """Seconds of a decode step of 256 sequences, and the share that is not forward or sampling."""
    results = {}
    for num_waiting in (0, 100, 10_000):
        model = create_model(device)
        config = cb_rollout.RolloutConfig(seed=SEED, max_requests_per_batch=256)
        manager = ContinuousBatchingManager(model, continuous_batching_config=config)
        requests = manager.intake.requests(
            [[2 + i % 2000, 3 + i // 2000] for i in range(256 + num_waiting)],
            [cb_rollout.SamplingParams(ignore_eos=True, max_new_tokens=400)] * (256 + num_waiting),
        )
        inside = 0.0

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                started = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    inside += time.perf_counter() - started

            return run

        forward, extend = ModelRunner.logits, TokenGiver.extend
        ModelRunner.logits, TokenGiver.extend = watched(forward), watched(extend)
        try:
            for request in requests:
                manager.engine.add(request)
            while sum(r.num_generated > 0 for r in requests[:256]) < 256:
                manager.engine.step()
            totals, shares = [], []
            for _ in range(10 * repetitions):
                inside = 0.0
                total = timed(manager.engine.step)
                totals.append(total)
                shares.append(1 - inside / total)
        finally:
            ModelRunner.logits, TokenGiver.extend = forward, extend
        results[f"{num_waiting} waiting"] = {
            "step_milliseconds": 1000 * statistics.median(totals),
            "bookkeeping_percent": 100 * statistics.median(shares),
        }
        manager.engine.abandon()
    return results


SCALES = (1, 4, 16, 64, 256, 1024)


def bench_scaling(device: str, repetitions: int) -> dict[str, Any]:
    """Useful tokens per second by how many requests of 64 tokens are there at once.

    `generate` runs in batches of 128 at most: larger ones are slower on the CPU model.
    """
    model, draws = create_model(device), random.Random(SEED)
    vocab_size = model.config.vocab_size
    results = {}
    for count in SCALES:
        prompts = [
            [draws.randrange(2, vocab_size) for _ in range(draws.randint(20, 60))]
            for _ in range(count)
        ]
        workload = Workload(prompts, [64] * count, vocab_size)
        contenders = {
            "cb_rollout": lambda w=workload: cb_rollout_contender(model, w),
            "transformers CB": lambda w=workload: transformers_contender(model, w),
            "model.generate": lambda w=workload: generate_contender(model, w, 128),
        }
        print(f"scaling: {count} requests")
        seconds = interleaved(contenders, repetitions)
        results[f"{count} requests"] = {
            name: summary([workload.num_tokens / s for s in values], "tokens_per_second")
            for name, values in seconds.items()
        }
    return results


def bench_sync(device: str, repetitions: int) -> dict[str, Any]:
    """Milliseconds of a sync, and the copy's bandwidth beside that of bare tensor copies.

    Both read and write the same bytes, and take turns; a rollout before each leaves caches as in
    training.
    """
    model = create_model(device)
    prompts = [[2, 3, 4]] * 4
    params = cb_rollout.SamplingParams(max_new_tokens=4, ignore_eos=True)
    tensors = [*model.parameters(), *model.buffers()]
    targets = [torch.empty_like(tensor) for tensor in tensors]

    @torch.no_grad()
    def copy_bare() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    generators = {
        kind: cb_rollout.RolloutGenerator(
            model, cb_rollout.RolloutConfig(seed=SEED, weight_sync=kind)
        )
        for kind in ("shared", "copy")
    }
    works: dict[str, Callable[[], Any]] = {"bare copies": copy_bare}
    works |= {f"{kind} sync": generator.sync_weights for kind, generator in generators.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(20 * repetitions + 1):
        for name, work in works.items():
            for generator in generators.values():
                generator.generate_batch(prompts, sampling_params=params)
            seconds[name].append(timed(work))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    num_bytes = generators["copy"].sync_weights().bytes_copied
    for generator in generators.values():
        generator.close()
    figures = {f"{name}, milliseconds": 1000 * value for name, value in medians.items()}
    bare, copied = (2 * num_bytes / medians[name] / 1e9 for name in ("bare copies", "copy sync"))
    return {
        "sync": figures
        | {
            "megabytes": num_bytes / 1e6,
            "bare copies, GB/s read and written": bare,
            "copy sync, GB/s read and written": copied,
            "copy sync, percent of bare": 100 * copied / bare,
        }
    }


def bench_strategies(device: str, repetitions: int) -> dict[str, Any]:
    """Useful tokens and reward per second of each strategy, on groups with a long tail.

    A step is a collection of groups and a stand-in for the training that follows; the weights are
    called changed after it, so what is carried is computed anew.
    """
    model, workload = create_model(device, tied=False), create_workload(device, equal=False)
    end_after(model, MEAN_LENGTH)
    num_groups, longest = NUM_PROMPTS // 2, 512 if device == "cpu" else 4096

    def hard_or_easy(prompt: list[int], outputs: list[Any]) -> list[float]:
        """Half of the prompts have no advantage to learn from."""
        if sum(prompt) % 2:
            return [0.0] * len(outputs)
        return [float(output.generated_tokens[0] % 2) for output in outputs]

    strategies = {
        "plain": Plain(),
        "over_sampling": OverSampling(num_extra_groups=num_groups // 2),
        "dynamic_sampling": DynamicSampling(num_extra_groups=2),
        "partial_rollouts": PartialRollouts(num_extra_groups=num_groups, max_staleness=4),
    }
    prompts = workload.prompts[::NUM_COMPLETIONS]
    params = cb_rollout.SamplingParams(max_new_tokens=longest)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in strategies}
    for repetition in range(repetitions):
        for name, strategy in strategies.items():
            config = cb_rollout.RolloutConfig(seed=SEED + repetition)
            with cb_rollout.RolloutGenerator(model, config) as generator:
                collector = GroupCollector(
                    Flight(generator, params), itertools.cycle(prompts), hard_or_easy, strategy,
                    num_generations=NUM_COMPLETIONS,
                )  # fmt: skip
                collector.collect(num_groups)
                generator.sync_weights()
                groups, seconds = [], 0.0
                for _ in range(STRATEGY_STEPS):
                    started = time.perf_counter()
                    groups += collector.collect(num_groups)
                    seconds += time.perf_counter() - started
                    generator.sync_weights()
                collector.close()
            measured = {
                "useful_tokens_per_second": sum(group.num_tokens for group in groups) / seconds,
                "reward_per_second": sum(sum(group.rewards) for group in groups) / seconds,
                "groups_with_advantage_per_second": sum(g.has_advantage for g in groups) / seconds,
            }
            for unit, value in measured.items():
                figures[name].setdefault(unit, []).append(value)
            said = ", ".join(f"{value:,.1f} {unit}" for unit, value in measured.items())
            print(f"  {repetition + 1}/{repetitions} {name:<20}{said}", flush=True)
    return {
        unit: {name: summary(values[unit], unit) for name, values in figures.items()}
        for unit in next(iter(figures.values()))
    }


CLIENT = """
import asyncio, json, sys
import httpx

async def main():
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=sys.argv[1], timeout=600, limits=limits) as client:
        async def ask(body):
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            (choice,) = answer["choices"]
            assert len(choice["token_ids"]) == body["max_tokens"]
            assert len(choice["logprobs"]["token_logprobs"]) == body["max_tokens"]
        for line in sys.stdin:
            await asyncio.gather(*map(ask, json.loads(line)))
            print("done", flush=True)

asyncio.run(main())
"""
# A process of its own, as clients are; each line of its input is one batch of requests.


@contextmanager
def served_contender(model: Any, workload: Workload) -> Iterator[Callable[[], None]]:
    """The same requests, each by itself over HTTP, from another process on this machine."""
    bodies = [
        {
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True,
        }
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
    ]  # fmt: skip
    config = cb_rollout.RolloutConfig(seed=SEED)
    tokenizer = char_tokenizer(workload.vocab_size)
    with cb_rollout.RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        server = generator.serve(port=0)
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        requests, answers = client.stdin, client.stdout
        assert requests is not None
        assert answers is not None

        def run() -> None:
            requests.write(f"{json.dumps(bodies)}\n")
            requests.flush()
            assert answers.readline() == "done\n", "the client failed"
            generator.sync_weights()

        try:
            yield run
        finally:
            requests.close()
            client.wait()
            answers.close()


def bench_serve(device: str, repetitions: int) -> dict[str, Any]:
    """Useful tokens per second of one rollout, called and served."""
    model, workload = create_model(device), create_workload(device, equal=False)
    contenders = {
        "cb_rollout": lambda: cb_rollout_contender(model, workload),
        "served on loopback": lambda: served_contender(model, workload),
    }
    seconds = interleaved(contenders, repetitions)
    results = {
        name: summary([workload.num_tokens / s for s in values], "tokens_per_second")
        for name, values in seconds.items()
    }
    return {"served": results}


BENCHES = {
    "serve": bench_serve,
    "bookkeeping": bench_bookkeeping,
    "rollout": bench_rollout,
    "step": bench_step,
    "scaling": bench_scaling,
    "sync": bench_sync,
    "strategies": bench_strategies,
    "roofline": bench_roofline,
}


def print_table(results: dict[str, Any]) -> None:
    """One table a workload, with ratios to cb_rollout."""
    for workload, contenders in results.items():
        print(f"\n{workload}")
        if "plain" in contenders:
            plain = contenders["plain"]["median"]
            for name, figures in contenders.items():
                ratio = figures["median"] / plain
                print(f"  {name:<28}{figures['median']:12.2f}  {ratio:.2f}x plain")
            continue
        if "cb_rollout" not in contenders:
            for name, value in contenders.items():
                print(f"  {name:<34}{value:12.1f}")
            continue
        ours = contenders["cb_rollout"]["median"]
        for name, figures in contenders.items():
            ratio = ours / figures["median"]
            if figures["unit"] == "seconds":
                ratio = 1 / ratio
            print(
                f"  {name:<28}{figures['median']:10.2f} {figures['unit']}"
                f"  ({figures['min']:.2f} to {figures['max']:.2f})   cb_rollout is {ratio:.2f}x"
            )


def main() -> None:
    """Run one bench, print its table and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="of model.generate in rollout")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output-dir", type=Path, default=BENCHMARKS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    settings = {"batch_size": arguments.batch_size} if arguments.bench == "rollout" else {}
    results = BENCHES[arguments.bench](arguments.device, arguments.repetitions, **settings)
    print_table(results)
    device = arguments.device
    record = {
        "bench": arguments.bench,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "cb_rollout": cb_rollout.__version__,
        },
        "repetitions": arguments.repetitions,
        "results": results,
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.output_dir / f"{arguments.bench}_{device}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
