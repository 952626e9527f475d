"""Activation checkpointing under the packed loss: layers run again where memory is short."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tiny_trainer import logged, tiny_trainer
from transformers import TrainerCallback

from cb_rollout import RolloutConfig, attach
from cb_rollout.engine.memory import device as devices
from cb_rollout.integrations.trl import packed_loss

GIB = 1 << 30


class CountForwards(TrainerCallback):
    """Count the forwards of a module that a backward pass follows, step by step."""

    def __init__(self, module):
        self.steps = []
        module.register_forward_pre_hook(self.count)

    def on_step_begin(self, args, state, control, **_):
        self.steps.append(0)

    def count(self, module, arguments):
        if self.steps:
            self.steps[-1] += torch.is_grad_enabled()


def trained(output_dir, config=None, **settings):
    """Train on TRL's own path, or attached; return forwards of a layer in the last step, losses."""
    trainer = tiny_trainer(output_dir, activation_checkpointing=True, **settings)
    forwards = CountForwards(trainer.model.model.layers[0].mlp)
    trainer.add_callback(forwards)
    if config is None:
        trainer.train()
    else:
        with attach(trainer, config):
            trainer.train()
    parameters = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return forwards.steps[-1], logged(trainer, "loss"), parameters


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_activations_that_fit_are_kept_and_change_no_gradient(tmp_path, monkeypatch, is_reentrant):
    checkpoints = {"activation_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
    config = RolloutConfig(seed=1)
    counts, results = Counter(), {}
    for name, free in (("kept", 4 * GIB), ("computed again", 1 << 20)):
        memory = devices.DeviceMemory(8 * GIB, free)
        found = SimpleNamespace(FREE_PER_COPY=devices.FREE_PER_COPY, memory=lambda _, m=memory: m)
        with monkeypatch.context() as patch:
            patch.setattr(packed_loss, "devices", found)
            counts[name], losses, parameters = trained(tmp_path / name, config, **checkpoints)
        results[name] = losses, parameters
    # A reentrant checkpoint runs its layer without gradients first.
    assert counts == {"kept": 1, "computed again": 1 if is_reentrant else 2}
    (kept_losses, kept), (losses, parameters) = results.values()
    assert kept_losses == losses
    assert all(map(torch.equal, kept, parameters))


@pytest.mark.parametrize(
    "settings", [{"loss_forward": "trainer"}, {"loss_tokens_per_forward": 4096}]
)
def test_what_a_user_asks_for_is_computed_again(tmp_path, settings):
    forwards, *_ = trained(tmp_path, RolloutConfig(seed=1, **settings))
    assert forwards == 2


def test_what_a_loss_compares_and_measures_is_no_part_of_the_peak_of_training(
    tmp_path, monkeypatch
):
    """Beside a cache that stays, that peak decides how large it is from the second step on."""
    events = []
    difference = packed_loss.PackedLoss._difference
    noting = packed_loss.noting_saved_bytes

    def compared(*args):
        events.append("compared")
        return difference(*args)

    @contextmanager
    def measured(model):
        events.append("measured")
        with noting(model) as saved:
            yield saved

    monkeypatch.setattr(packed_loss.PackedLoss, "_difference", compared)
    monkeypatch.setattr(packed_loss, "noting_saved_bytes", measured)
    monkeypatch.setattr(packed_loss, "forget_peaks", lambda: events.append("forgotten"))
    trained(tmp_path, RolloutConfig(seed=1, release_cache="never"))
    assert set(events[::2]) == {"compared", "measured"}
    assert events[1::2] == ["forgotten"] * (len(events) // 2)
    assert len(events) % 2 == 0
