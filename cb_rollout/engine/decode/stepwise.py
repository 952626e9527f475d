"""Run decode steps one at a time: the model's forward, then sampling from its logits.

The forward is the runner's: over gathered keys, or by the C++ or Triton kernels of an attention
backend, called by the model itself, from a trace, or compiled. Keeps nothing between steps. Called
by the thread that steps the engine.
"""

from collections.abc import Sequence

from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.decode.findings import ProofFinding
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.model.mixing import AdapterMixing
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request


class StepwiseDecoding:
    """The plain `DecodePath`, and the base of others."""

    def __init__(self, runner: ModelRunner, others: Sequence[ExecutionPath] = ()) -> None:
        """Make nothing yet.

        Args:
            runner: runs the model's forward.
            others: lines of `paths` after those of the forward, such as why there are no CUDA
                graphs.
        """
        self.runner = runner
        self._others = list(others)

    @property
    def paths(self) -> list[ExecutionPath]:
        return [*decode_forward_paths(self.runner), *self._others]

    @property
    def planned_bytes(self) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def is_released(self) -> bool:
        return False

    @property
    def is_wanting(self) -> bool:
        return False

    def check_weights(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def warm_up(self, num_steps: float) -> None:
        self.runner.warm_up(num_steps)

    def prove(self) -> list[ProofFinding]:
        return []

    def step_down(self, finding: ProofFinding) -> bool:
        return False

    def release(self) -> None:
        pass

    def launched(self) -> list[Request]:
        return []

    def step(self, running: list[Request], context: StepContext) -> list[Request]:
        lengths = [request.num_tokens for request in running]
        logits_BV, rows, failed = context.forward(running, lengths)
        survivors = [running[row] for row in rows]
        return failed + context.finish_decode(survivors, logits_BV)

    def forget_rows(self) -> None:
        pass

    def discard_launched(self) -> None:
        pass


def prefill_path(runner: ModelRunner) -> ExecutionPath:
    """Return how prefills run at present."""
    runs = str(runner.batch_layout)
    obstacle = runner.packing_obstacle
    if obstacle:
        runs = f"{runs}, not packed"
    compiled = runner.compiled_prefill
    if compiled is not None:
        runs = f"{runs}, {compiled}"
        obstacle = obstacle or compiled.obstacle
    return ExecutionPath("prefill", runs, obstacle)


def adapter_path(names: Sequence[str], mixing: AdapterMixing) -> ExecutionPath:
    """Return how sequences that name one of these adapters run.

    Args:
        names: the model's adapters.
        mixing: what was proved about forwards of several adapters.
    """
    runs = f"{', '.join(names)}: by the model itself, without trace, compilation or CUDA graph"
    proof = ""
    if mixing.has_proved:
        runs += "; decode steps of several in one forward"
        proof = "agreed with a forward for each adapter in the first such step"
    elif mixing.obstacle:
        runs += f"; a forward for each in a step ({mixing.obstacle})"
    return ExecutionPath("named adapters", runs, proof=proof)


def decode_forward_paths(runner: ModelRunner) -> list[ExecutionPath]:
    """Return how attention runs in decode steps, and the forward around it."""
    selected = runner.backend_selection
    backend = runner.attention_backend
    if backend is not None:
        forward = backend.traced_forward
        return [
            ExecutionPath(
                "decode attention", f"{selected.name} ({selected.reason})", proof=backend.proof
            ),
            ExecutionPath("forwards", str(forward), forward.obstacle),
        ]
    if runner.reads_pages:
        return [ExecutionPath("decode attention", selected.name, selected.reason)]
    # A setting asks for this, so there is no obstacle.
    return [ExecutionPath("decode attention", f"{selected.name} ({selected.reason})")]
