import pytest
import torch

from cb_rollout.engine.memory.training import optimizer_state_bytes

NUM_ELEMENTS = 64 * 64


def states_of(optimizer_class, **settings):
    """What an optimizer really keeps of a float32 matrix after a step, and what is said of it."""
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_class([parameter], lr=1e-3, **settings)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = optimizer.state[parameter].values()
    kept = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    name, size = optimizer_class.__name__, 4 * NUM_ELEMENTS
    return kept, optimizer_state_bytes(name, optimizer.defaults, NUM_ELEMENTS, size)


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
def test_what_torchs_optimizers_keep_is_known_to_a_row(name, settings):
    kept, said = states_of(getattr(torch.optim, name), **settings)
    # Step counts, and Adafactor's row and column, are more than nothing.
    assert said <= kept <= said + 3 * 64 * 4


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
def test_the_trainers_words_are_known_for_bfloat16_weights(name, bytes_per_element):
    expected = int(bytes_per_element * NUM_ELEMENTS)
    assert optimizer_state_bytes(name, {}, NUM_ELEMENTS, 2 * NUM_ELEMENTS) == expected
