import gc

import torch
from fake_model import request_of

from cb_rollout import SamplingParams
from cb_rollout.config.enums import LogprobsMode
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import RequestStatus


def is_alive(name):
    objects = gc.get_objects()
    return any(type(one) is Request and one.request_id == name for one in objects)


def test_a_sampler_that_forgets_its_rows_keeps_no_sequence_alive():
    sampler = TokenSampler(torch.device("cpu"), LogprobsMode.POLICY, EngineCounters())
    given = [request_of([3], name="recurring")]
    assert sampler.extend(given, torch.zeros(1, 8), 0, is_recurring=True) == 1
    del given
    assert is_alive("recurring")
    sampler.forget_rows()
    assert not is_alive("recurring")


def broken_params():
    """Parameters that no check let through, as of a fault in a check."""
    params = SamplingParams(top_k=3)
    object.__setattr__(params, "top_k", 2**63)
    return params


def broken_rows():
    given = [request_of([3], name=str(n), max_new_tokens=9) for n in range(5)]
    given[3].params = broken_params()
    return given


def failed(requests):
    return [request.request_id for request in requests if request.status is RequestStatus.FAILED]


def test_a_row_whose_parameters_raise_fails_alone():
    sampler = TokenSampler(torch.device("cpu"), LogprobsMode.POLICY, EngineCounters())
    for is_recurring in (True, False):
        given = broken_rows()
        assert sampler.extend(given, torch.zeros(5, 8), 0, is_recurring=is_recurring) == 4
        assert failed(given) == ["3"]
        assert "OverflowError" in given[3].error
        assert isinstance(given[3].cause, OverflowError)
        assert [request.num_generated for request in given] == [1, 1, 1, 0, 1]
