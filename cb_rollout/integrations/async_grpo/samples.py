"""Scored completions that an asynchronous trainer takes from its queue.

Owns the record, its reward and advantage, and the queue. The rollout thread makes samples; the
trainer's thread takes them.
"""

import asyncio
import inspect
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from cb_rollout.integrations.async_grpo.upstream import async_rollout_worker
from cb_rollout.strategies.base import Group
from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class RolloutSample(async_rollout_worker.RolloutSample):
    """A completion to train on, with its versions; `group_id` is the index of its prompt."""

    token_versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of `(model_version, num_tokens)` that sum to the sampled tokens."""

    def __post_init__(self) -> None:
        self.model_version = min(version for version, _ in self.token_versions)
        self.enqueued_at = time.time()


def saved_sample(sample: RolloutSample) -> dict[str, Any]:
    """Return a sample as numbers, text and tensors."""
    state: dict[str, Any] = {}
    for part in fields(sample):
        value = getattr(sample, part.name)
        state[part.name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return state


def restored_sample(state: Mapping[str, Any]) -> RolloutSample:
    """Return a saved sample; its wait in the queue begins now."""
    values: dict[str, Any] = {}
    for part in fields(RolloutSample):
        value = state[part.name]
        if part.init:
            values[part.name] = value.numpy() if isinstance(value, torch.Tensor) else value
    return RolloutSample(**values)


class SampleQueue(queue.Queue[RolloutSample]):
    """A bounded queue that reports each sample as it is taken."""

    def __init__(self, maxsize: int, on_taken: Callable[[RolloutSample], None]) -> None:
        """Call `on_taken` with each sample, on the thread that takes it."""
        super().__init__(maxsize)
        self._on_taken = on_taken

    def waiting(self) -> list[RolloutSample]:
        """Return the samples in the queue, the next one first."""
        with self.mutex:
            return list(self.queue)

    def wait_for_room(self, timeout: float) -> None:
        """Wait until a sample was taken, `timeout` seconds at most."""
        with self.not_full:
            if 0 < self.maxsize <= self._qsize():
                self.not_full.wait(timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        sample = super().get(block, timeout)
        self._on_taken(sample)
        return sample


def summed_rewards(
    functions: Sequence[Callable[..., Any]],
    row: Mapping[str, Any],
    outputs: Sequence[GenerationOutput],
    texts: Sequence[str],
) -> list[float | None]:
    """Sum the rewards of functions with TRL's arguments for each completion of a row.

    None where no function gave a number.
    """
    prompt = row["prompt"]
    columns: dict[str, list[Any]] = {}
    for name, value in row.items():
        if name != "prompt":
            columns[name] = [value] * len(texts)
    columns["prompts"] = [prompt] * len(texts)
    if isinstance(prompt, str):
        columns["completions"] = list(texts)
    else:
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    # Copies: a reward function may write into the lists that it gets.
    columns["completion_ids"] = [list(output.generated_tokens) for output in outputs]

    rewards_of_functions = []
    for function in functions:
        rewards = function(**columns)
        if inspect.iscoroutine(rewards):
            rewards = asyncio.run(rewards)
        rewards_of_functions.append(rewards)
    return [_sum_of_numbers(rewards) for rewards in zip(*rewards_of_functions, strict=True)]


def _sum_of_numbers(rewards: Sequence[Any]) -> float | None:
    """Sum the rewards that are not None; return None if all are None."""
    numbers = [float(reward) for reward in rewards if reward is not None]
    return sum(numbers) if numbers else None


def samples_of(group: Group, texts: Sequence[str], first_version: int) -> list[RolloutSample]:
    """Convert a scored group of `PromptSource` to samples.

    `first_version` is the trainer's version that is the engine's policy version 0.
    """
    prompt = group.prompt["row"]["prompt"]
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    mean = fmean(group.rewards)
    spread = pstdev(group.rewards)
    samples = []
    for output, reward, text in zip(group.outputs, group.rewards, texts, strict=True):
        num_prompt = len(output.prompt_ids)
        num_sampled = len(output.generated_tokens)
        versions = [(first_version + version, count) for version, count in output.policy_versions]
        samples.append(
            RolloutSample(
                prompt=messages,
                completion=[{"role": "assistant", "content": text}],
                input_ids=np.array(output.prompt_ids + output.generated_tokens),
                completion_mask=np.array([0] * num_prompt + [1] * num_sampled),
                old_log_probs=np.array([0.0] * num_prompt + output.logprobs, np.float32),
                # As in TRL's own worker.
                advantage=(reward - mean) / (spread + 1e-8),
                model_version=first_version,
                group_id=group.prompt["index"],
                metrics={"reward": reward, "reward_std": spread},
                token_versions=versions,
            )
        )
    return samples
