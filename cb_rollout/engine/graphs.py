"""Decode steps as CUDA graphs: forward, sampling, log-probabilities and the next inputs in one.

What a step reads stands in buffers that never move: each row's newest token, length, slot and
sampling parameters. A step writes the next ones over them, so while the same sequences run nothing
goes to the device but a new block now and then, and one small tensor comes back. Graphs find pages
by address (see `triton_decode`) and weights where they are: they stay valid while weights change in
place and while the cache grows, sleeps and wakes. One thread calls it.

B: rows of a graph, N: most rows, V: vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from cb_rollout._compat_hooks import has_hooks
from cb_rollout.engine.attention.decoding import PagedDecoding
from cb_rollout.engine.attention.places import Places
from cb_rollout.engine.attention.sharing import shared_tiles
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache
from cb_rollout.engine.capture import CudaCapture, Replay, captured_weights
from cb_rollout.engine.decode_rows import DecodeRows
from cb_rollout.engine.drafting import MOST_ROWS
from cb_rollout.engine.graph_sizes import GraphSizes
from cb_rollout.engine.request import Request
from cb_rollout.engine.runner import ModelRunner
from cb_rollout.engine.sampler import draw, exponentials, uniforms


class Line(IntEnum):
    """The lines of the input buffer, one number a row, or a tile, in each."""

    TOKEN = 0
    LENGTH = 1
    """Tokens, the newest included; 0: no row."""
    SLOT = 2
    SEED = 3
    INDEX = 4
    """Tokens sampled before."""
    IS_GREEDY = 5
    TEMPERATURE = 6
    """The bits of a float64."""
    NUM_SHARED = 7
    """Leading tokens that a shared tile reads."""
    TILE_FIRST = 8
    TILE_COUNT = 9


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
        decoding: PagedDecoding,
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
        num_rows = sizes.padded(max(max_rows, MOST_ROWS))
        is_cuda = runner.device.type == "cuda"
        self._host = torch.zeros(len(Line), num_rows, dtype=torch.int64, pin_memory=is_cuda)
        self._inputs = torch.zeros_like(self._host, device=runner.device)
        self._results = torch.zeros(num_rows, 3, dtype=torch.float64, device=runner.device)
        self._host_results = torch.zeros(num_rows, 3, dtype=torch.float64, pin_memory=is_cuda)
        self._graphs: OrderedDict[GraphKey, Replay] = OrderedDict()
        self._weights: list[object] = []
        self._loaded: list[Request] = []
        self._expected: list[tuple[int, int]] = []
        self._has_shared = False
        self.is_stepped_into = False
        """Whether anyone steps into the forward, whom no replay would call: nothing is to run."""

    @property
    def num_graphs(self) -> int:
        """Graphs held now."""
        return len(self._graphs)

    def rehearse(self, block_size: int) -> None:
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

    def sampled(
        self, requests: Sequence[Request], cache: PagedCache, table: BlockTable
    ) -> tuple[list[int], list[float], list[bool]] | None:
        """Run one step and sample in it: token ids, log-probabilities, and whether each is valid.

        None: some sequence wants what the graph does not do; nothing ran.
        """
        if any(r.is_adjusted or r.params.is_truncated or r.params.top_logprobs for r in requests):
            return None
        addresses = self._decoding.find(cache, table)
        state = [(request.slot, request.num_tokens) for request in requests]
        is_loaded = self._loaded == requests and self._expected == state
        if not is_loaded:
            self._load(DecodeRows.of(requests, table.block_size), table.block_size, requests)
        self._loaded = []
        num_rows, longest = len(requests), max(length for _, length in state)
        self._replay(num_rows, longest, addresses, table.block_size, samples=True)
        self._loaded = list(requests)
        self._expected = [(slot, length + 1) for slot, length in state]
        self._host_results[:num_rows].copy_(self._results[:num_rows], non_blocking=True)
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream(self._runner.device).synchronize()
        tokens, logprobs, is_valid = self._host_results[:num_rows].unbind(1)
        return tokens.long().tolist(), logprobs.tolist(), is_valid.bool().tolist()

    def logits(self, rows: DecodeRows, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Run one step; float32 logits after each row's token, `[rows, V]`."""
        addresses = self._decoding.find(cache, table)
        self._loaded = []
        self._load(rows, table.block_size)
        longest = max(rows.lengths)
        logits_BV = self._replay(len(rows), longest, addresses, table.block_size, samples=False)
        return logits_BV[: len(rows)]

    def _replay(
        self,
        num_rows: int,
        longest: int,
        addresses: torch.Tensor,
        block_size: int,
        *,
        samples: bool,
    ) -> torch.Tensor:
        """Run a graph on what was loaded; what its step returns."""
        num_rows = self._sizes.padded(num_rows)
        num_splits = self._decoding.splits(num_rows, self._sizes.padded_keys(longest))
        key = GraphKey(num_rows, num_splits, self._has_shared, samples)
        if key not in self._graphs:
            self._add(key, addresses, block_size)
        self._graphs.move_to_end(key)
        return self._graphs[key]()

    def _add(self, key: GraphKey, addresses: torch.Tensor, block_size: int) -> None:
        """Capture a graph, with no rows at all, which touches no page."""
        loaded = self._inputs.clone()
        self._inputs.zero_()
        try:
            self._graphs[key] = self._capture(self._step(key, addresses, block_size))
        finally:
            self._inputs.copy_(loaded)
        while len(self._graphs) > self._sizes.max_graphs:
            self._graphs.popitem(last=False)

    def _load(self, rows: DecodeRows, block_size: int, requests: Sequence[Request] = ()) -> None:
        """Write the rows' inputs to the device, and, where they are sampled there, how."""
        host, params = self._host.zero_(), [request.params for request in requests]
        tiles = shared_tiles(rows.block_ids, block_size, self._decoding.rows_per_tile)
        shared = [0] * len(rows)
        for tile in tiles:
            last = tile.first_row + tile.num_rows
            shared[tile.first_row : last] = [tile.num_tokens] * tile.num_rows
        lines = {
            Line.TOKEN: rows.token_ids,
            Line.LENGTH: rows.lengths,
            Line.SLOT: rows.slots,
            Line.SEED: [request.seed for request in requests],
            Line.INDEX: [request.num_generated for request in requests],
            Line.IS_GREEDY: [p.is_greedy for p in params],
            Line.NUM_SHARED: shared,
            Line.TILE_FIRST: [tile.first_row for tile in tiles],
            Line.TILE_COUNT: [tile.num_rows for tile in tiles],
        }
        for line, values in lines.items():
            host[line, : len(values)] = torch.tensor(values, dtype=torch.int64)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        padding = [1.0] * (host.shape[1] - len(params))
        host[Line.TEMPERATURE].view(torch.float64).copy_(torch.tensor(temperatures + padding))
        self._inputs.copy_(host, non_blocking=True)
        self._has_shared = bool(tiles)

    def _step(self, key: GraphKey, addresses: torch.Tensor, block_size: int) -> Replay:
        """The work of one step, as it is captured."""
        inputs_LB = self._inputs[:, : key.num_rows]
        tokens_B, lengths_B, indices_B = (
            inputs_LB[line] for line in (Line.TOKEN, Line.LENGTH, Line.INDEX)
        )
        num_tiles = key.num_rows // 2 if key.has_shared else 0

        def run() -> torch.Tensor:
            # Of full width, so that every line begins where Triton likes pointers to.
            small = self._inputs.to(torch.int32)[:, : key.num_rows]
            places = Places(
                addresses,
                block_size,
                small[Line.SLOT],
                small[Line.LENGTH],
                key.num_splits,
                shared_B=small[Line.NUM_SHARED] if num_tiles else None,
                first_T=small[Line.TILE_FIRST, :num_tiles] if num_tiles else None,
                count_T=small[Line.TILE_COUNT, :num_tiles] if num_tiles else None,
                rows_per_tile=self._decoding.rows_per_tile,
            )
            positions_B1 = (lengths_B - 1).clamp(min=0)[:, None]
            forward = self._runner.forward
            logits_BV = self._decoding.run(forward, tokens_B[:, None], positions_B1, places)
            if not key.samples:
                return logits_BV
            results_B3 = sample_plainly(logits_BV, inputs_LB)
            tokens_B.copy_(results_B3[:, 0])
            lengths_B.add_(lengths_B > 0)
            indices_B.add_(1)
            return self._results[: key.num_rows].copy_(results_B3)

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
