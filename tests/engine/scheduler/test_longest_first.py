"""Rollouts of recorded long-tailed lengths, counted in decode steps."""

import heapq
import json
from pathlib import Path

import pytest
from fake_model import request_of
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.scheduler.scheduler import WaitingQueue

RECORDED = Path(__file__).with_name("long_tailed_lengths.json")
NUM_ROWS = 16


@pytest.fixture(scope="module")
def rollouts():
    return json.loads(RECORDED.read_text())["rollouts"]


def num_steps(scheduler_type, epochs):
    """Decode steps of the last epoch, on an engine that ran the ones before."""
    config = RolloutConfig(
        seed=0,
        scheduler_type=scheduler_type,
        max_requests_per_batch=NUM_ROWS,
    )
    params = SamplingParams(ignore_eos=True)
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=512)
    with RolloutGenerator(model, config) as generator:
        for groups in epochs:
            before = generator.manager.counters.decode_forwards
            generator.generate_batch(
                [[5 + prompt, 6, 7] for prompt, group in enumerate(groups) for _ in group],
                sampling_params=params,
                max_new_tokens=[length for group in groups for length in group],
            )
        return generator.manager.counters.decode_forwards - before


@pytest.mark.slow
def test_longest_first_ends_a_recorded_rollout_sooner_than_fifo(rollouts):
    earlier, lengths = rollouts[0]["earlier"], rollouts[0]["lengths"]
    fifo = num_steps("fifo", [lengths])
    longest_first = num_steps("longest_first", [earlier, lengths])
    assert fifo >= 1.15 * longest_first


def modelled_steps(scheduler_type, rollout):
    """Steps of a rollout in which a row takes the next of the queue as soon as it is free."""
    queue = WaitingQueue(scheduler_type)
    for earlier, lengths in zip(rollout["earlier"], rollout["lengths"], strict=True):
        for length in lengths:
            request = request_of([1], max_new_tokens=length)
            request.expected_length = sum(earlier) / len(earlier)
            queue.append(request)
    ends = [0] * NUM_ROWS
    while queue.head is not None:
        heapq.heappush(ends, heapq.heappop(ends) + queue.take().max_new_tokens)
    return max(ends)


def test_longest_first_ends_eight_recorded_rollouts_sooner_than_fifo(rollouts):
    fifo = sum(modelled_steps("fifo", rollout) for rollout in rollouts)
    assert fifo >= 1.15 * sum(modelled_steps("longest_first", rollout) for rollout in rollouts)


def test_a_prompt_without_completions_comes_first_and_groups_stay_together():
    queue = WaitingQueue("longest_first")
    for name, expected_length in [("b", 5.0), ("new", None), ("a", 9.0), ("b", 5.0), ("a", 9.0)]:
        request = request_of([1], name=name)
        request.expected_length = expected_length
        queue.append(request)
    assert [request.request_id for request in queue] == ["new", "a", "a", "b", "b"]
