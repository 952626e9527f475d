"""For how many rows and keys decode graphs are captured: arithmetic only.

Decode steps as CUDA graphs: forward, sampling, log-probabilities and the next inputs in one.

A step reads `GraphInputs` and writes the next ones over them, so while no sequence joins nothing
goes to the device but a new block now and then, and one small tensor comes back, which the next
step need not wait for. Graphs find pages by address (see `triton_decode`) and weights where they
are: they stay valid while weights change in place and while the cache grows, sleeps and wakes. One
thread calls it.

B: rows of a graph, N: most rows, V: vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cb_rollout.compat.torch import captured_weights, has_hooks
from cb_rollout.engine.attention.backend import AttentionMetadata
from cb_rollout.engine.cuda_graphs.capture import CudaCapture, Replay
from cb_rollout.engine.cuda_graphs.inputs import GraphInputs, Line
from cb_rollout.engine.cuda_graphs.pending_step import PendingStep
from cb_rollout.engine.kv_cache.block_table import BlockTable
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.model.decode_rows import DecodeRows
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import draw, exponentials, uniforms
from cb_rollout.engine.spec_decode.ngram import MOST_ROWS

if TYPE_CHECKING:
    from cb_rollout.engine.attention.triton.backend import TritonBackend

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# At most half as many rows again as are needed: up to a few hundred, weights are what a step reads.

KEYS = 1024
# Graphs differ in how keys are split, which is settled by the longest row rounded up to this.

MAX_GRAPHS = 32
# One for each number of rows, and some for rows so long that they are split more.


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes of the graphs, and how many are kept; 0 leaves the choice here."""

    row_interval: int = 0
    """Rows are rounded up to a multiple of this."""
    key_interval: int = 0
    """The longest row's length is rounded up to a multiple of this."""
    max_cached: int = 0

    @property
    def max_graphs(self) -> int:
        """Most graphs kept; the least recently used goes first."""
        return self.max_cached or MAX_GRAPHS

    def padded(self, num_rows: int) -> int:
        """Rows of the graph that runs `num_rows`."""
        if not self.row_interval and num_rows <= ROWS[-1]:
            return next(size for size in ROWS if size >= num_rows)
        return _rounded_up(num_rows, self.row_interval or ROWS[-1])

    def padded_keys(self, num_keys: int) -> int:
        """Keys of the longest row, for the graph that runs it."""
        return _rounded_up(num_keys, self.key_interval or KEYS)


def _rounded_up(count: int, interval: int) -> int:
    return -(-count // interval) * interval


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What is fixed when a graph is captured."""

    num_rows: int
    num_splits: int
    has_shared: bool
    samples: bool
    """Whether tokens are sampled in the graph; False: it ends with the logits."""


class GraphedDecoding:
    """Runs decode steps of running sequences by replaying graphs."""

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
            decoding: reads the pages.
            sizes: of the graphs, and how many are kept.
            max_rows: most sequences that run together.
            capture: makes a graph of a step; None: on the device's own streams.
        """
        self._runner, self._decoding, self._sizes = runner, decoding, sizes
        self._capture = capture or CudaCapture(runner.device)
        num_rows, device = sizes.padded(max(max_rows, MOST_ROWS)), runner.device
        self._inputs = GraphInputs(num_rows, device)
        self._results_N3 = torch.zeros(num_rows, 3, dtype=torch.float64, device=device)
        # Of a step, and of the one after it.
        self._host_results = [
            torch.zeros(num_rows, 3, dtype=torch.float64, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self._graphs: OrderedDict[GraphKey, Replay] = OrderedDict()
        self._weights: list[object] = []
        self.is_stepped_into = False
        """Whether anyone steps into the forward, whom no replay would call: nothing is to run."""

    @property
    def num_graphs(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def check_model(self, block_size: int) -> None:
        """Capture the smallest graph, before there is any cache.

        Raises:
            Exception: the model's forward cannot be captured; it asks the host what to do.
        """
        self.check_weights()
        num_rows = self._sizes.padded(1)
        num_splits = self._decoding.splits(num_rows, self._sizes.padded_keys(1))
        key = GraphKey(num_rows, num_splits, has_shared=False, samples=True)
        self._add(key, self._decoding.addresses, block_size)
        if self.is_stepped_into:
            # What was captured does what a hook does, which may be gone by the first step.
            self._graphs.clear()

    def check_weights(self) -> None:
        """Forget every graph if a weight no longer is where it was, or an adapter was switched.

        And while anyone steps into the forward.
        """
        weights = captured_weights(self._runner.model)
        self.is_stepped_into = has_hooks(self._runner.model)
        if self.is_stepped_into or weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def follows(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Whether the last step left what a step of these sequences reads, in a graph of its size.

        Args:
            requests: sequences, of which none was seated anew since that step.
            lengths: tokens of each, the one that the last step sampled included.
        """
        is_size = self._sizes.padded(len(requests)) == self._sizes.padded(self._inputs.num_rows)
        return is_size and self._inputs.holds(requests, lengths)

    def forget_rows(self) -> None:
        """Have the next step's rows loaded anew: a sequence was seated, or took another way."""
        self._inputs.forget()

    def load(self, requests: Sequence[Request], table: BlockTable) -> None:
        """Have the device know what a step of these sequences reads."""
        rows = DecodeRows.of(requests, table.block_size)
        self._inputs.load(rows, table.block_size, self._decoding.rows_per_tile, requests)

    def launch(
        self, requests: Sequence[Request], longest: int, cache: PagedCache, table: BlockTable
    ) -> PendingStep:
        """Have the device run one step, and sample in it.

        Args:
            requests: sequences that `want_plain_tokens`, and were loaded or `follows`.
            longest: tokens of the longest, the newest included, whether the host knows it or not.
            cache: their pages.
            table: where each table row's blocks are, that of the newest token included.

        Raises:
            Exception: what capturing a graph of another size raises, or running one.
        """
        addresses, inputs = self._decoding.find(cache, table), self._inputs
        inputs.empty_all_but(requests)
        self._replay(longest, addresses, table.block_size, samples=True)
        inputs.note_step()
        self._host_results.reverse()
        num_rows, host_N3 = inputs.num_rows, self._host_results[0]
        host_N3[:num_rows].copy_(self._results_N3[:num_rows], non_blocking=True)
        return PendingStep(requests, inputs.rows_of(requests), host_N3, self._runner.device)

    def logits(self, rows: DecodeRows, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Run one step; float32 logits after each row's token, `[rows, V]`."""
        addresses = self._decoding.find(cache, table)
        self._inputs.load(rows, table.block_size, self._decoding.rows_per_tile)
        logits_BV = self._replay(max(rows.lengths), addresses, table.block_size, samples=False)
        return logits_BV[: len(rows)]

    def _replay(
        self, longest: int, addresses: torch.Tensor, block_size: int, *, samples: bool
    ) -> torch.Tensor:
        """Run a graph on what was loaded; what its step returns."""
        num_rows = self._sizes.padded(self._inputs.num_rows)
        num_splits = self._decoding.splits(num_rows, self._sizes.padded_keys(longest))
        key = GraphKey(num_rows, num_splits, self._inputs.has_shared, samples)
        if key not in self._graphs:
            self._add(key, addresses, block_size)
        self._graphs.move_to_end(key)
        return self._graphs[key]()

    def _add(self, key: GraphKey, addresses: torch.Tensor, block_size: int) -> None:
        """Capture a graph."""
        with self._inputs.emptied():
            self._graphs[key] = self._capture(self._step(key, addresses, block_size))
        while len(self._graphs) > self._sizes.max_graphs:
            self._graphs.popitem(last=False)

    def _step(self, key: GraphKey, addresses: torch.Tensor, block_size: int) -> Replay:
        """The work of one step, as it is captured."""
        inputs_LB = self._inputs.tensor[:, : key.num_rows]
        tokens_B, lengths_B, indices_B = (
            inputs_LB[line] for line in (Line.TOKEN, Line.LENGTH, Line.INDEX)
        )
        num_tiles = key.num_rows // 2 if key.has_shared else 0

        def run() -> torch.Tensor:
            # Of full width, so that every line begins where Triton likes pointers to.
            small = self._inputs.tensor.to(torch.int32)[:, : key.num_rows]
            metadata = AttentionMetadata(
                addresses,
                block_size,
                small[Line.TABLE_ROW],
                small[Line.LENGTH],
                key.num_splits,
                shared_B=small[Line.NUM_SHARED] if num_tiles else None,
                first_T=small[Line.TILE_FIRST, :num_tiles] if num_tiles else None,
                count_T=small[Line.TILE_COUNT, :num_tiles] if num_tiles else None,
                rows_per_tile=self._decoding.rows_per_tile,
            )
            positions_B1 = (lengths_B - 1).clamp(min=0)[:, None]
            forward = self._runner.forward
            logits_BV = self._decoding.run(forward, tokens_B[:, None], positions_B1, metadata)
            if not key.samples:
                return logits_BV
            results_B3 = sample_plainly(logits_BV, inputs_LB)
            tokens_B.copy_(results_B3[:, 0])
            lengths_B.add_(lengths_B > 0)
            indices_B.add_(1)
            return self._results_N3[: key.num_rows].copy_(results_B3)

        return run


def sample_plainly(logits_BV: torch.Tensor, inputs_LB: torch.Tensor) -> torch.Tensor:
    """Each row's next token, its log-probability and whether it is valid, as one float64 tensor.

    The same arithmetic as `sampler.sample` where nothing is truncated, without a word to the host.
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
