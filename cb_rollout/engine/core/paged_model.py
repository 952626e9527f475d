"""Check that a model runs with a paged cache, and choose how its decode steps run.

Owns the results of the checks, until the model changes. Runs no step. Called by the thread that
steps the engine, or by a thread that paused it.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.cuda_graphs.selection import (
    SlowerPathLog,
    choose_compilation,
    create_decode_path,
)
from cb_rollout.engine.decode.findings import ProofFinding, StepPart
from cb_rollout.engine.decode.path import DecodePath, ExecutionPath
from cb_rollout.engine.decode.stepwise import StepwiseDecoding, adapter_path, prefill_path
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.model.training_model import TrainingModel


class PagedModel:
    """A model that was checked with a paged cache.

    Owns the layout of its cache, the `DecodePath` of its steps, and the identity of the module for
    which both were determined.
    """

    layout: CacheLayout
    """The tensors that each layer stores; set by `check`."""

    def __init__(self, runner: ModelRunner, config: RolloutConfig) -> None:
        """Check nothing yet.

        Args:
            runner: runs the model's forwards.
            config: the engine's settings.
        """
        self.runner = runner
        self.device = runner.device
        self._config = config
        self.decode_path: DecodePath = StepwiseDecoding(runner)
        """Runs decode steps; each `choose_decode_path` replaces it."""
        self._identity: Hashable = None
        self._slower_paths = SlowerPathLog(self.device)

    @property
    def is_changed(self) -> bool:
        """Return whether the model has changed since it was accepted."""
        return self.runner.forward_identity != self._identity

    @property
    def paths(self) -> list[ExecutionPath]:
        """Return how prefill and decode steps run at present, part by part."""
        paths = [prefill_path(self.runner), *self.decode_path.paths]
        names = self.runner.adapters.names()
        if names:
            paths.append(adapter_path(names, self.runner.mixing))
        return paths

    def describe_decoding(self) -> str:
        """Return how decode steps run at present, in one line."""
        return "; ".join(str(path) for path in self.decode_path.paths)

    def warn_of_slower_paths(self) -> None:
        """Log which parts a GPU could run faster, unless the last log line said the same."""
        self._slower_paths.warn_of(self.paths)

    def check(self, training_model: TrainingModel) -> Hashable:
        """Compare the model's paged forward with its plain forward, and with the training model's.

        Returns:
            The identity of the model that was checked, for `accept`.

        Raises:
            ConfigurationError: the model cannot run on pages, or a setting cannot be honoured.
        """
        runner = self.runner
        devices.require_unmoved(runner.model, self.device)
        identity = runner.forward_identity
        runner.forget_routes()
        with training_model.with_moved_adapters():
            # Free the current backend's memory, which the check may need.
            runner.use(replace(runner.execution, attention_backend=None))
            checked = check_model(runner)
            runner.use(checked.execution)
            self.layout = checked.layout
            training_model.check()
        training_model.remember_wrappers()
        if self._config.router_replay:
            self.layout = replace(self.layout, routes=runner.record_routes().spec)
        # Once for each layout: a later plan may find that the trace was given up for other reasons.
        choose_compilation(runner, self._config, self.layout)
        return identity

    def choose_decode_path(self, max_rows: int) -> None:
        """Create the path of decode steps, which may allocate device memory.

        Args:
            max_rows: the most sequences that run together.

        Raises:
            ConfigurationError: a setting asks for CUDA graphs, but none can be captured.
            OutOfCacheMemoryError: there is no memory for the graphs.
        """
        self.decode_path = create_decode_path(self.runner, self._config, max_rows)

    def drop_decode_path(self) -> None:
        """Switch decode steps to the plain path, and free the memory of the current path."""
        self.decode_path = StepwiseDecoding(self.runner)

    def accept(self, identity: Hashable) -> None:
        """Accept the model for which `check` returned this identity."""
        self._identity = identity

    def check_weights(self) -> None:
        """Drop traces, compiled forwards and graphs of earlier weights."""
        self.decode_path.check_weights()
        self.runner.check_weights()

    def begin(self) -> None:
        """Get ready for steps; the model is in evaluation mode."""
        self.check_weights()
        self.decode_path.begin()
        self.warn_of_slower_paths()

    def warm_up(self, num_steps: float = 0) -> None:
        """Trace, compile or capture decode steps ahead of time; no step may be running.

        Args:
            num_steps: expected number of decode steps; 0: unknown. On a CPU, steps are compiled
                only if that pays off within this number.
        """
        with self._computing():
            self.check_weights()
            self.runner.compile_prefill(self.layout)
            self.decode_path.warm_up(num_steps)
            self.warn_of_slower_paths()
            devices.finish(self.device)

    def prove(self) -> list[ProofFinding]:
        """Compare decode steps with the gathered path on temporary sequences; change nothing.

        No step may be running. Returns the differences beyond rounding.
        """
        with self._computing():
            return self.decode_path.prove()

    def step_down(self, difference: str) -> bool:
        """Switch decode steps to the next slower path, after a rollout turned out to be wrong.

        The engine must be paused.

        Args:
            difference: between the rollout and the model's plain forward, for the log.

        Returns:
            False if there is no slower path.
        """
        finding = ProofFinding(StepPart.FORWARD, "a rollout", difference)
        with self._computing():
            has_stepped = self.decode_path.step_down(finding)
        self.warn_of_slower_paths()
        return has_stepped

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Run forwards on the model's device, without the calling thread's autocast."""
        with self.runner.computing(), eval_mode(self.runner.model):
            yield

    def release_graphs(self) -> None:
        """Drop the CUDA graphs and free their memory, until `capture_released`."""
        with devices.current(self.device):
            self.decode_path.release()

    def capture_released(self) -> None:
        """Capture the CUDA graphs that `release_graphs` dropped; the engine must be paused."""
        # A model that was changed meanwhile is left to the next step, which checks it first.
        if self.decode_path.is_released and not self.is_changed:
            self.warm_up()

    def capture_wanted(self) -> None:
        """Capture the CUDA graphs that steps turned out to want; the engine must be paused."""
        # As in `capture_released`.
        if self.decode_path.is_wanting and not self.is_changed:
            self.warm_up()
