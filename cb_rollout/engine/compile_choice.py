"""Whether decode steps are compiled. Asked where an engine is made; answers in a word."""

from cb_rollout import _compat_tracing
from cb_rollout.config import RolloutConfig
from cb_rollout.engine.attention.cpp_decoding import CppDecoding
from cb_rollout.engine.runner import ModelRunner
from cb_rollout.errors import ConfigurationError


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
    decoding, options, obstacle = runner.decoding, {}, _obstacle(runner, config)
    try:
        options = _compat_tracing.inductor_options(settings.mode) | dict(settings.options)
    except RuntimeError as error:
        obstacle = f"is of no known mode ({error})"
    if unknown := _compat_tracing.unknown_inductor_options(settings.options):
        obstacle = f"has options that inductor does not know ({', '.join(map(repr, unknown))})"
    if obstacle is None:
        assert isinstance(decoding, CppDecoding)
        decoding.listed.compile_with(options)
        return "; compiled"
    asked = "use_default_compile_configs=True"
    if config.decode_compile_config is not None:
        asked = f"decode_compile_config={config.decode_compile_config!r}"
    raise ConfigurationError(f"{asked} {obstacle}; leave it at its default.")


def _obstacle(runner: ModelRunner, config: RolloutConfig) -> str | None:
    if runner.device.type != "cpu":
        return f"is for a CPU; on {runner.device} decode steps run as CUDA graphs"
    if config.wants_graphs is False:
        return "needs a trace of the forward, which use_cuda_graph=False forbids"
    if not isinstance(runner.decoding, CppDecoding):
        return f"needs a forward that can be traced ({runner.attention.reason})"
    if not runner.decoding.listed.can_be_listed:
        return "needs a forward that can be traced (this model keeps recurrent states)"
    return None
