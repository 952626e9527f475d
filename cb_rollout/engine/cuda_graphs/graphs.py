"""Run decode steps as CUDA graphs: forward, sampling, log-probabilities and the next inputs in one.

A step reads `GraphInputs` and overwrites them with the next inputs. While no sequence joins, only
new block numbers go to the device, and one small tensor comes back, for which the next step need
not wait. Graphs find pages and weights by address, so they stay valid while weights change in place
and while the cache grows, sleeps and wakes. Called by the thread that steps the engine.

A device-wide wait of another thread, such as a training thread, breaks a capture, and the capture
breaks the wait. So graphs are captured before requests run, or by a thread that paused the engine.
A step whose graph is missing runs the next larger captured graph, which computes the same but takes
longer. A step with more rows than the largest graph runs without a graph.

B: rows of a graph, V: vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from cb_rollout.compat.module_state import captured_weights
from cb_rollout.compat.torch import has_hooks
from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.cuda_graphs.capture import CaptureFailedError, CudaCapture, Replay
from cb_rollout.engine.cuda_graphs.graph_sampler import PLAIN_SAMPLING, GraphSampler, GraphSampling
from cb_rollout.engine.cuda_graphs.inputs import GraphInputs, Line
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request, distinct_params
from cb_rollout.engine.sampling.sampler import HostSampled
from cb_rollout.errors import error_text
from cb_rollout.types import RequestStatus

if TYPE_CHECKING:
    from cb_rollout.engine.attention.triton.backend import TritonBackend

_LOGGER = logging.getLogger(__name__)

# Rounding up adds at most 60% of the needed rows: up to here, a step's time is reading weights.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# More rows are rounded up to a multiple of this, since each adds to a step's time.
ROW_INTERVAL = 64

# A step that takes longer is taken for one that never ends.
STEP_LIMIT_SECONDS = 60.0

# One for each number of rows up to 1,024, and others that steps turned out to want.
MAX_GRAPHS = 64


def padded_rows(num_rows: int, interval: int = 0) -> int:
    """Return the graph size for `num_rows`: a multiple of `interval`, or if 0, one of `ROWS`."""
    if not interval and num_rows <= ROWS[-1]:
        return next(size for size in ROWS if size >= num_rows)
    interval = interval or ROW_INTERVAL
    return -(-num_rows // interval) * interval


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Sizes that are fixed when a graph is captured."""

    num_rows: int
    is_cut: bool
    """True if keys are cut into stretches, which a list on the device describes."""
    has_shared: bool
    """True if rows may share a prefix that a tile reads; keys are then cut too."""

    def runs(self, other: "GraphKey") -> bool:
        """Return whether this graph computes the steps of another key too."""
        is_as_able = self.is_cut >= other.is_cut and self.has_shared >= other.has_shared
        return self.num_rows >= other.num_rows and is_as_able

    @property
    def cost(self) -> tuple[int, bool, bool]:
        """Return a sort key that orders equivalent graphs by their run time."""
        return self.num_rows, self.has_shared, self.is_cut


class PendingStep:
    """A launched decode step whose results are still being copied to system memory."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows_B: np.ndarray,
        results: torch.Tensor,
        device: torch.device,
        *,
        is_plain: bool,
    ) -> None:
        """Record the step's end in the calling thread's stream.

        Args:
            requests: the step's sequences.
            rows_B: int64, the row of `results` of each sequence.
            results: `GraphSampler.results` in system memory, still being copied.
            device: where the step runs.
            is_plain: True if every sequence only samples a token from the whole vocabulary.
        """
        self._requests = list(requests)
        self._rows_B = rows_B
        self._results = results
        self._end = devices.record_event(device)
        self._device = device
        self._is_plain = is_plain

    @property
    def running(self) -> list[Request]:
        decoding = RequestStatus.DECODING
        return [request for request in self._requests if request.status is decoding]

    def read(self, requests: Sequence[Request]) -> HostSampled:
        """Wait for the step; return its sequences' samples.

        Raises:
            HungDeviceError: the step did not finish in `STEP_LIMIT_SECONDS`.
            RuntimeError: the device failed.
        """
        if self._end is not None:
            step = f"a decode step of {len(self._requests)} sequences"
            devices.wait_for(self._end, self._device, STEP_LIMIT_SECONDS, step)
        rows_B = self._rows_B
        if requests != self._requests:
            index = {request: at for at, request in enumerate(self._requests)}
            rows_B = rows_B[[index[request] for request in requests]]
        results_B6 = self._results.numpy()[rows_B]
        tokens, logprobs, is_valid, is_possible, log_masses, nums_kept = results_B6.T
        token_ids = tokens.astype(np.int64).tolist()
        if self._is_plain:
            is_sampled = (is_valid != 0) & (is_possible != 0)
            return HostSampled(
                tokens=token_ids, logprobs=logprobs.tolist(), is_valid=is_sampled.tolist()
            )
        truncated = [row for row, r in enumerate(requests) if r.params.is_truncated]
        return HostSampled(
            tokens=token_ids,
            logprobs=logprobs.tolist(),
            is_valid=is_valid.astype(bool).tolist(),
            is_possible=is_possible.astype(bool).tolist(),
            log_masses=log_masses[truncated].tolist(),
            nums_kept=nums_kept[truncated].astype(np.int64).tolist(),
        )


class GraphedDecoding:
    """Captures decode steps as graphs, caches them and replays them."""

    def __init__(
        self,
        runner: ModelRunner,
        decoding: "TritonBackend",
        max_rows: int,
        sampling: GraphSampling = PLAIN_SAMPLING,
        capture: Callable[[Replay], Replay] | None = None,
        *,
        row_interval: int = 0,
        max_graphs: int = 0,
    ) -> None:
        """Allocate the buffers; nothing is captured yet.

        Args:
            runner: runs the model's forward inside a step.
            decoding: the attention backend of decode steps.
            max_rows: maximum number of sequences that run together.
            sampling: settings besides the requests' parameters.
            capture: captures a step; None: as a CUDA graph.
            row_interval: see `padded_rows`.
            max_graphs: maximum number of graphs to keep; 0: this module's default.
        """
        self._runner = runner
        self._decoding = decoding
        self._padded = partial(padded_rows, interval=row_interval)
        self._capture = capture or CudaCapture(runner.device)
        num_rows = self._padded(max_rows)
        device = runner.device
        self._inputs = GraphInputs(num_rows, device)
        self._sampler = GraphSampler(num_rows, device, sampling)
        # One for a step, one for the step after it.
        self._host_results = [
            torch.zeros_like(self._sampler.results, device="cpu", pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self.can_look_ahead = not decoding.cache.is_recurrent
        """False where a step that is given up could not run again, since states moved on."""
        sizes = {self._padded(num_rows) for num_rows in range(1, max_rows + 1)}
        self._max_graphs = max_graphs or max(MAX_GRAPHS, len(sizes))
        # Where fewer are kept than there are sizes, sizes between them run a larger graph.
        interval = -(-len(sizes) // self._max_graphs)
        # Largest first, so that the others fit its memory.
        self._sizes = sorted(sizes, reverse=True)[::interval]
        self._graphs: dict[GraphKey, Replay] = {}
        # Keys of steps that ran another graph; a dict keeps their order.
        self._wanted: dict[GraphKey, None] = {}
        self._refused: set[GraphKey] = set()
        self._weights: list[object] = []
        self._failure: str | None = None
        self._is_given_up_for_good = False
        self.is_dropped = True
        """True until a graph for each number of rows is captured, or capturing them was tried."""
        self.num_bytes = 0
        """Bytes that the captured graphs hold."""
        self.planned_bytes = 0
        """The most bytes that captured graphs held."""
        self.has_hooks = False
        """True while the model has hooks, which a replay would not call: no graph may run."""

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> list[GraphKey]:
        """Return the sizes and forms of the captured graphs."""
        return list(self._graphs)

    @property
    def sampling(self) -> GraphSampling:
        return self._sampler.sampling

    @property
    def _row_keys(self) -> list[GraphKey]:
        """Return the most general key that the backend allows for each number of rows.

        The largest comes first. Tiles may be empty.
        """
        forms = self._decoding.forms
        return [
            GraphKey(size, is_cut=forms.can_cut, has_shared=forms.can_share and size > 1)
            for size in self._sizes
        ]

    @property
    def obstacle(self) -> str | None:
        """Return why graphs cannot run now; None: they can."""
        hooks = "while the model has forward hooks, as it has now, which a graph would not call"
        return hooks if self.has_hooks else self._failure

    @property
    def is_wanting(self) -> bool:
        """Return whether steps ran another graph because their own was not captured."""
        return bool(self._wanted)

    def check_model(self, block_size: int) -> None:
        """Capture a graph for each number of rows, before the cache exists.

        Raises an exception if the forward cannot be captured, for example because it waits for the
        device.
        """
        self.check_weights()
        if self.has_hooks:
            # The captured step includes the hooks, which may be gone by the first step.
            self.add(self._row_keys[-1], block_size)
            self.forget()
        else:
            self.capture_sizes(block_size)

    def capture_sizes(self, block_size: int) -> None:
        """Capture the missing graphs for all numbers of rows, up to the limit of cached graphs."""
        if self.obstacle:
            return
        self.is_dropped = False
        has_graph = {key.num_rows for key in self._graphs}
        missing = [key for key in self._row_keys if key.num_rows not in has_graph]
        self._capture_all(missing, block_size)

    def capture_wanted(self, block_size: int) -> None:
        """Capture the graphs that steps lacked, up to the limit of cached graphs.

        If a form cannot be captured, its steps keep running their present graph.
        """
        wanted = list(self._wanted)
        self._wanted = {}
        for key in wanted:
            try:
                self._capture_all([key], block_size)
            except (torch.OutOfMemoryError, CaptureFailedError):
                raise
            except Exception as error:  # noqa: BLE001  other graphs run these steps
                _LOGGER.warning("a graph of %s cannot be captured: %s", key, error_text(error))
                self._refused.add(key)

    def _capture_all(self, keys: Sequence[GraphKey], block_size: int) -> None:
        """Capture graphs; pass on exceptions for exhausted memory or a failed device."""
        keys = keys[: max(0, self._max_graphs - len(self._graphs))]
        if not keys or self.obstacle:
            return
        self._runner.check_weights()
        self._runner.warm_up()
        device = self._runner.device
        before = devices.memory_after_release(device).free_bytes
        try:
            for key in keys:
                self.add(key, block_size)
        finally:
            taken = max(0, before - devices.memory_after_release(device).free_bytes)
            self.num_bytes += taken
            self.planned_bytes = max(self.planned_bytes, self.num_bytes)

    def give_up(self, failure: str, *, is_final: bool = False) -> None:
        """Run no graph until the model changes, because it cannot be captured now.

        `is_final`: never run a graph again, even if the model changes.
        """
        self.forget()
        self._failure = failure
        self._is_given_up_for_good = is_final

    @property
    def is_given_up(self) -> bool:
        """Return whether graphs were given up for good."""
        return self._is_given_up_for_good

    def is_needed(self, key: GraphKey) -> bool:
        """Return whether a graph is the general one for its number of rows."""
        return key in self._row_keys

    def refuse(self, key: GraphKey) -> None:
        """Drop a graph for good; its steps run another graph."""
        del self._graphs[key]
        self._refused.add(key)

    @contextmanager
    def left_as_they_are(self) -> Iterator[None]:
        """Do not record missing graphs of steps inside the block."""
        wanted = dict(self._wanted)
        try:
            yield
        finally:
            self._wanted = wanted

    def forget(self) -> None:
        """Drop all graphs and free their memory."""
        self._graphs.clear()
        self.is_dropped = True
        self._wanted = {}
        self.num_bytes = 0
        self._sampler.forget()
        if isinstance(self._capture, CudaCapture):
            self._capture.start_over()

    def release(self) -> None:
        """Drop all graphs; the next step must load its inputs."""
        self.forget_rows()
        self.forget()

    def check_weights(self) -> None:
        """Drop all graphs if a captured object has changed, or the model has hooks."""
        weights = captured_weights(self._runner.model, by_address=True)
        self.has_hooks = has_hooks(self._runner.model)
        if self.has_hooks or weights != self._weights:
            self.forget()
            self._weights = weights
            if not self._is_given_up_for_good:
                self._failure = None

    def can_run(self, num_rows: int) -> bool:
        """Return whether graphs may run, and one with at least this many rows is captured."""
        rows = self._padded(num_rows)
        return not self.obstacle and any(key.num_rows >= rows for key in self._graphs)

    def follows(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Return whether the last step wrote this step's inputs, for a graph of the same size.

        No sequence may have been admitted since. Lengths count the token that the last step
        sampled.
        """
        is_size = self._padded(len(requests)) == self._padded(self._inputs.num_rows)
        return is_size and self._inputs.holds(requests, lengths)

    def forget_rows(self) -> None:
        """Make the next step load its inputs, because the last step's inputs do not apply."""
        self._inputs.forget()

    def can_sample(self, requests: Sequence[Request]) -> bool:
        return all(map(self._sampler.sampling.can_sample, distinct_params(requests)))

    def load(self, batch: ForwardBatch, requests: Sequence[Request]) -> None:
        """Copy the inputs of a step of these sequences to the device."""
        sampling = self._sampler.lines(requests)
        self._inputs.load(batch, self._decoding.rows_that_share, requests, sampling)

    def launch(
        self,
        requests: Sequence[Request],
        lengths: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> PendingStep:
        """Launch one step, including sampling; pass on the device's exceptions.

        The caller has checked `can_run` and `can_sample`, and `load` or the last step has written
        the inputs. `lengths` and `table` count the newest token, which may not have been read yet.
        """
        self._decoding.find(cache, table)
        inputs = self._inputs
        rows_B = inputs.keep(requests)
        self._replay(lengths, table.block_size)
        inputs.num_steps += 1
        self._host_results.reverse()
        num_rows = inputs.num_rows
        host = self._host_results[0]
        host[:num_rows].copy_(self._sampler.results[:num_rows], non_blocking=True)
        device = self._runner.device
        return PendingStep(requests, rows_B, host, device, is_plain=inputs.is_plain)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step; return float32 logits after each row's token, `[rows, V]`.

        The next step overwrites them. A graph must exist for this many rows; see `can_run`.
        """
        self._decoding.find(batch.cache, batch.table)
        self._inputs.load(batch, self._decoding.rows_that_share)
        self._replay(batch.lengths, batch.table.block_size)
        return self._sampler.kept(len(batch)).float()

    def next_inputs(self) -> tuple[list[int], list[int], list[int]]:
        """Wait for the last step; return what it left in each row for the next step.

        Returns:
            The rows' tokens, their lengths with these, and the tokens that each has sampled.
        """
        lines = (Line.TOKEN, Line.LENGTH, Line.INDEX)
        num_rows = self._inputs.num_rows
        tokens, lengths, counts = devices.to_host(
            *(self._inputs.tensor[line, :num_rows] for line in lines)
        )
        return tokens, lengths, counts

    def _replay(self, lengths: Sequence[int], block_size: int) -> None:
        key = self.key_of(lengths, has_shared=self._inputs.has_shared)
        if key not in self._graphs:
            if key not in self._refused:
                self._wanted[key] = None
            # Graphs of one row have no tiles, and only a step of several rows shares a prompt.
            able = [captured for captured in self._graphs if captured.runs(key)]
            key = min(able, key=lambda captured: captured.cost)
        self._graphs[key]()

    def key_of(self, lengths: Sequence[int], *, has_shared: bool) -> GraphKey:
        """Return the key of the best graph for a step with rows of these lengths."""
        # Rows that ended since the buffers were loaded keep their places there.
        num_rows = self._padded(max(len(lengths), self._inputs.num_rows))
        is_cut = self._decoding.is_cut(lengths)
        return GraphKey(num_rows, has_shared or is_cut, has_shared)

    def add(self, key: GraphKey, block_size: int) -> None:
        with self._inputs.emptied():
            self._graphs[key] = self._capture(self._step(key, block_size))

    def _step(self, key: GraphKey, block_size: int) -> Replay:
        inputs_LB = self._inputs.tensor[:, : key.num_rows]
        tokens_B = inputs_LB[Line.TOKEN]
        lengths_B = inputs_LB[Line.LENGTH]
        offsets_B = inputs_LB[Line.POSITION_OFFSET]
        num_tiles = key.num_rows // 2 if key.has_shared else 0

        def run() -> torch.Tensor:
            # Full width keeps the start of every line aligned as Triton expects of pointers.
            small = self._inputs.tensor.to(torch.int32)[:, : key.num_rows]
            shared_B = None
            first_T = None
            count_T = None
            if num_tiles:
                shared_B = small[Line.NUM_SHARED]
                first_T = small[Line.TILE_FIRST, :num_tiles]
                count_T = small[Line.TILE_COUNT, :num_tiles]
            metadata = AttentionMetadata(
                addresses=self._decoding.addresses,
                block_size=block_size,
                table_rows_B=small[Line.TABLE_ROW],
                lengths_B=small[Line.LENGTH],
                num_stretches=self._decoding.num_stretches if key.is_cut else 0,
                shared_B=shared_B,
                first_T=first_T,
                count_T=count_T,
                rows_per_tile=self._decoding.rows_per_tile,
            )
            positions_B1 = (lengths_B - 1 + offsets_B).clamp(min=0)[:, None]
            inputs = self._decoding.inputs(tokens_B[:, None], positions_B1, metadata)
            logits_BV = self._runner.decode_traced(inputs, is_captured=True)
            self._sampler.sample(logits_BV, self._inputs.tensor)
            return self._sampler.results[: key.num_rows]

        return run
