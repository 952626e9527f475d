"""Decide, at an engine's start, whether decode steps are compiled or run as CUDA graphs.

A setting that cannot be honoured is refused.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.config.compilation import DECODE, PREFILL, CompileSettings
from cb_rollout.config.enums import Numerics
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.attention.compiled_graph import compile_obstacle
from cb_rollout.engine.attention.compiled_prefill import CompiledPrefill
from cb_rollout.engine.attention.traced_forward import TracedForward
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.cuda_graphs.capture import CaptureFailedError
from cb_rollout.engine.cuda_graphs.decode_path import CudaGraphDecoding
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampling
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding
from cb_rollout.engine.cuda_graphs.ladder import DecodeLadder, ProvedKernels
from cb_rollout.engine.decode.path import DecodePath, ExecutionPath
from cb_rollout.engine.decode.stepwise import StepwiseDecoding
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.sampling.sampler import keeps_ids, reported_mode
from cb_rollout.errors import ConfigurationError, OutOfCacheMemoryError, error_text

_LOGGER = logging.getLogger(__name__)

# Devices that compile decode steps unless asked not to: there, a step is a graph, which takes the
# time of its kernels.
COMPILED_DEVICES = {"cuda"}

# Settings of graphs, and the values of each that do not ask for graphs.
_GRAPH_SETTINGS = {
    "use_async_batching": (None, False),
    "use_cuda_graph": (None, False, (False, False), [False, False]),
    "q_padding_interval_size": (0,),
    "max_cached_graphs": (0,),
}


# Settings that also apply to the graphs of one size that `torch.compile` makes.
_STATIC_GRAPH_SETTINGS = ("q_padding_interval_size", "max_cached_graphs")


def choose_compilation(runner: ModelRunner, config: RolloutConfig, layout: CacheLayout) -> None:
    """Compile prefill and decode steps, if the settings ask for it or leave it open.

    Whatever a `CompileConfig` compiles is compiled now.

    Raises:
        ConfigurationError: a path cannot be compiled as asked.
    """
    _choose_prefill(runner, config, layout)
    settings: CompileSettings | None = getattr(config, DECODE)
    if settings is not None:
        _compile_decode_by(runner, config, settings)
        return
    asked = config.use_default_compile_configs
    if asked is False:
        return
    obstacle = _compile_obstacle(runner, config)
    if config.wants_graphs is False:
        obstacle = "needs a trace of the forward, which use_cuda_graph=False forbids"
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


def _choose_prefill(runner: ModelRunner, config: RolloutConfig, layout: CacheLayout) -> None:
    runner.compiled_prefill = None
    settings: CompileSettings | None = getattr(config, PREFILL)
    if settings is None:
        return
    obstacle = compile_obstacle(settings, runner.device) or _shared_obstacle(runner, config)
    if obstacle is None and runner.batch_layout is not BatchLayout.PACKED:
        reason = runner.packing_obstacle or "its rows are padded"
        obstacle = f"compiles the forward of packed prompts, and this model's are not ({reason})"
    prefill = CompiledPrefill(
        settings, interval=config.q_padding_interval_size, max_graphs=config.max_cached_graphs
    )
    if obstacle is None:
        runner.compiled_prefill = prefill
        if settings.raises_failure:
            # Here the error reaches the caller, and fails no request.
            with eval_mode(runner.model):
                runner.check_weights()
                runner.compile_prefill(layout)
        return
    if settings.refuses_obstacle:
        raise _refused_compilation(settings, "prefill", obstacle)
    prefill.give_up(obstacle)
    runner.compiled_prefill = prefill


def _compile_decode_by(
    runner: ModelRunner, config: RolloutConfig, settings: CompileSettings
) -> None:
    obstacle = compile_obstacle(settings, runner.device) or _compile_obstacle(runner, config)
    if obstacle is not None:
        raise _refused_compilation(settings, "decode steps", obstacle)
    traced_forward = _traced_forward(runner)
    assert traced_forward is not None
    traced_forward.compile_by(
        settings,
        row_interval=config.q_padding_interval_size,
        max_graphs=config.max_cached_graphs,
    )
    if settings.raises_failure:
        with eval_mode(runner.model):
            runner.check_weights()
            runner.warm_up()


def _refused_compilation(settings: CompileSettings, path: str, obstacle: str) -> ConfigurationError:
    advice = "leave it None"
    if settings.source.startswith("default_compile_level"):
        advice = "leave it 0, or set the compile config of the other path alone"
    return ConfigurationError(
        f"{settings.source} asks for compiled {path}, and {obstacle}; {advice}."
    )


def _compile_obstacle(runner: ModelRunner, config: RolloutConfig) -> str | None:
    if obstacle := _shared_obstacle(runner, config):
        return obstacle
    traced_forward = _traced_forward(runner)
    if traced_forward is None:
        return f"needs a forward that can be traced ({runner.backend_selection.reason})"
    if not traced_forward.can_be_traced:
        return "needs a forward that can be traced (this model keeps recurrent states)"
    return None


def _shared_obstacle(runner: ModelRunner, config: RolloutConfig) -> str | None:
    """Return why neither prefill nor decode steps can be compiled; None if they can."""
    if config.router_replay:
        return "needs a trace of the forward, which would record no routes (router_replay=True)"
    if runner.is_split:
        return "needs a model that one process holds whole"
    return None


def _traced_forward(runner: ModelRunner) -> TracedForward | None:
    if runner.attention_backend is None:
        return None
    return runner.attention_backend.traced_forward


def graph_obstacle(device: torch.device) -> str | None:
    """Return the reason why a device has no CUDA graphs; None: it has them."""
    if device.type == "cuda":
        return None
    return f"needs a CUDA device, and the model is on {device}"


class SlowerPathLog:
    """Logs what a GPU could run faster, in one warning, unless the last warning said the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._logged_last = ""

    def warn_of(self, paths: Sequence[ExecutionPath]) -> None:
        slower = "; ".join(str(path) for path in paths if path.obstacle)
        is_news = slower not in ("", self._logged_last)
        if is_news and graph_obstacle(self._device) is None:
            _LOGGER.warning("rollouts run slower than they could on this GPU: %s", slower)
        self._logged_last = slower


def create_decode_path(runner: ModelRunner, config: RolloutConfig, max_rows: int) -> DecodePath:
    """Return the path that runs decode steps: the first of `DECODE_PATHS` that takes this model.

    Args:
        runner: of a model that was checked on pages.
        config: the engine's settings.
        max_rows: most sequences that run together.

    Raises:
        ConfigurationError: a setting asks for CUDA graphs, but none can be captured.
        OutOfCacheMemoryError: there is no memory for the graphs.
    """
    for create in DECODE_PATHS:
        path = create(runner, config, max_rows)
        if path is not None:
            return path
    raise AssertionError("the last entry of DECODE_PATHS runs every model")


def _create_graphed_or_stepwise(
    runner: ModelRunner, config: RolloutConfig, max_rows: int
) -> DecodePath:
    """Return captured steps if settings, device and model allow them, else plain steps."""
    _stay_untraced_if_plain(runner, config)
    ladder = DecodeLadder(runner, config.block_size)
    if config.wants_graphs is False:
        _settle(runner, ladder, None)
        return ProvedKernels(runner, ladder, [ExecutionPath("CUDA graphs", "off, as asked")])
    graphs: GraphedDecoding | None = None
    obstacle = _graph_obstacle(runner)
    if runner.is_split:
        obstacle = "need a model that one process holds whole"
    if obstacle is None:
        graphs, obstacle = _try_capture(runner, config, max_rows, ladder)
    _settle(runner, ladder, graphs)
    if graphs is not None and (graphs.is_given_up or ladder.backend is None):
        obstacle = f"do not run {graphs.obstacle}"
        graphs = None
    if graphs is None:
        return _stepwise_without_graphs(runner, config, obstacle or "", ladder)
    path = CudaGraphDecoding(
        runner, graphs, config.block_size, looks_ahead=config.looks_ahead, ladder=ladder
    )
    if config.use_async_batching and not path.looks_ahead:
        raise refused("async batching, recurrent states")
    return path


def _settle(runner: ModelRunner, ladder: DecodeLadder, graphs: GraphedDecoding | None) -> None:
    """Prove the chosen path, and step down if the proof fails."""
    with eval_mode(runner.model), devices.current(runner.device):
        ladder.settle(graphs)


DecodePathFactory = Callable[[ModelRunner, RolloutConfig, int], DecodePath | None]
"""Creates a decode path of a checked model, as `create_decode_path`; None: this model has none."""

# The first that returns a path runs the decode steps.
DECODE_PATHS: list[DecodePathFactory] = [_create_graphed_or_stepwise]


def _stay_untraced_if_plain(runner: ModelRunner, config: RolloutConfig) -> None:
    """Run decode steps by the model itself if the settings forbid a trace."""
    traced_forward = _traced_forward(runner)
    if traced_forward is None:
        return
    # Graphs that are off leave a compiled forward as it is.
    is_off = config.wants_graphs is False and traced_forward.settings is None
    if is_off or config.router_replay or runner.is_split:
        traced_forward.stay_untraced()


def _stepwise_without_graphs(
    runner: ModelRunner, config: RolloutConfig, obstacle: str, ladder: DecodeLadder
) -> StepwiseDecoding:
    """Return plain steps, with the obstacle of CUDA graphs; refuse settings that ask for graphs."""
    has_static_graphs = _has_static_graphs(config)
    asked: list[str] = []
    for name, rest in _GRAPH_SETTINGS.items():
        if has_static_graphs and name in _STATIC_GRAPH_SETTINGS:
            continue
        value = getattr(config, name)
        if value not in rest:
            asked.append(f"{name}={value!r}")
    if asked:
        raise ConfigurationError(
            f"{', '.join(asked)} {obstacle}; leave use_cuda_graph and the settings of its graphs "
            "at their defaults."
        )
    if runner.recorder is not None or not runner.reads_pages:
        off = ExecutionPath("CUDA graphs", f"off ({obstacle})")
    else:
        off = ExecutionPath("CUDA graphs", "off", obstacle)
    return ProvedKernels(runner, ladder, [off])


def _has_static_graphs(config: RolloutConfig) -> bool:
    """Return whether `torch.compile` makes one graph per size, on any device."""
    paths: list[CompileSettings | None] = [getattr(config, name) for name in (PREFILL, DECODE)]
    return any(settings is not None and settings.is_static for settings in paths)


def _try_capture(
    runner: ModelRunner, config: RolloutConfig, max_rows: int, ladder: DecodeLadder
) -> tuple[GraphedDecoding | None, str | None]:
    """Return graphs that are captured, or the reason why they cannot be.

    A step that cannot be captured on one rung of the ladder may be captured on a lower one.
    """
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
    except CaptureFailedError as error:
        return None, f"cannot be had: {error}"
    except Exception as error:  # noqa: BLE001  the error is the reason
        if ladder.leave_uncapturable(error):
            return _try_capture(runner, config, max_rows, ladder)
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
