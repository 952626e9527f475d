"""Decide, at an engine's start, whether decode steps are compiled or run as CUDA graphs.

A setting that cannot be honoured is refused.
"""

from typing import NamedTuple

import torch

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import Numerics
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.attention.traced_forward import TracedForward
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampling
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.sampling.sampler import keeps_ids, reported_mode
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError, error_text

# Devices that compile decode steps unless asked not to: a step is a graph there, whose time is that
# of its kernels.
COMPILED_DEVICES = {"cuda"}

# Settings of graphs, and the values of each that do not ask for graphs.
_GRAPH_SETTINGS = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False), [False, False]),
    "q_padding_interval_size": (0,),
    "max_cached_graphs": (0,),
}


class ExecutionPath(NamedTuple):
    """The way in which one part of a rollout, or of the loss, runs."""

    part: str
    runs: str
    obstacle: str = ""
    """The reason why a better way, which no setting forbids, is not taken."""

    @property
    def text(self) -> str:
        return f"{self.runs} ({self.obstacle})" if self.obstacle else self.runs

    def __str__(self) -> str:
        return f"{self.part}: {self.text}"


def choose_compilation(runner: ModelRunner, config: RolloutConfig) -> None:
    """Have the runner's decode steps compiled, where the settings ask for it or leave it open.

    `ConfigurationError`: the steps cannot be compiled as asked.
    """
    asked = config.use_default_compile_configs
    if asked is False:
        return
    obstacle = _compile_obstacle(runner, config)
    if obstacle is None:
        traced_forward = _traced_forward(runner)
        assert traced_forward is not None
        if asked or runner.device.type in COMPILED_DEVICES:
            traced_forward.compile()
        elif config.numerics != Numerics.BITWISE:
            # Compiled operators add in other orders.
            traced_forward.compile_later()
    elif asked:
        raise ConfigurationError(
            f"use_default_compile_configs=True {obstacle}; leave it at its default."
        )


def _compile_obstacle(runner: ModelRunner, config: RolloutConfig) -> str | None:
    if config.wants_graphs is False:
        return "needs a trace of the forward, which use_cuda_graph=False forbids"
    if config.router_replay:
        return "needs a trace of the forward, which would record no routes (router_replay=True)"
    if (traced_forward := _traced_forward(runner)) is None:
        return f"needs a forward that can be traced ({runner.backend_selection.reason})"
    if not traced_forward.can_be_traced:
        return "needs a forward that can be traced (this model keeps recurrent states)"
    return None


def _traced_forward(runner: ModelRunner) -> TracedForward | None:
    return None if runner.attention_backend is None else runner.attention_backend.traced_forward


def graph_obstacle(device: torch.device) -> str | None:
    """Return the reason why a device has no CUDA graphs; None: it has them."""
    return None if device.type == "cuda" else f"needs a CUDA device, and the model is on {device}"


def create_graphs(
    runner: ModelRunner, config: RolloutConfig, max_rows: int, *, is_alone: bool
) -> tuple[GraphedDecoding | None, ExecutionPath]:
    """Create the graphs of decode steps of up to `max_rows`, and their path; None: no graphs.

    `is_alone`: no other process takes part in the forwards. `ConfigurationError`: a setting asks
    for graphs, and there can be none. `OutOfCacheMemoryError`: there is no memory for them.
    """
    traced_forward = _traced_forward(runner)
    is_plain = config.wants_graphs is False or config.router_replay or not is_alone
    if traced_forward is not None and is_plain:
        traced_forward.stay_untraced()
    if config.wants_graphs is False:
        return None, ExecutionPath("CUDA graphs", "off, as asked")
    graphs, obstacle = None, _graph_obstacle(runner)
    if not is_alone:
        obstacle = "need a model that one process holds whole"
    if obstacle is None:
        graphs, obstacle = _try_capture(runner, config, max_rows)
    if graphs is not None:
        ahead = ", a step ahead" if config.looks_ahead and graphs.can_look_ahead else ""
        if config.use_async_batching and not ahead:
            raise refused("async batching, recurrent states")
        return graphs, ExecutionPath("CUDA graphs", f"on{ahead}")
    asked = [
        f"{name}={getattr(config, name)!r}"
        for name, rest in _GRAPH_SETTINGS.items()
        if getattr(config, name) not in rest
    ]
    if asked:
        raise ConfigurationError(
            f"{', '.join(asked)} {obstacle}; leave use_cuda_graph and the settings of its graphs "
            "at their defaults."
        )
    if runner.recorder is not None:
        return None, ExecutionPath("CUDA graphs", f"off ({obstacle})")
    return None, ExecutionPath("CUDA graphs", "off", obstacle or "")


def _try_capture(
    runner: ModelRunner, config: RolloutConfig, max_rows: int
) -> tuple[GraphedDecoding | None, str | None]:
    """Return graphs that are captured, or the reason why they cannot be."""
    assert isinstance(runner.attention_backend, TritonBackend)
    vocab_size = hf_compat.vocab_size(runner.model)
    never_sampled = multimodal.never_sampled_token_ids(runner.model)
    never_sampled = tuple(token for token in never_sampled if token < vocab_size)
    sampling = GraphSampling(never_sampled, reported_mode(config), keeps_ids(config))
    graphs = GraphedDecoding(
        runner,
        runner.attention_backend,
        max_rows,
        sampling,
        row_interval=config.q_padding_interval_size,
        max_graphs=config.max_cached_graphs,
    )
    try:
        with eval_mode(runner.model), devices.current(runner.device):
            graphs.check_model(config.block_size)
    except torch.OutOfMemoryError as error:
        raise OutOfCacheMemoryError(
            f"no memory to capture decode steps of up to {max_rows} rows as CUDA graphs ({error}); "
            "lower max_requests_per_batch, or set use_cuda_graph=False."
        ) from error
    except Exception as error:  # noqa: BLE001  the error is the reason
        traced_forward = runner.attention_backend.traced_forward
        if traced_forward.trace is not None:
            # The model's own forward may be captured where its trace is not.
            traced_forward.stay_untraced(f"it cannot be captured: {error_text(error)}")
            return _try_capture(runner, config, max_rows)
        return None, f"needs a forward that never waits for the device ({error_text(error)})"
    return graphs, None


def _graph_obstacle(runner: ModelRunner) -> str | None:
    if obstacle := graph_obstacle(runner.device):
        return obstacle
    if runner.attention_backend is None:
        return f"needs decode steps without a gather: {runner.backend_selection.reason}"
    if runner.recorder is not None:
        return "needs router_replay=False: a replay would record no routes"
    return None
