"""The workload `step`: one GRPO step through TRL, by each of its generation paths; and `bitwise`.

A step is rollout, scoring, forward and backward of the loss, and update. Three batches: completions
of long-tailed lengths, and prompts of 400 tokens with 8 and with 16 completions each. `bitwise`
times a rollout and a step in both numerics.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from benchmarks.harness.contenders import BATCHING_SETTINGS, ours
from benchmarks.harness.records import summary
from benchmarks.harness.timing import ResidentPeak, throughputs
from benchmarks.harness.workload import long_tailed
from benchmarks.models import create_ending_model, word_tokenizer
from benchmarks.sizes import Setup, Sizes
from cb_rollout.engine.memory.device import empty_cache
from cb_rollout.tools.bench import batching_fields, create_model, synchronize

# Records, which no other contender writes.
QUIET = {"record_num_sequences": 0}

# transformers 5.23 renamed the setting, and warns of its old name.
IS_RENAMED = hasattr(GRPOConfig, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if IS_RENAMED else "gradient_checkpointing"

PARTS = ("rollout", "scoring", "forward", "backward", "optimizer")

# Tokens of a prompt (a problem statement and a system prompt), and completions of each.
LONG_PROMPT, GROUP_SIZES = 400, (8, 16)


@dataclass(frozen=True)
class GenerationPath:
    """A way to generate in a GRPO step."""

    settings: str
    """Says which settings, and why they are the best for the path."""
    trl: dict[str, Any] = field(default_factory=dict)
    """Fields of `GRPOConfig`."""
    rollout: dict[str, Any] | None = None
    """Fields of `RolloutConfig`; None: this package is not attached."""


def create_paths(sizes: Sizes, device: str) -> dict[str, GenerationPath]:
    """Return every path that is installed here; each generates a batch a step."""
    longest = [sizes.prompt_tokens[1] + sizes.longest_in_step] * sizes.num_sequences
    return {
        "cb_rollout": GenerationPath(
            "its defaults, without records, which the others do not write; its checks fall into "
            "the step before",
            rollout=QUIET,
        ),
        "cb_rollout, loss_forward=trainer": GenerationPath(
            "as above, with the trainer's own padded forward",
            rollout=QUIET | {"loss_forward": "trainer"},
        ),
        "TRL continuous batching": GenerationPath(
            f"made anew at each call, as TRL does; {BATCHING_SETTINGS}",
            trl={
                "use_transformers_continuous_batching": True,
                "transformers_continuous_batching_config": batching_fields(longest, device),
            },
        ),
        "TRL generate": GenerationPath(
            "its defaults: all completions are one batch, which TRL never cuts"
        ),
    }


class StepClock(TrainerCallback):
    """Measure the seconds of an optimizer step and of its parts."""

    def __init__(self, trainer: Any) -> None:
        self.figures: dict[str, float] = {}
        """Of the last step, by name."""
        self._methods: dict[str, float] = {}
        self._started = 0.0
        for name in ("_generate", "_generate_and_score_completions", "compute_loss"):
            setattr(trainer, name, self._timed(name, getattr(trainer, name)))
        trainer.training_step = self._timed("training_step", trainer.training_step)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            result = method(*arguments, **named)
            synchronize()
            seconds = time.perf_counter() - started
            self._methods[name] = self._methods.get(name, 0.0) + seconds
            return result

        return run

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._methods.clear()
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        total, spent = time.perf_counter() - self._started, self._methods
        made = spent["_generate_and_score_completions"]
        self.figures = {
            "seconds": total,
            "rollout": spent["_generate"],
            "scoring": made - spent["_generate"],
            "forward": spent["compute_loss"],
            "backward": spent["training_step"] - made - spent["compute_loss"],
            "optimizer": total - spent["training_step"],
        }


class LossMemory:
    """Measure the memory that forward and backward of a trainer's loss add to what it held."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.num_bytes = 0
        self._device, self._backward = device, trainer.accelerator.backward
        self._compute_loss = trainer.compute_loss
        self._peak: ResidentPeak | None = None
        self._held = 0
        trainer.compute_loss, trainer.accelerator.backward = self._forward, self._and_backward

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        empty_cache(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
        else:
            self._peak = ResidentPeak().__enter__()
            self._held = self._peak.num_bytes
        return self._compute_loss(*arguments, **named)

    def _and_backward(self, *arguments: Any, **named: Any) -> None:
        self._backward(*arguments, **named)
        if self._peak is None:
            self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._held
        else:
            self._peak.__exit__()
            self.num_bytes = self._peak.num_bytes - self._held


class MemoryClock(StepClock):
    """Measure the memory of the loss too."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._memory = LossMemory(trainer, trainer.accelerator.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        super().on_step_end()
        self.figures["loss_peak_bytes"] = self._memory.num_bytes


def bench_step(setup: Setup) -> dict[str, Any]:
    """Return the seconds of one step of each path, for each batch, and the memory of its loss."""
    print("step: vLLM, TRL's third path, is not installed here and is left out")
    print("step: TRL 1.16 has no Liger loss any more; its own fused head is in every path")
    num_sequences = setup.sizes.num_sequences
    batches = {"grpo_step": setup.sizes}
    for size in GROUP_SIZES if num_sequences >= max(GROUP_SIZES) else ():
        batches[f"grpo_step_{LONG_PROMPT}x{size}"] = replace(
            setup.sizes,
            prompt_tokens=(LONG_PROMPT, LONG_PROMPT),
            num_prompts=num_sequences // 2 // size,
            num_completions=size,
        )
    return {
        name: bench_batch(
            name,
            setup.repetitions,
            create_paths(sizes, setup.device),
            partial(create_trainer, replace(setup, sizes=sizes)),
            MemoryClock,
        )
        for name, sizes in batches.items()
    }


def bench_batch(
    batch: str,
    repetitions: int,
    paths: dict[str, GenerationPath],
    trainer_of: Callable[[GenerationPath, str], GRPOTrainer],
    create_clock: Callable[[Any], StepClock] = StepClock,
) -> dict[str, Any]:
    """Return the seconds of a step of each path, and of its parts.

    `trainer_of` creates the trainer of a path, which writes into a folder.
    """
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
    for repetition in range(repetitions):
        for name, path in paths.items():
            steps[name].append(timed_step(trainer_of, path, create_clock))
            seconds = steps[name][-1]["seconds"]
            turn = f"{repetition + 1}/{repetitions}"
            print(f"  {batch} {turn} {name:<32}{seconds:.2f} s", flush=True)
    return {
        name: summary([turn["seconds"] for turn in turns], "seconds", paths[name].settings)
        | {"parts": {part: statistics.median(turn[part] for turn in turns) for part in PARTS}}
        # What another clock measures besides.
        | {x: max(turn[x] for turn in turns) for x in turns[0] if x not in ("seconds", *PARTS)}
        for name, turns in steps.items()
    }


def timed_step(
    trainer_of: Callable[[GenerationPath, str], GRPOTrainer],
    path: GenerationPath,
    create_clock: Callable[[Any], StepClock],
) -> dict[str, float]:
    """Return what the clock measured of a trainer's second step; the first step warms up."""
    # TRL warns of settings that are right for a single step.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(path, folder)
        if path.rollout is not None:
            cb_rollout.attach(trainer, cb_rollout.RolloutConfig(**path.rollout))
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.remove_callback(PrinterCallback)
        clock = create_clock(trainer)
        trainer.add_callback(clock)
        trainer.train()
        if path.rollout is not None:
            # Bitwise operators stay installed for as long as a trainer is attached.
            cb_rollout.detach(trainer)
    return clock.figures


def create_trainer(setup: Setup, path: GenerationPath, folder: str) -> GRPOTrainer:
    """Create a trainer of a random model, two steps long."""
    sizes, is_cpu = setup.sizes, setup.device == "cpu"
    return GRPOTrainer(
        # As TRL loads a model; on a GPU bf16 is autocast.
        model=create_ending_model(sizes.shape, setup.device, sizes.sampled_mean).float(),
        reward_funcs=lambda completions, **_: [len(c) % 7 for c in completions],
        args=GRPOConfig(**{
            "output_dir": folder, "max_steps": 2, "report_to": [],
            "bf16": not is_cpu, "use_cpu": is_cpu,
            "per_device_train_batch_size": sizes.num_sequences,
            "num_generations": sizes.num_completions,
            "max_completion_length": sizes.longest_in_step, "learning_rate": 1e-6,
            "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "beta": 0.0,
            "shuffle_dataset": False, CHECKPOINTING: False, **path.trl,
        }),
        train_dataset=Dataset.from_list(_rows(sizes)),
        processing_class=word_tokenizer(sizes.shape["vocab_size"]),
    )  # fmt: skip


def _rows(sizes: Sizes) -> list[dict[str, str]]:
    """Return the long-tailed workload's prompts as text; ids below 3 are special, not words."""
    prompts = long_tailed(sizes).prompts[:: sizes.num_completions]
    return [{"prompt": " ".join(f"w{max(3, token)}" for token in prompt)} for prompt in prompts]


def bench_bitwise(setup: Setup) -> dict[str, Any]:
    """Return what `numerics="bitwise"` costs: a rollout's tokens per second, a step's seconds."""
    sizes, note = setup.sizes, "its defaults, without records"
    contenders = {"fast": ours(), "bitwise": ours(numerics="bitwise")}
    paths = {n: GenerationPath(note, rollout=QUIET | {"numerics": n}) for n in contenders}
    model = create_model(sizes.shape, setup.device)
    return {
        "bitwise_rollout": throughputs(contenders, model, long_tailed(sizes), setup.repetitions),
        "bitwise_step": bench_batch(
            "bitwise_step", setup.repetitions, paths, partial(create_trainer, setup), MemoryClock
        ),
    }
