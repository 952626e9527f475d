"""torch's worker threads end when they are released, and come back."""

import subprocess
import sys
import threading

import pytest
import torch
from tiny import char_tokenizer, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.compat.torch import dropout_rate, has_hooks, without_dropout
from cb_rollout.engine.numerics.bitwise import bitwise
from cb_rollout.engine.service import manager
from cb_rollout.errors import ConfigurationError
from cb_rollout.server import handle

COUNTS = """
import os, time, torch
from cb_rollout.compat.torch import release_workers

def num_threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
values = torch.arange(1 << 20, dtype=torch.float32)
release_workers()
before = num_threads()
first = (values * 2).sum().item()
working = num_threads()
assert release_workers()
deadline = time.monotonic() + 10  # detached: each ends by itself once it was told to
while num_threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
released = num_threads()
second = (values * 2).sum().item()
print(working - before, released - before, num_threads() - before, first == second)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="torch brings libgomp on Linux only"
)
def test_workers_end_when_they_are_released_and_come_back():
    done = subprocess.run(
        [sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "0", "2", "True"]


def test_a_served_generator_leaves_the_cores_to_the_thread_that_computes(monkeypatch):
    callers = []
    for module in (manager, handle):
        name = module.__name__
        monkeypatch.setattr(
            module, "release_workers", lambda n=name: callers.append((n, threading.get_ident()))
        )
    me = threading.get_ident()
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        generator.sync_weights()
        assert callers == []
        generator.serve(port=0)
        generator.sync_weights()
        assert callers == [
            ("cb_rollout.server.handle", me),
            ("cb_rollout.engine.service.manager", me),
        ]
        generator.close()
        generator.sync_weights()
        assert len(callers) == 2


def test_hooks_of_transformers_that_collect_outputs_leave_a_forward_capturable():
    model = tiny_model()
    assert not has_hooks(model)
    output = model(torch.tensor([[20, 21]]), output_hidden_states=True)
    assert len(output.hidden_states) > 1
    assert any(module._forward_hooks for module in model.modules())
    assert not has_hooks(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert has_hooks(model)


def test_dropout_that_is_a_number_of_a_module_is_found_and_switched_off():
    """OPT calls torch's function with `self.dropout`, in no module of its own."""
    model = tiny_model("opt", dropout=0.25).train()
    ids = torch.tensor([[5, 6, 7]])
    assert dropout_rate(model) == 0.25
    assert not torch.equal(model(ids).logits, model(ids).logits)
    with without_dropout(model):
        assert dropout_rate(model) == 0.0
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert dropout_rate(model) == 0.25
    with pytest.raises(ConfigurationError, match="drops activations at random"), bitwise(model):
        pass
