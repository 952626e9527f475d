import gc

import pytest
import torch
from tiny import tiny_model
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from transformers.training_args import OptimizerNames

from cb_rollout.engine.memory import training as trainings
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.training import (
    TrainingMemory,
    forget_peaks,
    optimizer_state_bytes,
)
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
    """An optimizer around another one, like accelerate's."""


class Peaks:
    """The memory in use and its peak, as a test sets them."""

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
    found = training_of(model, made).bytes_now()
    assert (found.gradients_to_come, found.optimizer_states_to_come) == (size, num_states * size)
    assert found.reserve == (1 + num_states) * size
    assert not found.is_measured


def test_frozen_parameters_and_existing_gradients_are_not_reserved():
    model = tiny_model().train()
    model.model.embed_tokens.weight.requires_grad_(False)
    head = model.lm_head.weight
    head.grad = torch.zeros_like(head)
    found = training_of(model).bytes_now()
    assert found.gradients == head.nbytes
    assert found.gradients_to_come == size_of(model) - head.nbytes
    assert found.weights == sum(p.nbytes for p in {*model.parameters(), *model.buffers()})


def test_a_model_that_is_not_trained_reserves_nothing_until_an_optimizer_is_named():
    model = tiny_model()
    assert training_of(model).bytes_now().reserve == 0
    assert training_of(model, "adamw_torch").bytes_now().reserve == 3 * size_of(model)


def test_the_name_of_no_known_optimizer_is_refused_with_those_that_are():
    model = tiny_model()
    with pytest.raises(ConfigurationError, match=r"optimizer='foo' .*adam, .*sgd"):
        training_of(model, "foo")
    for name in OptimizerNames:
        training_of(model, name)
    # A trainer may have a class of its own.
    own = type("Foo", (torch.optim.SGD,), {})
    assert training_of(model, own).bytes_now().reserve == 3 * size_of(model)


def test_an_optimizer_is_checked_and_unwrapped():
    with pytest.raises(ConfigurationError, match="optimizer=3 is neither a torch optimizer nor"):
        training_of(tiny_model(), 3)
    model = tiny_model()
    wrapped = Wrapped(model.parameters())
    wrapped.optimizer = torch.optim.SGD(model.parameters())
    assert training_of(model, wrapped).bytes_now().reserve == size_of(model)


def test_a_set_reserve_wins_over_everything(peaks):
    model = tiny_model().train()
    training = training_of(model, reserve=0.5)
    assert training.bytes_now().reserve == GIB // 2
    training.start_measuring()
    assert peaks.num_resets == 0
    step(model, torch.optim.SGD(model.parameters()))
    assert training.bytes_now().reserve == GIB // 2


def test_a_copy_that_generates_counts_as_weights():
    model, copy = tiny_model(), tiny_model()
    alone = training_of(model).bytes_now().weights
    assert training_of(model, generating=copy).bytes_now().weights == 2 * alone


def test_the_first_step_of_the_trained_models_optimizer_is_recorded(peaks):
    model, other = tiny_model().train(), tiny_model()
    training = training_of(model)
    step(other, torch.optim.Adam(other.parameters()))
    assert not training.needs_new_plan
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    assert training.needs_new_plan
    training.settle()
    step(model, optimizer)
    assert not training.needs_new_plan
    states = training.bytes_now().optimizer_states
    assert 2 * size_of(model) <= states <= 2 * size_of(model) + 4 * len(parameters_of(model))


def test_a_deleted_engine_is_not_kept_by_its_watcher():
    training = training_of(tiny_model())
    assert training in trainings._WATCHERS
    num_watchers = len(trainings._WATCHERS)
    del training
    gc.collect()
    assert len(trainings._WATCHERS) < num_watchers


def test_several_engines_record_a_step_and_no_hook_is_removed():
    """Otherwise torch raises "OrderedDict mutated during iteration" in the optimizer's step."""
    models = [tiny_model().train() for _ in range(3)]
    watching = [training_of(model) for model in models]
    num_hooks = len(hooks)
    parameters = [parameter for model in models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()
    assert [training.num_steps for training in watching] == [1, 1, 1]
    assert len(hooks) == num_hooks


def test_after_the_first_step_the_measured_peak_is_reserved(peaks):
    model = tiny_model().train()
    training = training_of(model)
    training.stop_measuring(0)
    training.start_measuring()
    peaks.used, peaks.peak = 700, 1000
    training.stop_measuring(50)
    training.start_measuring()
    peaks.used, peaks.peak = 900, 1100
    step(model, torch.optim.Adam(model.parameters()))
    training.stop_measuring(50)
    training.settle()
    found = training.bytes_now()
    assert (found.activations, found.is_measured) == (300, True)
    assert (found.gradients_to_come, found.optimizer_states_to_come) == (0, 0)
    training.start_measuring()
    assert peaks.num_resets == 2, "settled: the peak is left alone"


def test_a_peak_that_is_forgotten_is_not_reserved_and_a_settled_one_is_left_alone(peaks):
    model = tiny_model().train()
    training = training_of(model)
    training.start_measuring()
    peaks.used, peaks.peak = 700, 5000
    forget_peaks()
    assert peaks.num_resets == 2
    peaks.peak = 900
    step(model, torch.optim.Adam(model.parameters()))
    training.stop_measuring(50)
    assert training.bytes_now().activations == 200
    training.settle()
    forget_peaks()
    assert peaks.num_resets == 2


def test_the_peak_of_training_while_the_cache_is_released_is_not_reserved(peaks):
    model = tiny_model().train()
    training = training_of(model)
    training.start_measuring()
    peaks.used, peaks.peak = 700, 1000
    step(model, torch.optim.Adam(model.parameters()))
    training.stop_measuring(0)
    training.settle()
    found = training.bytes_now()
    assert (found.reserve, found.is_measured) == (0, True)


def test_without_a_peak_the_gradients_stay_reserved(monkeypatch):
    monkeypatch.setattr(trainings.devices, "reset_peak", lambda _: False)
    model = tiny_model().train()
    training = training_of(model)
    training.start_measuring()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    optimizer.zero_grad()
    training.stop_measuring(50)
    training.settle()
    found = training.bytes_now()
    assert (found.is_measured, found.reserve) == (False, size_of(model))


NUM_ELEMENTS = 64 * 64


def states_of(optimizer_class, **settings):
    """Bytes of an optimizer's states of a float32 matrix after a step, and their estimate."""
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_class([parameter], lr=1e-3, **settings)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = optimizer.state[parameter].values()
    num_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    name, size = optimizer_class.__name__, 4 * NUM_ELEMENTS
    return num_bytes, optimizer_state_bytes(name, optimizer.defaults, NUM_ELEMENTS, size)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {}),
        ("Adam", {"amsgrad": True}),
        ("NAdam", {}),
        ("Adamax", {}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("RMSprop", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("Muon", {}),
    ],
)
def test_states_of_torchs_optimizers_are_estimated_to_a_row(name, settings):
    num_bytes, estimate = states_of(getattr(torch.optim, name), **settings)
    # Step counts, and Adafactor's row and column, are not estimated.
    assert estimate <= num_bytes <= estimate + 3 * 64 * 4


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("adamw_torch_fused", 4),
        ("adamw_bnb_8bit", 2 * (1 + 4 / 256)),
        ("paged_lion_8bit", 1 + 4 / 256),
        ("paged_adamw_32bit", 8),
        ("adamw_torch_4bit", 2 * (0.5 + 4 / 128)),
        ("sgd", 0),
        ("schedule_free_sgd", 2),
        ("galore_adafactor", 0),
        ("rmsprop", 2),
        ("SomethingNew", 4),
    ],
)
def test_states_are_estimated_by_the_trainers_names_for_bfloat16_weights(name, bytes_per_element):
    expected = int(bytes_per_element * NUM_ELEMENTS)
    assert optimizer_state_bytes(name, {}, NUM_ELEMENTS, 2 * NUM_ELEMENTS) == expected
