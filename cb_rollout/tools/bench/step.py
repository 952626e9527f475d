"""The workload `step`: one GRPO step through TRL, by each of its generation paths.

A step is rollout, scoring, loss and update.
"""

import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.bench.contenders import BATCHING_SETTINGS, batching_fields
from cb_rollout.tools.bench.timing import summary, synchronize
from cb_rollout.tools.bench.workload import (
    Setup,
    Sizes,
    create_ending_model,
    long_tailed,
    word_tokenizer,
)

STEPS_PER_TURN = 1

# Records and checks, which no other contender makes.
QUIET = {"record_num_sequences": 0, "verify_every_steps": 0}


@dataclass(frozen=True)
class GenerationPath:
    """One way to generate in a GRPO step."""

    settings: str
    """The path's settings, and why they are the best for it."""
    trl: dict[str, Any] = field(default_factory=dict)
    """Fields of `GRPOConfig`."""
    rollout: dict[str, Any] | None = None
    """Fields of `RolloutConfig`; None: this package is not attached."""


def create_paths(sizes: Sizes, device: str) -> dict[str, GenerationPath]:
    """Return every path that is installed here; each generates one batch a step."""
    longest = [sizes.prompt_tokens[1] + sizes.longest_in_step] * sizes.num_sequences
    return {
        "cb_rollout": GenerationPath(
            "its defaults, without records and checks, which the others do not make", rollout=QUIET
        ),
        "cb_rollout, old_logps=rollout": GenerationPath(
            "as above, and the sampled log-probabilities save the forward that recomputes them",
            rollout=QUIET | {"old_logps": "rollout"},
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
    """Record the seconds of each optimizer step, rollout and update included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, before the rollout."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def bench_step(setup: Setup) -> dict[str, Any]:
    """Return the seconds of one step of each path."""
    print("step: vLLM, TRL's third path, is not installed here and is left out")
    paths = create_paths(setup.sizes, setup.device)
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for repetition in range(setup.repetitions):
        for name, path in paths.items():
            turn = _step_seconds(setup, path)
            seconds[name] += turn
            text = " ".join(f"{value:.2f}" for value in turn)
            print(f"  {repetition + 1}/{setup.repetitions} {name:<32}{text} s", flush=True)
    return {
        "grpo_step": {
            name: summary(seconds[name], "seconds", path.settings) for name, path in paths.items()
        }
    }


def _step_seconds(setup: Setup, path: GenerationPath) -> list[float]:
    """Return the seconds of each step of one trainer, after one that warms up."""
    # TRL warns of settings that are right for a single step.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _create_trainer(setup, path, folder)
        if path.rollout is not None:
            cb_rollout.attach(trainer, cb_rollout.RolloutConfig(**path.rollout))
        trainer.vllm_importance_sampling_mode = "token_truncate"
        trainer.remove_callback(PrinterCallback)
        clock = StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return clock.seconds[1:]


def _create_trainer(setup: Setup, path: GenerationPath, folder: str) -> GRPOTrainer:
    sizes, is_cpu = setup.sizes, setup.device == "cpu"
    return GRPOTrainer(
        model=create_ending_model(sizes.shape, setup.device, sizes.sampled_mean),
        reward_funcs=lambda completions, **_: [len(c) % 7 for c in completions],
        args=GRPOConfig(
            output_dir=folder, max_steps=1 + STEPS_PER_TURN, report_to=[],
            bf16=not is_cpu, use_cpu=is_cpu,
            per_device_train_batch_size=sizes.num_sequences,
            num_generations=sizes.num_completions,
            max_completion_length=sizes.longest_in_step, learning_rate=1e-6,
            disable_tqdm=True, save_strategy="no", logging_strategy="no", beta=0.0,
            activation_checkpointing=False, shuffle_dataset=False, **path.trl,
        ),
        train_dataset=Dataset.from_list(_rows(sizes)),
        processing_class=word_tokenizer(sizes.shape["vocab_size"]),
    )  # fmt: skip


def _rows(sizes: Sizes) -> list[dict[str, str]]:
    """Return the long-tailed workload's prompts as text; ids below 3 are special, not words."""
    prompts = long_tailed(sizes).prompts[:: sizes.num_completions]
    return [{"prompt": " ".join(f"w{max(3, token)}" for token in prompt)} for prompt in prompts]
