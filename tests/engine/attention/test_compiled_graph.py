"""A graph of a user's settings is compiled for few sizes, and what torch refuses is refused."""

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from cb_rollout.config.compilation import CompileSettings
from cb_rollout.engine.attention.compiled_graph import (
    CompiledGraph,
    compile_obstacle,
    padded_size,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _counters_of_zero():
    counters.clear()


def settings_of(**arguments):
    return CompileSettings(**({"backend": "eager"} | arguments))


class Doubled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight * 2


def graph_of(module, settings, **arguments):
    return CompiledGraph(fx.symbolic_trace(module), settings, **arguments)


def run_of_size(graph, size):
    padded = graph.padded(size)
    found = graph((padded,), torch.ones(padded, 4))
    assert found.shape == (padded, 4)
    return found


@pytest.mark.parametrize(("dynamic", "most"), [(True, 1), (None, 2)])
def test_one_graph_takes_every_size(dynamic, most):
    graph = graph_of(Doubled(), settings_of(dynamic=dynamic, fullgraph=True))
    for size in (1, 2, 3, 7, 64, 100, 1):
        run_of_size(graph, size)
    assert counters["stats"]["unique_graphs"] <= most
    assert graph.num_graphs == 1


def test_static_graphs_are_as_many_as_the_sizes_that_others_are_rounded_up_to():
    graph = graph_of(Doubled(), settings_of(dynamic=False, fullgraph=True))
    for size in range(1, 200):
        run_of_size(graph, size)
    sizes = {padded_size(size) for size in range(1, 200)}
    assert counters["stats"]["unique_graphs"] == graph.num_graphs == len(sizes) == 13


def test_static_graphs_follow_the_interval_and_the_most_that_are_kept():
    graph = graph_of(Doubled(), settings_of(dynamic=False), interval=16, max_graphs=2)
    for size in (3, 16, 20, 33, 3):
        assert graph.padded(size) % 16 == 0
        run_of_size(graph, size)
    assert graph.num_graphs == 2
    # Of 16 rows twice: the first one was dropped for that of 48.
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("size", [1, 4, 5, 6, 7, 12, 13, 1000, 8192])
def test_at_most_half_of_what_is_needed_is_padding(size):
    assert size <= padded_size(size) <= max(4, size * 1.5)


def test_a_weight_that_changes_in_place_is_read_anew():
    module = Doubled()
    graph = graph_of(module, settings_of(dynamic=True))
    assert run_of_size(graph, 3).eq(2).all()
    with torch.no_grad():
        module.weight.mul_(5)
    assert run_of_size(graph, 3).eq(10).all()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backend": "no_such_backend"}, "is refused by torch.compile .*no_such_backend"),
        ({"backend": "inductor", "mode": "fastest"}, "is refused by torch.compile .*fastest"),
        ({"backend": "inductor", "options": {"speed": 1}}, "is refused by torch.compile .*speed"),
    ],
)
def test_what_torch_does_not_know_is_refused_in_its_words(arguments, said):
    obstacle = compile_obstacle(settings_of(**arguments), CPU)
    assert obstacle is not None
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(obstacle.replace("\n", " "))


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "inductor", "mode": "reduce-overhead"},
        {"backend": "inductor", "mode": "max-autotune"},
        {"backend": "inductor", "options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
)
def test_cuda_graphs_inside_those_of_the_engine_are_refused_and_a_cpu_has_none(arguments):
    obstacle = compile_obstacle(settings_of(**arguments), CUDA)
    assert obstacle is not None
    assert "cannot be captured in those of the engine; set mode='max-autotune-no" in obstacle
    assert compile_obstacle(settings_of(**arguments), CPU) is None


def test_modes_without_cuda_graphs_are_compiled_on_every_device():
    for mode in (None, "default", "max-autotune-no-cudagraphs"):
        for device in (CPU, CUDA):
            assert compile_obstacle(settings_of(backend="inductor", mode=mode), device) is None


def test_inductor_needs_a_compiler_on_a_cpu():
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        obstacle = compile_obstacle(settings_of(backend="inductor"), CPU)
        assert compile_obstacle(settings_of(backend="eager"), CPU) is None
    assert obstacle is not None
    assert obstacle.startswith("needs a C++ compiler")
