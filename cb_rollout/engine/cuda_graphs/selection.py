"""Whether decode steps are compiled. Asked where an engine is made; answers in a word.

Whether decode steps run as CUDA graphs. Asked where an engine is made; answers in a line.
"""

from typing import TYPE_CHECKING

import torch

from cb_rollout.compat import inductor
from cb_rollout.compat import torch as torch_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.cuda_graphs.graphs import GraphSizes
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner, eval_mode
from cb_rollout.errors import ConfigurationError, said

if TYPE_CHECKING:
    from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding


def choose_compilation(runner: ModelRunner, config: RolloutConfig) -> str:
    """Have the runner's decode steps compiled, where that is asked for.

    Returns:
        What to say about it; empty where nothing was asked for.

    Raises:
        ConfigurationError: it cannot be.
    """
    settings = config.compiles_decode
    if settings is None:
        return ""
    decoding, options, obstacle = runner.attention_backend, {}, _compile_obstacle(runner, config)
    try:
        options = inductor.inductor_options(settings.mode) | dict(settings.options)
    except RuntimeError as error:
        obstacle = f"is of no known mode ({error})"
    if unknown := inductor.unknown_inductor_options(settings.options):
        obstacle = f"has options that inductor does not know ({', '.join(map(repr, unknown))})"
    if obstacle is None:
        assert isinstance(decoding, CpuBackend)
        decoding.traced_forward.compile_with(options)
        return "; compiled"
    asked = "use_default_compile_configs=True"
    if config.decode_compile_config is not None:
        asked = f"decode_compile_config={config.decode_compile_config!r}"
    raise ConfigurationError(f"{asked} {obstacle}; leave it at its default.")


def _compile_obstacle(runner: ModelRunner, config: RolloutConfig) -> str | None:
    if runner.device.type != "cpu":
        return f"is for a CPU; on {runner.device} decode steps run as CUDA graphs"
    if config.wants_graphs is False:
        return "needs a trace of the forward, which use_cuda_graph=False forbids"
    if not isinstance(runner.attention_backend, CpuBackend):
        return f"needs a forward that can be traced ({runner.backend_selection.reason})"
    if not runner.attention_backend.traced_forward.can_be_traced:
        return "needs a forward that can be traced (this model keeps recurrent states)"
    return None


def graph_obstacle(device: torch.device) -> str | None:
    """Why a device has no graphs; None: it has."""
    return None if device.type == "cuda" else f"needs a CUDA device, and the model is on {device}"


def create_graphs(
    runner: ModelRunner, config: RolloutConfig, max_rows: int, is_recurrent: bool
) -> tuple["GraphedDecoding | None", str]:
    """What runs decode steps as graphs, where that can be, and what to say about it.

    Raises:
        ConfigurationError: graphs are asked for, and cannot be.
    """
    if config.wants_graphs is False:
        if isinstance(runner.attention_backend, CpuBackend):
            runner.attention_backend.traced_forward.stay_untraced()
        return None, "CUDA graphs: off, as asked"
    graphs, obstacle = None, _obstacle(runner, is_recurrent)
    if obstacle is None:
        graphs, obstacle = _checked_graphs(runner, config, max_rows)
    if graphs is not None:
        return graphs, "CUDA graphs: on" + (", a step ahead" if config.looks_ahead else "")
    asked = [
        f"{name}={getattr(config, name)!r}"
        for name, rest in _SETTINGS.items()
        if getattr(config, name) not in rest
    ]
    if asked:
        raise ConfigurationError(
            f"{', '.join(asked)} {obstacle}; leave use_cuda_graph and the settings of its graphs "
            "at their defaults."
        )
    return None, f"CUDA graphs: off ({obstacle})"


def _checked_graphs(
    runner: ModelRunner, config: RolloutConfig, max_rows: int
) -> tuple["GraphedDecoding | None", str | None]:
    """Graphs of which the smallest was captured, or None and why it could not be."""
    from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding

    assert isinstance(runner.attention_backend, TritonBackend)
    sizes = GraphSizes(
        config.q_padding_interval_size, config.kv_padding_interval_size, config.max_cached_graphs
    )
    graphs = GraphedDecoding(runner, runner.attention_backend, sizes, max_rows)
    try:
        with eval_mode(runner.model), devices.current(runner.device):
            graphs.check_model(config.block_size)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  what it raises is the answer
        return None, f"needs a forward that asks the host nothing ({said(error)})"
    return graphs, None


_SETTINGS = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False), [False, False]),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "max_cached_graphs": (0,),
}
# Each setting of graphs, and the values that ask for none.


def _obstacle(runner: ModelRunner, is_recurrent: bool) -> str | None:
    if obstacle := graph_obstacle(runner.device):
        return obstacle
    if runner.attention_backend is None:
        return f"needs decode steps without a gather: {runner.backend_selection.reason}"
    if is_recurrent:
        return "needs a model without recurrent states, which move when the cache is taken anew"
    if runner.compute_dtype != torch_compat.compute_dtype(runner.model):
        return "needs weights in the dtype that the forward computes in, not autocast"
    return None
