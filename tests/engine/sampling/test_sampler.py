import gc

import torch
from fake_model import request_of

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.metrics.registry import EngineCounters


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
