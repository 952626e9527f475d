"""Run decode steps as CUDA graphs: forward, sampling, log-probabilities and the next inputs in one.

A step reads `GraphInputs` and writes the next inputs over them. While no sequence joins, only a new
block now and then goes to the device, and one small tensor comes back, which the next step need not
wait for. Graphs find pages and weights by address, so they stay valid while weights change in place
and while the cache grows, sleeps and wakes. Called by the thread that steps the engine.

A capture and a device-wide wait of another thread, such as one that trains, break each other. So
graphs are captured before requests run, or by a thread that paused the engine. A step whose graph
is missing runs the nearest one that was captured, which differs in time alone.

B: rows of a graph, N: most rows, V: vocabulary.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.attention.backend import AttentionMetadata
from cb_rollout.engine.cuda_graphs.capture import CudaCapture, Replay
from cb_rollout.engine.cuda_graphs.inputs import GraphInputs, Line
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.decode_rows import DecodeRows
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import draw, exponentials, uniforms
from cb_rollout.engine.spec_decode.ngram import MAX_DRAFT_ROWS
from cb_rollout.types import RequestStatus

if TYPE_CHECKING:
    from cb_rollout.engine.attention.triton.backend import TritonBackend

_LOGGER = logging.getLogger(__name__)

# At most half as many rows again as needed: up to here, a step's time is reading weights.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# More rows are rounded up to a multiple of this, since each adds to a step's time.
ROW_INTERVAL = 64

# Graphs differ in the splits of the keys, which follow from the longest row rounded up to this.
KEYS = 1024

# One for each number of rows up to 1,024, and others that steps turned out to want.
MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the graphs, and the most that are cached; 0: the defaults of this module."""

    row_interval: int = 0
    """Multiple that rows are rounded up to."""
    key_interval: int = 0
    """Multiple that the longest row's length is rounded up to."""
    max_cached: int = 0

    def padded(self, num_rows: int) -> int:
        """Return the rows of the graph that runs `num_rows`."""
        if not self.row_interval and num_rows <= ROWS[-1]:
            return next(size for size in ROWS if size >= num_rows)
        return _rounded_up(num_rows, self.row_interval or ROW_INTERVAL)

    def up_to(self, num_rows: int) -> list[int]:
        """Return the rows of every graph that runs `num_rows` or fewer."""
        return sorted({self.padded(count) for count in range(1, num_rows + 1)})

    def padded_keys(self, num_keys: int) -> int:
        """Return the keys of the graph whose longest row has `num_keys`."""
        return _rounded_up(num_keys, self.key_interval or KEYS)


def _rounded_up(count: int, interval: int) -> int:
    return -(-count // interval) * interval


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Sizes that are fixed when a graph is captured."""

    num_rows: int
    num_splits: int
    has_shared: bool
    """True if rows may share a prefix that a tile reads."""

    def distance(self, other: "GraphKey") -> float:
        """Return how much the splits differ, as a power of two."""
        return abs(math.log2(self.num_splits / other.num_splits))


class PendingStep:
    """A launched decode step whose results are still being copied to system memory."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        results_N3: torch.Tensor,
        device: torch.device,
    ) -> None:
        """Record the step's end in the calling thread's stream.

        Args:
            requests: the sequences.
            rows: each one's row of the results.
            results_N3: float64, in system memory, still being written: token ids, log-probs, and
                whether each is valid.
            device: runs the step.
        """
        self._rows = dict(zip(requests, rows, strict=True))
        self._results_N3, self._end = results_N3, devices.record_event(device)

    @property
    def running(self) -> list[Request]:
        """Sequences of the step that still run."""
        return [r for r in self._rows if r.status is RequestStatus.DECODING]

    def read(self, requests: Sequence[Request]) -> tuple[list[int], list[float], list[bool]]:
        """Wait for the step; return token ids, log-probabilities and validity of its sequences.

        Raises:
            RuntimeError: the device failed.
        """
        if self._end is not None:
            self._end.synchronize()
        rows = [self._rows[request] for request in requests]
        tokens, logprobs, is_valid = self._results_N3[rows].unbind(1)
        return tokens.long().tolist(), logprobs.tolist(), is_valid.bool().tolist()


class GraphedDecoding:
    """Captures decode steps as graphs, caches them and replays them."""

    def __init__(
        self,
        runner: ModelRunner,
        decoding: "TritonBackend",
        sizes: GraphSizes,
        max_rows: int,
        capture: Callable[[Replay], Replay] | None = None,
    ) -> None:
        """Allocate the buffers; nothing is captured yet.

        Args:
            runner: calls the model.
            decoding: reads and writes the pages.
            sizes: sizes of the graphs.
            max_rows: most sequences that run together.
            capture: captures a step; None: as a CUDA graph.
        """
        self._runner, self._decoding, self._sizes = runner, decoding, sizes
        self._capture = capture or CudaCapture(runner.device)
        num_rows, device = sizes.padded(max(max_rows, MAX_DRAFT_ROWS)), runner.device
        self._inputs = GraphInputs(num_rows, device)
        self._results_N3 = torch.zeros(num_rows, 3, dtype=torch.float64, device=device)
        # One for all graphs: each graph's own would stay in the memory pool beside the others'.
        self._logits_NV: torch.Tensor | None = None
        # One for a step, one for the step after it.
        self._host_results = [
            torch.zeros(num_rows, 3, dtype=torch.float64, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        # Largest first, so that the others fit the memory that it takes. Tiles may stay empty.
        self._row_keys = [
            GraphKey(size, decoding.splits(size, sizes.padded_keys(1)), has_shared=size > 1)
            for size in reversed(sizes.up_to(max_rows))
        ]
        self._max_graphs = sizes.max_cached or max(MAX_GRAPHS, len(self._row_keys))
        self._graphs: OrderedDict[GraphKey, Replay] = OrderedDict()
        self._wanted: dict[GraphKey, None] = {}
        self._weights: list[object] = []
        self.num_bytes = 0
        """Bytes that capturing took from the device."""
        self.has_hooks = False
        """True while the model has hooks, which a replay would not call: no graph may run."""

    @property
    def num_graphs(self) -> int:
        """Graphs cached now."""
        return len(self._graphs)

    @property
    def is_wanting(self) -> bool:
        """Return whether steps ran the graph of another key for lack of their own."""
        return bool(self._wanted)

    def check_model(self, block_size: int) -> None:
        """Capture a graph for each number of rows, before there is any cache.

        Raises:
            Exception: the forward cannot be captured, for example because it waits for the device.
        """
        self.check_weights()
        if self.has_hooks:
            # The captured step includes the hooks, which may be gone by the first step.
            self._add(self._row_keys[-1], block_size)
            self.forget()
        else:
            self.capture_sizes(block_size)

    def capture_sizes(self, block_size: int) -> None:
        """Capture a graph for each number of rows that has none, as many as are cached.

        Raises:
            Exception: memory ran out, or the device failed.
        """
        has_graph = {key.num_rows for key in self._graphs}
        missing = [key for key in self._row_keys if key.num_rows not in has_graph]
        self._capture_all(missing, block_size)

    def capture_wanted(self, block_size: int) -> None:
        """Capture the graphs that steps turned out to want, as many more as are cached.

        Raises:
            Exception: memory ran out, or the device failed.
        """
        wanted, self._wanted = list(self._wanted), {}
        self._capture_all(wanted, block_size)

    def _capture_all(self, keys: Sequence[GraphKey], block_size: int) -> None:
        keys = keys[: max(0, self._max_graphs - len(self._graphs))]
        if not keys or self.has_hooks:
            return
        device = self._runner.device
        before = devices.memory_after_release(device).free_bytes
        try:
            for key in keys:
                self._add(key, block_size)
        finally:
            self.num_bytes += max(0, before - devices.memory_after_release(device).free_bytes)

    def forget(self) -> None:
        """Drop all graphs, and the memory that they hold."""
        self._graphs.clear()
        self._wanted, self._logits_NV, self.num_bytes = {}, None, 0
        if isinstance(self._capture, CudaCapture):
            self._capture.start_over()

    def check_weights(self) -> None:
        """Forget every graph if what it captured has changed, or the model has hooks."""
        weights = torch_compat.captured_weights(self._runner.model)
        had_hooks, self.has_hooks = self.has_hooks, torch_compat.has_hooks(self._runner.model)
        if self.has_hooks and not had_hooks:
            _LOGGER.warning(
                "decode steps run without CUDA graphs while the model has forward hooks, which a "
                "graph would not call; remove the hooks to make rollouts faster"
            )
        if self.has_hooks or weights != self._weights:
            self.forget()
            self._weights = weights

    def follows(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Return whether the last step left the inputs of this one, for a graph of the same size.

        Args:
            requests: sequences, none of them admitted since the last step.
            lengths: tokens of each, the one that the last step sampled included.
        """
        is_size = self._sizes.padded(len(requests)) == self._sizes.padded(self._inputs.num_rows)
        return is_size and self._inputs.holds(requests, lengths)

    def forget_rows(self) -> None:
        """Have the next step load its inputs: the last one's are of other sequences."""
        self._inputs.forget()

    def load(self, requests: Sequence[Request], table: BlockTable) -> None:
        """Copy the inputs of a step of these sequences to the device."""
        rows = DecodeRows.of(requests, table.block_size)
        self._inputs.load(rows, table.block_size, self._decoding.rows_per_tile, requests)

    def launch(
        self, requests: Sequence[Request], longest: int, cache: PagedCache, table: BlockTable
    ) -> PendingStep:
        """Launch one step, sampling included.

        Args:
            requests: sequences that `want_plain_tokens`, loaded by `load` or by the last step.
            longest: tokens of the longest sequence, with the newest, which may not be read yet.
            cache: holds their pages.
            table: lists the blocks of each table row, that of the newest token included.

        Raises:
            Exception: capturing a graph of another size failed, or running it.
        """
        self._decoding.find(cache, table)
        inputs = self._inputs
        inputs.empty_all_but(requests)
        self._replay(longest, table.block_size)
        inputs.note_step()
        self._host_results.reverse()
        num_rows, host_N3 = inputs.num_rows, self._host_results[0]
        host_N3[:num_rows].copy_(self._results_N3[:num_rows], non_blocking=True)
        return PendingStep(requests, inputs.rows_of(requests), host_N3, self._runner.device)

    def logits(self, rows: DecodeRows, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Run one step; return float32 logits after each row's token, `[rows, V]`.

        The next step writes its own over them.
        """
        self._decoding.find(cache, table)
        self._inputs.load(rows, table.block_size, self._decoding.rows_per_tile)
        self._replay(max(rows.lengths), table.block_size)
        assert self._logits_NV is not None
        return self._logits_NV[: len(rows)]

    def _replay(self, longest: int, block_size: int) -> None:
        """Replay a graph on the loaded inputs."""
        num_rows = self._sizes.padded(self._inputs.num_rows)
        num_splits = self._decoding.splits(num_rows, self._sizes.padded_keys(longest))
        key = GraphKey(num_rows, num_splits, self._inputs.has_shared)
        if key not in self._graphs:
            key = self._nearest(key, block_size)
        self._graphs.move_to_end(key)
        self._graphs[key]()

    def _nearest(self, key: GraphKey, block_size: int) -> GraphKey:
        """Return the nearest captured key that computes the same, and note the one that is wanted.

        Where fewer graphs are cached than there are numbers of rows, the graph is captured.
        """
        found = [
            other
            for other in self._graphs
            if other.num_rows == key.num_rows and other.has_shared >= key.has_shared
        ]
        if found:
            self._wanted[key] = None
            return min(found, key=key.distance)
        self._add(key, block_size)
        return key

    def _add(self, key: GraphKey, block_size: int) -> None:
        with self._inputs.emptied():
            self._graphs[key] = self._capture(self._step(key, block_size))
        while len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)

    def _step(self, key: GraphKey, block_size: int) -> Replay:
        """Return the function that is captured."""
        inputs_LB = self._inputs.tensor[:, : key.num_rows]
        tokens_B, lengths_B, indices_B, offsets_B = (
            inputs_LB[line] for line in (Line.TOKEN, Line.LENGTH, Line.INDEX, Line.POSITION_OFFSET)
        )
        num_tiles = key.num_rows // 2 if key.has_shared else 0

        def run() -> torch.Tensor:
            # Full width keeps the start of every line aligned as Triton expects of pointers.
            small = self._inputs.tensor.to(torch.int32)[:, : key.num_rows]
            metadata = AttentionMetadata(
                self._decoding.addresses,
                block_size,
                small[Line.TABLE_ROW],
                small[Line.LENGTH],
                key.num_splits,
                shared_B=small[Line.NUM_SHARED] if num_tiles else None,
                first_T=small[Line.TILE_FIRST, :num_tiles] if num_tiles else None,
                count_T=small[Line.TILE_COUNT, :num_tiles] if num_tiles else None,
                rows_per_tile=self._decoding.rows_per_tile,
            )
            positions_B1 = (lengths_B - 1 + offsets_B).clamp(min=0)[:, None]
            inputs = self._decoding.inputs(tokens_B[:, None], positions_B1, metadata)
            logits_BV = self._kept(self._runner.decode(inputs))
            results_B3 = sample_plainly(logits_BV, inputs_LB)
            tokens_B.copy_(results_B3[:, 0])
            lengths_B.add_(lengths_B > 0)
            indices_B.add_(1)
            return self._results_N3[: key.num_rows].copy_(results_B3)

        return run

    def _kept(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Copy logits to the buffer of all graphs; return the copy."""
        if self._logits_NV is None:
            # In the first capture's run before the capture itself, so outside its memory pool.
            num_rows = self._results_N3.shape[0]
            self._logits_NV = logits_BV.new_empty(num_rows, logits_BV.shape[1])
        return self._logits_NV[: logits_BV.shape[0]].copy_(logits_BV)


def sample_plainly(logits_BV: torch.Tensor, inputs_LB: torch.Tensor) -> torch.Tensor:
    """Return each row's next token, log-probability and validity, as one float64 tensor `[B, 3]`.

    The arithmetic of `sampling.draw.sample` without truncation, and without waiting for the device.
    """
    temperatures_B = inputs_LB[Line.TEMPERATURE].view(torch.float64).float()
    scaled_BV = logits_BV / temperatures_B[:, None]
    distribution = exponentials(scaled_BV)
    drawn_B = draw(distribution, uniforms(inputs_LB[Line.SEED], inputs_LB[Line.INDEX]))
    is_greedy_B = inputs_LB[Line.IS_GREEDY].bool()
    tokens_B = torch.where(is_greedy_B, logits_BV.argmax(-1), drawn_B)
    tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    normalizers_B = distribution.normalizers_B
    logprobs_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0] - normalizers_B
    return torch.stack(
        [tokens_B.double(), logprobs_B.double(), normalizers_B.isfinite().double()], 1
    )
