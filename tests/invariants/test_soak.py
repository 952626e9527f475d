"""Everything at once, for long: what is submitted is delivered once, right, and nothing is left."""

import copy
import random
import threading

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import RequestStatus, RolloutConfig, SamplingParams
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.types import CancelResult

NUM_THREADS = 4
NUM_VERSIONS = 12
POISON = 255
# The token whose forward raises; it is never sampled.


def poison(model):
    """Have the forward raise wherever `POISON` is fed; call what is returned to heal it."""

    def never_sampled(module, inputs, logits):
        return logits.index_fill(-1, torch.tensor([POISON]), -1e4)

    model.lm_head.register_forward_hook(never_sampled)
    embed = model.get_input_embeddings()
    forward = embed.forward

    def faulty(input_ids):
        if bool((input_ids == POISON).any()):
            raise ValueError("poisoned")
        return forward(input_ids)

    embed.forward = faulty
    return lambda: setattr(embed, "forward", forward)


@torch.no_grad()
def change(model, rng):
    for parameter in model.parameters():
        parameter.mul_(rng.uniform(0.97, 1.03))


class Submitter(threading.Thread):
    """Sends its share of requests, cancels some, and takes every result of its own."""

    def __init__(self, manager, number, num_requests):
        super().__init__()
        self.manager, self.rng = manager, random.Random(number)
        self.remaining = num_requests
        self.temperatures: dict[str, float] = {}
        self.outputs = []
        self.failure = None

    def run(self):
        try:
            while self.remaining:
                self.submit()
            for request_id in self.temperatures:
                self.outputs.append(self.manager.get_result(request_id, timeout=300))
        except BaseException as error:
            self.failure = error
            raise

    def submit(self):
        rng = self.rng
        count = min(self.remaining, rng.choice([1, 1, 2, 4, 8]))
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([1, 3, 16, 17, 40]))]
        if rng.random() < 0.02:
            prompt.append(POISON)
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 2, 5, 20, 60]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 20]),
        )
        ids = self.manager.add_requests([prompt] * count, sampling_params=params)
        self.temperatures |= dict.fromkeys(ids, params.temperature or 1.0)
        self.remaining -= count
        if rng.random() < 0.2:
            request_id = rng.choice(list(self.temperatures))
            assert self.manager.cancel_request(request_id) is not CancelResult.UNKNOWN


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_thousands_of_requests_from_many_threads_are_each_delivered_once_and_right(in_flight):
    num_threads_before = threading.active_count()
    model = tiny_model()
    rng = random.Random(0)
    heal = poison(model)
    manager = ContinuousBatchingManager(
        model,
        continuous_batching_config=RolloutConfig(
            seed=0, block_size=16, num_blocks=40, max_batch_tokens=64, max_requests_per_batch=24
        ),
    )
    manager.start()
    submitters = [Submitter(manager, n, 2500 // NUM_THREADS) for n in range(NUM_THREADS)]
    for submitter in submitters:
        submitter.start()
    weights = [copy.deepcopy(model.state_dict())]
    while any(submitter.is_alive() for submitter in submitters):
        if len(weights) < NUM_VERSIONS:
            with manager.pause(in_flight):
                change(model, rng)
                weights.append(copy.deepcopy(model.state_dict()))
        for submitter in submitters:
            submitter.join(0.25)
    manager.stop()
    heal()
    assert [submitter.failure for submitter in submitters] == [None] * NUM_THREADS
    assert manager.get_result(timeout=0) is None
    assert manager.engine.num_blocks_used == 0
    assert manager.engine.status().kv_bytes == 0
    assert threading.active_count() == num_threads_before

    outputs = [output for submitter in submitters for output in submitter.outputs]
    assert len({output.request_id for output in outputs}) == 2500
    by_status = dict.fromkeys(RequestStatus, 0)
    for output in outputs:
        by_status[output.status] += 1
        if output.status is not RequestStatus.CANCELLED:
            assert (output.status is RequestStatus.FAILED) == (POISON in output.prompt_ids)
        assert sum(count for _, count in output.policy_versions) == len(output.generated_tokens)
        assert len(output.logprobs) == len(output.generated_tokens)
    assert by_status[RequestStatus.FINISHED] > 2000
    assert by_status[RequestStatus.CANCELLED] > 10
    assert by_status[RequestStatus.FAILED] > 10
    assert manager.counters.preemptions > 0
    temperatures = {k: v for s in submitters for k, v in s.temperatures.items()}
    check_logprobs(model, weights, outputs, temperatures, only_first=in_flight == "keep")


def check_logprobs(model, weights, outputs, temperatures, only_first):
    """Each token's log-probability is a plain forward's of the weights of its version.

    Tokens after a kept change were computed with older keys, so that nothing else equals them.
    """
    for version, state in enumerate(weights):
        model.load_state_dict(state)
        for output in outputs:
            start = 0
            for index, (run_version, count) in enumerate(output.policy_versions):
                if run_version == version and not (only_first and index):
                    expected = plain_logprobs(
                        model,
                        output.prompt_ids,
                        output.generated_tokens,
                        temperatures[output.request_id],
                    )
                    stop = start + count
                    assert output.logprobs[start:stop] == pytest.approx(
                        expected[start:stop], abs=1e-5
                    )
                start += count
