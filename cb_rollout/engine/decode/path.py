"""Define the port of decode steps, and the record that describes how a part of a rollout runs.

Imports no path: `stepwise.py` in this folder and `cuda_graphs/` implement the port, and
`cuda_graphs/selection.py` chooses one when an engine is made.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.decode.findings import ProofFinding
from cb_rollout.engine.request import Request


class ExecutionPath(NamedTuple):
    """The way in which one part of a rollout, or of the loss, runs."""

    part: str
    runs: str
    obstacle: str = ""
    """The reason why a better way, which no setting forbids, is not taken."""
    proof: str = ""
    """The proof that it passed before it ran here, and when; "": only the model check."""

    @property
    def text(self) -> str:
        return f"{self.runs} ({self.obstacle})" if self.obstacle else self.runs

    def __str__(self) -> str:
        return f"{self.part}: {self.text}"


class DecodePath(Protocol):
    """The way in which an engine's decode steps run.

    An engine has one path at a time. It is chosen after the model was checked on pages, and again
    when the model changes. The executor schedules a step and calls `step`; the path owns everything
    between the scheduled sequences and their new tokens: forward, sampling, and steps that it
    launches ahead. `StepwiseDecoding` is the plain path; a subclass of it overrides `step`, and the
    other methods if it keeps something between steps.

    Proof: a path gives the tokens and log-probabilities of the plain path, within the model's own
    rounding. The engine does not check that: the function that creates a path, in `DECODE_PATHS`,
    proves it on the device that it runs on, and creates another path if the proof finds a
    difference. `tests/invariants/test_fast_path.py` holds the package's own paths to it.

    Every method is called by the thread that steps the engine, or by a thread that paused it, with
    the model in evaluation mode. No two calls overlap.
    """

    @property
    def paths(self) -> Sequence[ExecutionPath]:
        """Return how each part of a decode step runs now, with the obstacle to a faster path.

        `generator.paths` and the log show these lines after the line about prefills.
        """
        ...

    @property
    def planned_bytes(self) -> int:
        """Return the device bytes that the path holds while steps run, besides the KV cache.

        The memory plan does not give them to the cache. `num_bytes` of them are allocated already.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Return the device bytes that the path holds now."""
        ...

    @property
    def is_released(self) -> bool:
        """Return whether `release` dropped what `warm_up` would make again."""
        ...

    @property
    def is_wanting(self) -> bool:
        """Return whether steps ran slower than they would after another `warm_up`."""
        ...

    def check_weights(self) -> None:
        """Drop what was made from another model: weights moved, a module replaced, hooks added.

        Called before the first step of each batch of work, and before `warm_up`.
        """
        ...

    def begin(self) -> None:
        """Get ready for steps, after `check_weights`, while other threads may train.

        A failure must leave a path that can step, since no caller can act on it.
        """
        ...

    def warm_up(self, num_steps: float) -> None:
        """Trace, compile or capture what steps will need, after `check_weights`.

        The engine is paused, so no other thread trains on it. A failure must leave a path that can
        step.

        Args:
            num_steps: expected number of decode steps; 0: unknown. Work that pays off only after
                more steps is left out.
        """
        ...

    def prove(self) -> list[ProofFinding]:
        """Compare steps with the plain path on temporary sequences; change nothing.

        Called by `PagedModel.prove`, and by the function that creates the path.

        Returns:
            The differences beyond rounding; empty for the plain path.
        """
        ...

    def step_down(self, finding: ProofFinding) -> bool:
        """Run steps in a plainer way from now on, because of a difference found in a rollout.

        Called with the engine paused, and only on a GPU, where the first rollout is compared.
        Returns whether there is a plainer way.
        """
        ...

    def release(self) -> None:
        """Drop everything that `warm_up` can rebuild, and free its memory; no step is pending."""
        ...

    def launched(self) -> list[Request]:
        """Return the sequences of an already launched step that still run; empty: no such step.

        Their blocks are assigned. The executor passes them to `step` before it schedules another
        step.
        """
        ...

    def step(self, running: list[Request], context: StepContext) -> list[Request]:
        """Give each sequence its next token; return those that got a token or ended, each once.

        Uses `context` to run forwards, sample, append tokens and count. If it raises, no sequence
        may have got a token: the executor calls it again, with fewer sequences if memory ran out.

        Args:
            running: sequences with blocks for one more token, written to the block table; or those
                that `launched` returned.
            context: the parts of the engine.
        """
        ...

    def forget_rows(self) -> None:
        """Forget the inputs of the last step: its table rows may belong to other sequences now."""
        ...

    def discard_launched(self) -> None:
        """Give up the step that was launched ahead, and forget the rows."""
        ...
