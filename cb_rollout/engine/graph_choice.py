"""Whether decode steps run as CUDA graphs. Asked where an engine is made; answers in a line."""

from typing import TYPE_CHECKING

import torch

from cb_rollout import _compat
from cb_rollout.config import RolloutConfig
from cb_rollout.engine import device as devices
from cb_rollout.engine.attention.choice import DecodePath
from cb_rollout.engine.attention.cpp_decoding import CppDecoding
from cb_rollout.engine.graph_sizes import GraphSizes
from cb_rollout.engine.runner import ModelRunner, leased
from cb_rollout.errors import ConfigurationError, said

if TYPE_CHECKING:
    from cb_rollout.engine.graphs import GraphedDecoding


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
        if isinstance(runner.decoding, CppDecoding):
            runner.decoding.listed.stay_untraced()
        return None, "CUDA graphs: off, as asked"
    graphs, obstacle = None, _obstacle(runner, is_recurrent)
    if obstacle is None:
        graphs, obstacle = _rehearsed(runner, config, max_rows)
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


def _rehearsed(
    runner: ModelRunner, config: RolloutConfig, max_rows: int
) -> tuple["GraphedDecoding | None", str | None]:
    """Graphs of which the smallest was captured, or None and why it could not be."""
    from cb_rollout.engine.attention.decoding import PagedDecoding
    from cb_rollout.engine.graphs import GraphedDecoding

    assert isinstance(runner.decoding, PagedDecoding)
    sizes = GraphSizes(
        config.q_padding_interval_size, config.kv_padding_interval_size, config.max_cached_graphs
    )
    graphs = GraphedDecoding(runner, runner.decoding, sizes, max_rows)
    try:
        with leased(runner.model), devices.current(runner.device):
            graphs.rehearse(config.block_size)
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
    if runner.attention.path is DecodePath.GATHERED:
        return f"needs decode steps without a gather: {runner.attention.reason}"
    if is_recurrent:
        return "needs a model without recurrent states, which move when the cache is taken anew"
    if runner.compute_dtype != _compat.compute_dtype(runner.model):
        return "needs weights in the dtype that the forward computes in, not autocast"
    return None
