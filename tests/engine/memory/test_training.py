import gc

import pytest
import torch
from tiny import tiny_model
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

from cb_rollout.engine.memory import training as trainings
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.errors import ConfigurationError

CPU = torch.device("cpu")


def parameters_of(model):
    return [p for p in model.parameters() if p.requires_grad]


def size_of(model):
    return sum(p.nbytes for p in parameters_of(model))


def training_of(model, optimizer=None, generating=None, reserve="auto"):
    return TrainingMemory(model, generating or model, CPU, optimizer, reserve)


def step(model, optimizer):
    for parameter in parameters_of(model):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


class Wrapped(torch.optim.Adam):
    """As accelerate wraps an optimizer: one itself, the real one inside."""


class Peaks:
    """A device that tells what a test says."""

    def __init__(self, monkeypatch):
        self.used = self.peak = 0
        self.num_resets = 0
        monkeypatch.setattr(trainings.devices, "reset_peak", self.reset)
        monkeypatch.setattr(trainings.devices, "used_and_peak", lambda _: (self.used, self.peak))

    def reset(self, _):
        self.num_resets += 1
        return True


@pytest.fixture
def peaks(monkeypatch):
    return Peaks(monkeypatch)


@pytest.mark.parametrize(
    ("optimizer", "num_states"),
    [
        (None, 2),
        ("sgd", 0),
        (lambda p: torch.optim.SGD(p, lr=1.0), 0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    ],
)
def test_gradients_and_states_are_estimated_before_the_first_step(optimizer, num_states):
    model = tiny_model().train()
    size = size_of(model)
    made = optimizer(model.parameters()) if callable(optimizer) else optimizer
    found = training_of(model, made).in_bytes()
    assert (found.gradients_to_come, found.optimizer_states_to_come) == (size, num_states * size)
    assert found.reserve == (1 + num_states) * size
    assert not found.is_measured


def test_only_what_trains_is_counted_and_gradients_that_are_there_are_not_to_come():
    model = tiny_model().train()
    model.model.embed_tokens.weight.requires_grad_(False)
    head = model.lm_head.weight
    head.grad = torch.zeros_like(head)
    found = training_of(model).in_bytes()
    assert found.gradients == head.nbytes
    assert found.gradients_to_come == size_of(model) - head.nbytes
    assert found.weights == sum(p.nbytes for p in {*model.parameters(), *model.buffers()})


def test_a_model_that_is_not_trained_reserves_nothing_until_an_optimizer_is_named():
    model = tiny_model()
    assert training_of(model).in_bytes().reserve == 0
    assert training_of(model, "adamw_torch").in_bytes().reserve == 3 * size_of(model)


def test_what_is_no_optimizer_is_refused_and_a_wrapped_one_is_seen_through():
    with pytest.raises(ConfigurationError, match="optimizer=3 is neither a torch optimizer nor"):
        training_of(tiny_model(), 3)
    model = tiny_model()
    wrapped = Wrapped(model.parameters())
    wrapped.optimizer = torch.optim.SGD(model.parameters())
    assert training_of(model, wrapped).in_bytes().reserve == size_of(model)


def test_a_set_reserve_wins_over_everything(peaks):
    model = tiny_model().train()
    training = training_of(model, reserve=0.5)
    assert training.in_bytes().reserve == GIB // 2
    training.idle()
    assert peaks.num_resets == 0
    step(model, torch.optim.SGD(model.parameters()))
    assert training.in_bytes().reserve == GIB // 2


def test_a_copy_that_generates_is_weight_too():
    model, copy = tiny_model(), tiny_model()
    alone = training_of(model).in_bytes().weights
    assert training_of(model, generating=copy).in_bytes().weights == 2 * alone


def test_the_first_step_is_seen_whoever_makes_it_and_once(peaks):
    model, other = tiny_model().train(), tiny_model()
    training = training_of(model)
    step(other, torch.optim.Adam(other.parameters()))
    assert not training.calls_for_plan
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    assert training.calls_for_plan
    assert training not in trainings._WATCHERS
    training.settle()
    step(model, optimizer)
    assert not training.calls_for_plan
    states = training.in_bytes().optimizer_states
    assert 2 * size_of(model) <= states <= 2 * size_of(model) + 4 * len(parameters_of(model))


def test_who_is_gone_watches_no_longer():
    training = training_of(tiny_model())
    assert training in trainings._WATCHERS
    num_watchers = len(trainings._WATCHERS)
    del training
    gc.collect()
    assert len(trainings._WATCHERS) < num_watchers


def test_several_engines_see_a_step_and_no_hook_ever_goes():
    """torch would raise "OrderedDict mutated during iteration" out of the optimizer's step."""
    models = [tiny_model().train() for _ in range(3)]
    watching = [training_of(model) for model in models]
    num_hooks = len(hooks)
    parameters = [parameter for model in models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()
    assert all(training.has_stepped for training in watching)
    assert len(hooks) == num_hooks


def test_after_the_first_step_the_measured_peak_is_what_is_kept_free(peaks):
    model = tiny_model().train()
    training = training_of(model)
    training.busy(0)  # a rollout before anything was watched
    training.idle()
    peaks.used, peaks.peak = 700, 1000
    training.busy(50)
    training.idle()
    peaks.used, peaks.peak = 900, 1100
    step(model, torch.optim.Adam(model.parameters()))
    training.busy(50)
    training.settle()
    found = training.in_bytes()
    assert (found.activations, found.is_measured) == (300, True)
    assert (found.gradients_to_come, found.optimizer_states_to_come) == (0, 0)
    training.idle()
    assert peaks.num_resets == 2, "settled: the peak is left alone"


def test_what_training_takes_while_the_cache_is_away_is_not_kept_free(peaks):
    model = tiny_model().train()
    training = training_of(model)
    training.idle()
    peaks.used, peaks.peak = 700, 1000
    step(model, torch.optim.Adam(model.parameters()))
    training.busy(0)
    training.settle()
    found = training.in_bytes()
    assert (found.reserve, found.is_measured) == (0, True)


def test_without_a_peak_the_gradients_stay_reserved(monkeypatch):
    monkeypatch.setattr(trainings.devices, "reset_peak", lambda _: False)
    model = tiny_model().train()
    training = training_of(model)
    training.idle()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    optimizer.zero_grad()
    training.busy(50)
    training.settle()
    found = training.in_bytes()
    assert (found.is_measured, found.reserve) == (False, size_of(model))
