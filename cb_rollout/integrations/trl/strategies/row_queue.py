"""Hand out a data set's rows in the order of the trainer's sampler, also ahead of the trainer.

Owns the rows that one process still has to train on in a pass over the data set, and their state in
a checkpoint. A strategy takes all its rows here; of the rows that the trainer's loader hands over,
only the number counts. Submits nothing. Called by the trainer, on its thread.
"""

import itertools
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerate.utils import gather_object

from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl import images

# A row of the data set.
Example = dict[str, Any]
# An item of a collector's prompt source: "prompt", "row", perhaps "images", and "ticket".
Prompt = dict[str, Any]


class SamplerShare:
    """One process's rows of the trainer's sampler, one generation at a time, pass after pass."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._num_generations = trainer.num_generations
        self._batch_size = args.generation_batch_size
        # TRL 1.16's sampler repeats a generation's rows for each forward that uses them.
        self.num_repeats: int = args.steps_per_generation * trainer.num_iterations
        """Forwards that use a generation."""
        self._process_index = trainer.accelerator.process_index
        self.num_processes: int = trainer.accelerator.num_processes
        self.num_prompts: int = self._batch_size // self._num_generations
        """Prompts of a generation, over all processes."""
        self._num_rows = len(trainer.train_dataset)
        self._sampler = trainer._get_train_sampler(trainer.train_dataset)
        self._indices: Iterator[int] = iter(())
        self.pass_number = -1
        self.num_batches = 0
        """Generations of this pass so far."""
        self.checksum = 0
        """Checksum of the rows of this pass so far, over all processes."""

    def begin_pass(self) -> None:
        self.pass_number += 1
        self.num_batches = 0
        self.checksum = zlib.crc32(b"%d" % self._num_rows)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.pass_number)
        self._indices = iter(self._sampler)

    def next_batch(self) -> list[int]:
        """Return the process's rows of the next generation; none at the end of the pass."""
        batch = list(itertools.islice(self._indices, self._batch_size))
        if len(batch) < self._batch_size:
            return []
        num_repeated = self._batch_size * (self.num_repeats - 1)
        deque(itertools.islice(self._indices, num_repeated), maxlen=0)
        rows = batch[:: self._num_generations]
        self.num_batches += 1
        self.checksum = zlib.crc32(repr(rows).encode(), self.checksum)
        num_own = len(rows) // self.num_processes
        start = self._process_index * num_own
        return rows[start : start + num_own]

    def skip_to(self, pass_number: int, num_batches: int) -> None:
        """Skip to a generation of a pass, from the start of the first pass."""
        while self.pass_number < pass_number:
            # A sampler draws its orders one after the other.
            deque(self._indices, maxlen=0)
            self.begin_pass()
        for _ in range(num_batches):
            self.next_batch()

    def skip(self, num_batches: int) -> None:
        """Skip this many generations, across the ends of passes."""
        for _ in range(num_batches):
            if not self.next_batch():
                self.first_batch()

    def first_batch(self) -> list[int]:
        """Begin the next pass, and return the process's rows of its first generation.

        Raises:
            ConfigurationError: the sampler has fewer rows than a generation.
        """
        self.begin_pass()
        batch = self.next_batch()
        if not batch:
            raise ConfigurationError(
                f"the data set's {self._num_rows} rows are too few for a generation of "
                f"{self.num_prompts} prompts; lower generation_batch_size, or give the trainer "
                "more rows."
            )
        return batch


@dataclass(slots=True)
class QueueState:
    """State of one process's queue, for a checkpoint."""

    pass_number: int
    num_batches: int
    """Generations of the pass that the queue took from the sampler."""
    num_prompts: int
    """Prompts of a generation, over all processes."""
    checksum: int
    """Checksum of the sampler's rows in the pass so far."""
    trainer_step: int
    """TRL's count of forwards, by which it generates."""
    coming: list[int]
    """Rows to hand out next; rows that were in flight come first."""
    cancelled: list[int]
    """Rows that are repeated at the end of the pass."""


@dataclass(slots=True)
class _Taken:
    """A row that was handed out but not trained on yet."""

    index: int
    pass_number: int


@dataclass(slots=True)
class _Batch:
    """The trainer's current generation."""

    num_wanted: int = 0
    """Number of groups requested from the strategy."""
    rows: list[int] = field(default_factory=list)
    """Rows that were scored for it."""


class RowQueue(Iterator[Prompt]):
    """The rows of one process, each once a pass, as an iterator of prompts.

    At the end of a pass, it pauses as long as rows in flight suffice for the batch. So groups that
    are sampled ahead never belong to the next pass, and the last batch trains on the remaining
    rows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tickets = itertools.count()
        self._start()

    def _start(self) -> None:
        self._share = SamplerShare(self._trainer)
        self._coming: deque[int] = deque()
        self._cancelled: deque[int] = deque()
        self._taken: dict[int, _Taken] = {}
        self._batch = _Batch()

    def __next__(self) -> Prompt:
        """Take a row, and return it as a collector's prompt."""
        index = self._next_index()
        ticket = next(self._tickets)
        self._taken[ticket] = _Taken(index, self._share.pass_number)
        return self.prompt(ticket)

    def prompt(self, ticket: int) -> Prompt:
        """Return the prompt of a row that was taken but not trained on yet."""
        row = self._row(self._taken[ticket].index)
        ids, pictures = images.tokenized(self._trainer, row)
        prompt = {"prompt": ids, "row": row, "ticket": ticket}
        if pictures:
            prompt["images"] = pictures
        return prompt

    def take(self, num_rows: int) -> list[Example]:
        """Take rows to score at once, also across the end of a pass."""
        self._batch.num_wanted = num_rows
        indices = [self._next_index() for _ in range(num_rows)]
        self._batch.rows += indices
        return [self._row(index) for index in indices]

    def begin_batch(self) -> None:
        """Begin a generation of the trainer."""
        self._batch = _Batch()

    def expect(self, num_wanted: int, held: Sequence[Prompt]) -> None:
        """Set the number of groups needed next, and the prompts that a collector holds."""
        self._batch.num_wanted = num_wanted
        self._take_back(held)

    def settle(self, complete: Sequence[Prompt], held: Sequence[Prompt]) -> None:
        """Release the rows of complete groups; repeat rows that the collector does not hold.

        They are repeated at the end of their pass, so that earlier batches have rows to choose
        from.
        """
        for prompt in complete:
            self._batch.rows.append(self._taken.pop(prompt["ticket"]).index)
        self._take_back(held)

    def _take_back(self, held: Sequence[Prompt]) -> None:
        kept = {prompt["ticket"] for prompt in held}
        overdue = []
        for ticket, taken in list(self._taken.items()):
            if ticket in kept:
                continue
            del self._taken[ticket]
            if taken.pass_number < self._share.pass_number:
                overdue.append(taken.index)
            else:
                self._cancelled.append(taken.index)
        self._coming.extendleft(reversed(overdue))

    def _next_index(self) -> int:
        if not self._coming:
            self._coming.extend(self._share.next_batch())
        if not self._coming:
            self._coming, self._cancelled = self._cancelled, self._coming
        if not self._coming:
            if len(self._taken) >= self._batch.num_wanted:
                raise StopIteration
            self._coming.extend(self._share.first_batch())
        return self._coming.popleft()

    def _row(self, index: int) -> Example:
        return self._trainer.train_dataset[index]

    @property
    def is_amid_generation(self) -> bool:
        """True while the trainer has forwards left of its current generation."""
        return self._trainer._step % self._share.num_repeats != 0

    def states(self) -> list[dict[str, Any]]:
        """Return the state of every process's queue, for a checkpoint; all processes call this."""
        trainer = self._trainer
        share = self._share
        coming = [taken.index for taken in self._taken.values()]
        coming += self._coming
        if self.is_amid_generation:
            # The rest of this generation is lost, so a resumed run samples it again.
            coming = self._batch.rows + coming
        state = QueueState(
            pass_number=share.pass_number,
            num_batches=share.num_batches,
            num_prompts=share.num_prompts,
            checksum=share.checksum,
            trainer_step=trainer._step,
            coming=coming,
            cancelled=list(self._cancelled),
        )
        return gather_object([asdict(state)])

    def process_state(self) -> dict[str, Any]:
        """Return the rows of this process's queue; rows of groups in flight are separate."""
        taken = [[ticket, row.index, row.pass_number] for ticket, row in self._taken.items()]
        return {"taken": taken, "coming": list(self._coming), "cancelled": list(self._cancelled)}

    def begin_training(
        self,
        global_step: int,
        saved: list[dict[str, Any]] | None,
        own: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin with the first pass, or where a checkpoint ended.

        Args:
            global_step: step of the checkpoint; 0: start from the beginning.
            saved: the checkpoint's `states()`; None: it was made without a strategy, and the queue
                begins after the rows that the trainer has trained by then.
            own: the checkpoint's `process_state()`, whose groups in flight continue; None: their
                rows are handed out again.

        Returns:
            True if the rows of `own` in flight are taken.
        """
        args = self._trainer.args
        self._start()
        if not global_step or args.ignore_data_skip:
            return False
        if saved is None:
            num_forwards = global_step * args.gradient_accumulation_steps
            self._share.skip(num_forwards // self._share.num_repeats)
            return False
        return self._resume([QueueState(**state) for state in saved], own)

    def _resume(self, states: list[QueueState], own_rows: Mapping[str, Any] | None) -> bool:
        share = self._share
        first = states[0]
        # The trainer generates next when the stopped run would have.
        self._trainer._step = first.trainer_step
        self._trainer._buffered_inputs = None
        num_before = first.num_batches * first.num_prompts
        share.skip_to(first.pass_number, num_before // share.num_prompts)
        has_same_processes = len(states) == share.num_processes
        if has_same_processes and share.num_prompts == first.num_prompts:
            own = states[self._trainer.accelerator.process_index]
            if share.checksum == own.checksum and own_rows is not None:
                self._go_on(own_rows)
                return True
            if share.checksum == own.checksum:
                self._coming.extend(own.coming)
                self._cancelled.extend(own.cancelled)
                return False
        if not self._trainer.accelerator.is_main_process:
            return False
        num_waiting = sum(len(state.coming) + len(state.cancelled) for state in states)
        warnings.warn(
            f"the checkpoint's strategy had taken {num_before} rows of pass "
            f"{first.pass_number + 1} from the sampler, {first.num_prompts} per generation on "
            f"{len(states)} processes; this run takes {share.num_prompts} on "
            f"{share.num_processes}, or its sampler has another order. The {num_waiting} rows "
            "that were waiting are skipped in this pass, and others may be trained twice. To "
            "train each row once, resume with the same processes, generation_batch_size, seed and "
            "data.",
            stacklevel=2,
        )
        return False

    def _go_on(self, own: Mapping[str, Any]) -> None:
        """Continue with the rows of a `process_state`."""
        for ticket, index, pass_number in own["taken"]:
            self._taken[ticket] = _Taken(index, pass_number)
        self._tickets = itertools.count(max(self._taken, default=-1) + 1)
        self._coming.extend(own["coming"])
        self._cancelled.extend(own["cancelled"])
