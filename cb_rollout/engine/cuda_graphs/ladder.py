"""Step decode steps down to the fastest rung that is proved on this device.

A rung is a way to run decode steps; each rung leaves out one optimization of the rung above it. If
a proof finds a difference, the ladder moves one rung down and proves again. The lowest rung, the
gathered path, needs no proof. The ladder never moves up again. Called by the thread that makes an
engine, or that paused it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import torch

from cb_rollout.compat.module_state import captured_code
from cb_rollout.engine.attention.selector import BackendSelection
from cb_rollout.engine.attention.triton.backend import TritonBackend
from cb_rollout.engine.cuda_graphs.capture import WaitingStepError
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, GraphKey
from cb_rollout.engine.cuda_graphs.proof import Proof
from cb_rollout.engine.decode.findings import ProofFinding, StepPart
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.decode.stepwise import StepwiseDecoding
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.errors import error_text

_LOGGER = logging.getLogger(__name__)

# Devices whose kernels are compiled where they run, and are proved there.
PROVED_DEVICES = {"cuda"}


class Rung(StrEnum):
    """A way to run decode steps; the fastest is first."""

    COMPILED = "compiled forward"
    OWN_FORWARD = "the model's own forward"
    NO_SHARED_TILES = "no shared tiles"
    NO_STRETCHES = "no stretches"
    NO_GRAPH = "no graph"
    GATHERED = "gathered"


class DecodeLadder:
    """The current rung of an engine's decode steps, and the reasons for each step down."""

    def __init__(self, runner: ModelRunner, block_size: int) -> None:
        """Start on the highest rung that the runner supports; nothing is proved yet.

        Args:
            runner: of a model that was checked on pages.
            block_size: tokens of a page.
        """
        self._runner = runner
        self._block_size = block_size
        self._proved = ""
        """The last proof that passed; "": none."""
        self._steps: list[str] = []
        """The rungs that were left, each with its finding."""
        self._trace: object = None
        """The trace that was proved."""
        self._code: list[object] = []
        """The modules, their forwards and settings that were proved."""
        self._proved_keys: set[GraphKey] = set()

    @property
    def backend(self) -> TritonBackend | None:
        """Return the backend whose kernels run; None: keys are gathered."""
        backend = self._runner.attention_backend
        return backend if isinstance(backend, TritonBackend) else None

    @property
    def proof_obstacle(self) -> str:
        """Return why decode steps cannot be proved, or need not; "": they can."""
        if self._runner.device.type not in PROVED_DEVICES or self.backend is None:
            return "no kernels of a device"
        if self.backend.layout.is_recurrent:
            return "steps move recurrent states"
        if self._runner.is_split:
            return "its layers are split over processes"
        return ""

    def rung(self, graphs: GraphedDecoding | None) -> Rung:
        """Return the rung that decode steps are on; `graphs`: None: there are none."""
        backend = self.backend
        if backend is None:
            return Rung.GATHERED
        if graphs is None or graphs.obstacle:
            return Rung.NO_GRAPH
        if not backend.forms.can_cut:
            return Rung.NO_STRETCHES
        if not backend.forms.can_share:
            return Rung.NO_SHARED_TILES
        trace = backend.traced_forward.trace
        return Rung.OWN_FORWARD if trace is None else Rung.COMPILED

    @property
    def paths(self) -> list[ExecutionPath]:
        """Return a line with the proof's result and the rungs that failed."""
        if not self._proved and not self._steps:
            return []
        obstacle = ""
        if self._steps:
            card = _card(self._runner.device)
            obstacle = "; ".join([f"on {card}", *self._steps])
        return [ExecutionPath("decode proof", self._proved or "not proved", obstacle)]

    def is_due(self, graphs: GraphedDecoding) -> bool:
        """Return whether a captured graph is unproved, or of a forward that has changed."""
        backend = self.backend
        if backend is None or not graphs.keys:
            return False
        is_other_trace = backend.traced_forward.trace is not self._trace
        if is_other_trace or captured_code(self._runner.model) != self._code:
            return True
        return not self._proved_keys.issuperset(graphs.keys)

    def prove(self, graphs: GraphedDecoding | None) -> list[ProofFinding]:
        """Compare decode steps on this rung with the gathered path; change nothing.

        Raises:
            OutOfMemoryError: there is no room for the proof's sequences.
        """
        if self.proof_obstacle:
            return []
        assert self.backend is not None
        recorder = self._runner.recorder
        self._runner.recorder = None
        try:
            proof = Proof(self._runner, self.backend.layout, self._block_size)
            if graphs is None or graphs.obstacle:
                return proof.of_kernels()
            return proof.of_graphs(graphs)
        finally:
            self._runner.recorder = recorder

    def settle(self, graphs: GraphedDecoding | None) -> None:
        """Prove, and step down until the proof finds no difference.

        Args:
            graphs: captured for each number of rows; None: there are none.
        """
        if obstacle := self.proof_obstacle:
            if self.backend is not None and self._runner.device.type in PROVED_DEVICES:
                self._proved = f"not proved: {obstacle}"
            return
        while self.backend is not None:
            self._trace = self.backend.traced_forward.trace
            self._code = captured_code(self._runner.model)
            try:
                findings = self.prove(graphs)
            except torch.OutOfMemoryError as error:
                _LOGGER.warning(
                    "no memory to prove decode steps (%s), so they run unproved; lower "
                    "max_memory_percent",
                    error,
                )
                devices.empty_cache(self._runner.device)
                self._proved = "not proved: no memory"
                return
            if not findings:
                self._proved = self._summary(graphs)
                self._proved_keys = set()
                if graphs is not None:
                    self._proved_keys.update(graphs.keys)
                return
            self.step_down(graphs, findings[0])
        self._proved = str(Rung.GATHERED)

    def leave(self, graphs: GraphedDecoding | None, finding: ProofFinding) -> bool:
        """Step down because another comparison found a difference, and prove again.

        Returns:
            Whether there was a lower rung.
        """
        if self.proof_obstacle:
            return False
        self.step_down(graphs, finding)
        self.settle(graphs)
        return True

    def step_down(self, graphs: GraphedDecoding | None, finding: ProofFinding) -> None:
        """Step down to the next rung that may not have the fault that was found."""
        backend = self.backend
        assert backend is not None, "nothing is below the gathered path"
        rung = self.rung(graphs)
        self._steps.append(f"{rung}: {finding}")
        if rung is Rung.NO_GRAPH:
            if backend.forms.can_cut:
                backend.forms.can_cut = backend.forms.can_share = False
            else:
                self._gather(f"it failed a proof on this device: {finding}")
            return
        assert graphs is not None
        if isinstance(finding.graph, GraphKey) and not graphs.is_needed(finding.graph):
            graphs.refuse(finding.graph)
            return
        # Every captured step samples by the same kernels.
        if finding.part is StepPart.SAMPLING or rung is Rung.NO_STRETCHES:
            graphs.give_up(f"now, since a proof failed ({finding})", is_final=True)
            return
        if rung is Rung.COMPILED:
            backend.traced_forward.stay_untraced(f"a proof failed: {finding}")
        elif rung is Rung.OWN_FORWARD:
            backend.forms.can_share = False
        else:
            backend.forms.can_cut = False
        self._capture_anew(graphs)

    def leave_uncapturable(self, error: Exception) -> bool:
        """Leave a rung whose steps cannot be captured; return whether a lower one remains.

        If no rung can be captured, the kernels run without graphs and keep all their forms.
        """
        backend = self.backend
        if backend is None:
            return False
        reason = f"it cannot be captured: {error_text(error)}"
        forms = backend.forms
        if backend.traced_forward.trace is not None:
            # The model's own forward may be captured where its trace is not.
            backend.traced_forward.stay_untraced(reason)
        elif isinstance(error, WaitingStepError):
            return False
        elif forms.can_share:
            self._steps.append(f"{Rung.OWN_FORWARD}: {reason}")
            forms.can_share = False
        elif forms.can_cut:
            self._steps.append(f"{Rung.NO_SHARED_TILES}: {reason}")
            forms.can_cut = False
        else:
            self._steps.clear()
            forms.can_share = forms.can_cut = True
            return False
        return True

    def _capture_anew(self, graphs: GraphedDecoding) -> None:
        graphs.forget()
        try:
            graphs.capture_sizes(self._block_size)
        except Exception as error:  # noqa: BLE001  kernels run what cannot be captured
            graphs.give_up(f"now, since a capture failed ({error_text(error)})")

    def _gather(self, reason: str) -> None:
        runner = self._runner
        gathered = BackendSelection(None, reason)
        runner.use(replace(runner.execution, attention_backend=None, backend_selection=gathered))

    def _summary(self, graphs: GraphedDecoding | None) -> str:
        rung = self.rung(graphs)
        if graphs is None or graphs.obstacle:
            return f"{rung}: kernels agree with the gathered path"
        sizes = sorted({key.num_rows for key in graphs.keys})
        return (
            f"{rung}: {len(graphs.keys)} graphs of {sizes[0]} to {sizes[-1]} rows agree with the "
            "gathered path, and their samples with torch's"
        )


class ProvedKernels(StepwiseDecoding):
    """Decode steps without graphs, whose kernels a ladder proves."""

    def __init__(
        self, runner: ModelRunner, ladder: DecodeLadder, others: Sequence[ExecutionPath]
    ) -> None:
        super().__init__(runner, others)
        self._ladder = ladder

    @property
    def paths(self) -> list[ExecutionPath]:
        return [*super().paths, *self._ladder.paths]

    def prove(self) -> list[ProofFinding]:
        return self._ladder.prove(None)

    def step_down(self, finding: ProofFinding) -> bool:
        return self._ladder.leave(None, finding)


def _card(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)
