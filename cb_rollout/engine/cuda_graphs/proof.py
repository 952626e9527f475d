"""Compare captured decode steps with gathered ones, on the device that they run on.

What is compared is every kernel form that an engine captured: rows that share a prompt, a row that
is long enough to be cut, short rows, and sampling. Sequences and pages are temporary. Changes
nothing in the engine; `ladder.py` acts on the findings. Called by the thread that captures.

B: rows, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampling
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, GraphKey
from cb_rollout.engine.decode.findings import ProofFinding, StepPart
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import agrees, computed_in, rounding_noise
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import create_sampling_batch, sample
from cb_rollout.engine.sampling.sampler import HostSampled
from cb_rollout.errors import error_text

# Tokens that two sequences share, in whole blocks, and tokens of the sequence that is cut.
SHARED_TOKENS = 96
LONG_TOKENS = 700
SHORT_TOKENS = 5

# The sequences: two that share their first tokens, one that is cut, one that is short.
FIRST, SECOND, LONG, SHORT = range(4)

# Rows take these sampling parameters in turns.
SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8, temperature=1.3),
    SamplingParams(min_p=0.05),
)

# Rows of a graph that are compared, the first and the last among them.
MAX_COMPARED = 16

# Nats by which a kernel's log-probability may be off torch's, of the same logits.
LOGPROB_TOLERANCE = 1e-3

# A draw that falls on a border may round to either side: a token counts as wrong only if the draws
# of all these seeds differ.
SEEDS = (1, 2)


class ProofSequences:
    """A few sequences on separate pages, with all tokens computed except the newest of each."""

    def __init__(self, runner: ModelRunner, layout: CacheLayout, block_size: int) -> None:
        """Allocate the pages, and compute the sequences on them by gathered forwards.

        Args:
            runner: runs the model, in evaluation mode.
            layout: of its cache; without recurrent states.
            block_size: tokens of a block.
        """
        self._runner = runner
        limits = [LONG_TOKENS, *runner.rope.limits]
        max_positions = hf_compat.max_positions(runner.model)
        if max_positions is not None:
            limits.append(max_positions)
        longest = min(limits)
        shared = -(-SHARED_TOKENS // block_size) * block_size
        self.has_shared = shared + SHORT_TOKENS < longest
        """False where the model takes no rows that are long enough."""
        if not self.has_shared:
            shared = 0
        short = min(SHORT_TOKENS, longest)
        sharing = min(shared + short, longest)
        # Of `FIRST`, `SECOND`, `LONG` and `SHORT`.
        self.lengths = [sharing, sharing, longest, short]
        drawn = cycle(hf_compat.text_token_ids(runner.model))
        self.tokens = [list(islice(drawn, length)) for length in self.lengths]
        self.tokens[SECOND][:shared] = self.tokens[FIRST][:shared]
        self.block_ids: list[list[int]] = []
        num_blocks = 0
        for length in self.lengths:
            count = -(-length // block_size)
            first_block = num_blocks + 1
            self.block_ids.append(list(range(first_block, first_block + count)))
            num_blocks += count
        num_shared = shared // block_size
        self.block_ids[SECOND][:num_shared] = self.block_ids[FIRST][:num_shared]
        device = runner.device
        self.cache = PagedCache(
            layout,
            num_blocks=num_blocks,
            block_size=block_size,
            num_table_rows=len(self.lengths),
            device=device,
        )
        self.table = BlockTable(len(self.lengths), block_size, device)
        entries: list[tuple[int, int, int]] = []
        for row, blocks in enumerate(self.block_ids):
            for index, block in enumerate(blocks):
                entries.append((row, index, block))
        self.table.write(entries)
        self._compute()

    def _compute(self) -> None:
        with _gathering(self._runner):
            for sequence in range(len(self.lengths)):
                length = self.lengths[sequence] - 1
                batch = self.batch([sequence])
                prompt = self.tokens[sequence][:length]
                batch = replace(batch, new_tokens=[prompt], lengths=[length])
                self._runner.logits(batch)

    def batch(self, sequences: Sequence[int]) -> ForwardBatch:
        """Return a decode step of these sequences; one may stand in several rows."""
        return ForwardBatch(
            new_tokens=[self.tokens[number][-1:] for number in sequences],
            lengths=[self.lengths[number] for number in sequences],
            table_rows=list(sequences),
            cache=self.cache,
            table=self.table,
            block_ids=[self.block_ids[number] for number in sequences],
        )

    def requests(self, sequences: Sequence[int], seed: int) -> list[Request]:
        """Return a request for each row, sampled with the parameters of `SAMPLED` in turns."""
        requests: list[Request] = []
        for row, number in enumerate(sequences):
            request = Request(
                request_id=f"proof-{row}",
                prompt_ids=self.tokens[number],
                params=SAMPLED[row % len(SAMPLED)],
                max_new_tokens=2,
                stop_tokens=frozenset(),
                seed=seed * 1000 + row,
            )
            request.table_row = number
            request.block_ids = self.block_ids[number]
            request.num_computed = self.lengths[number] - 1
            requests.append(request)
        return requests

    def gathered_logits(self) -> torch.Tensor:
        """Return the model's own float32 logits after each sequence, `[sequences, V]`."""
        with _gathering(self._runner):
            return self._runner.logits(self.batch(range(len(self.lengths))))


def _gathering(runner: ModelRunner) -> AbstractContextManager[None]:
    """Run the model's own attention, over gathered keys."""
    return runner.using(replace(runner.execution, attention_backend=None))


class Proof:
    """Gathered logits of a few sequences, and the noise of each, to compare captured steps with."""

    def __init__(self, runner: ModelRunner, layout: CacheLayout, block_size: int) -> None:
        self._runner = runner
        self._sequences = ProofSequences(runner, layout, block_size)
        logits = self._sequences.gathered_logits()
        self._expected = logits.log_softmax(-1)
        higher = None
        if runner.computes_coarsely:
            create = partial(ProofSequences, runner, layout.at_least(torch.float32), block_size)
            higher = computed_in(
                torch.float32,
                lambda: create().gathered_logits().log_softmax(-1),
                runner.computing_in,
            )
        self._noise = rounding_noise(self._expected, higher, runner.rounding_dtype)

    def of_kernels(self) -> list[ProofFinding]:
        """Compare decode steps of the attention backend that no graph captured."""
        findings: list[ProofFinding] = []
        for rows in ([FIRST, SECOND, LONG, SHORT], [FIRST, SHORT], [LONG]):
            step = partial(self._runner.logits, self._sequences.batch(rows))
            findings += self._of_forward(f"kernels over {len(rows)} rows", rows, step)
        return findings

    def of_graphs(self, graphs: GraphedDecoding) -> list[ProofFinding]:
        """Compare every captured graph, with as many rows as it has and as few as it runs."""
        findings: list[ProofFinding] = []
        try:
            with graphs.left_as_they_are():
                sizes = sorted({key.num_rows for key in graphs.keys})
                for key in graphs.keys:
                    smaller = [size for size in sizes if size < key.num_rows]
                    fewest = max(smaller, default=0) + 1
                    for num_rows in dict.fromkeys((key.num_rows, fewest)):
                        findings += self._of_graph(graphs, key, num_rows)
        finally:
            graphs.forget_rows()
        return findings

    def _of_graph(
        self, graphs: GraphedDecoding, key: GraphKey, num_rows: int
    ) -> list[ProofFinding]:
        form = f"a graph of {key.num_rows} rows"
        if key.is_cut:
            form += ", cut"
        if key.has_shared:
            form += ", with a shared prompt"
        findings: list[ProofFinding] = []
        for rows in self._compositions(key, num_rows):
            step = partial(graphs.logits, self._sequences.batch(rows))
            differing = self._of_forward(form, rows, step)
            if not differing:
                differing = self._of_sampling(graphs, form, rows)
            findings += [replace(finding, graph=key) for finding in differing]
        return findings

    def _compositions(self, key: GraphKey, num_rows: int) -> list[list[int]]:
        """Return the sequences of the rows, of the kinds for which the graph was captured."""
        if not key.is_cut:
            # Neighbours that share a prompt would run another graph.
            return [_with_short_rows([FIRST], num_rows)]
        if not key.has_shared or not self._sequences.has_shared:
            return [_with_short_rows([LONG], num_rows)]
        if num_rows == 1:
            return [[LONG]]
        composed = [_with_short_rows([FIRST, SECOND, LONG], num_rows)]
        if num_rows == 2:
            composed.append([LONG, SHORT])
        return composed

    def _of_forward(
        self, form: str, rows: Sequence[int], step: Callable[[], torch.Tensor]
    ) -> list[ProofFinding]:
        """Compare a step's logits with the gathered ones, up to rounding."""
        try:
            logits_BV = step()
            compared = _compared(len(rows))
            found = logits_BV[compared].log_softmax(-1)
            numbers = [rows[row] for row in compared]
            agreement = agrees(found, self._expected[numbers], self._noise[numbers])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a path that raises is a finding
            return [ProofFinding(StepPart.FORWARD, form, error_text(error))]
        if agreement:
            return []
        return [ProofFinding(StepPart.FORWARD, form, f"log-probabilities are off by {agreement}")]

    def _of_sampling(
        self, graphs: GraphedDecoding, form: str, rows: Sequence[int]
    ) -> list[ProofFinding]:
        """Compare a graph's samples with torch's samples from the same logits."""
        differences: list[str] = []
        for seed in SEEDS:
            try:
                difference = self._sampling_difference(graphs, rows, seed)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  a path that raises is a finding
                return [ProofFinding(StepPart.SAMPLING, form, error_text(error))]
            if not difference:
                return []
            differences.append(difference)
        return [ProofFinding(StepPart.SAMPLING, form, "; ".join(differences))]

    def _sampling_difference(self, graphs: GraphedDecoding, rows: Sequence[int], seed: int) -> str:
        sequences = self._sequences
        batch = sequences.batch(rows)
        compared = _compared(len(rows))
        logits_BV = graphs.logits(batch)[compared].clone()
        requests = sequences.requests(rows, seed)
        graphs.load(batch, requests)
        launched = graphs.launch(requests, batch.lengths, sequences.cache, sequences.table)
        found = launched.read(requests)
        chosen = [requests[row] for row in compared]
        difference = sampling_difference(found, compared, chosen, logits_BV, graphs.sampling)
        if difference:
            return difference
        # A step that is launched ahead reads these inputs.
        left = graphs.next_inputs()
        lengths = [length + 1 for length in batch.lengths]
        if left != (found.tokens, lengths, [1] * len(rows)):
            return "the next step's inputs are not what was sampled"
        return ""


def _with_short_rows(sequences: list[int], num_rows: int) -> list[int]:
    """Return as many rows as asked for: these sequences first, then `SHORT` in each other row."""
    rows = sequences + [SHORT] * num_rows
    return rows[:num_rows]


def _compared(num_rows: int) -> list[int]:
    """Return rows to compare: the first and the last, and some between them."""
    if num_rows <= MAX_COMPARED:
        return list(range(num_rows))
    last = num_rows - 1
    return [row * last // (MAX_COMPARED - 1) for row in range(MAX_COMPARED)]


def sampling_difference(
    found: HostSampled,
    rows: Sequence[int],
    requests: Sequence[Request],
    logits_BV: torch.Tensor,
    sampling: GraphSampling,
) -> str:
    """Return how samples differ from torch's samples of the same logits; "": they do not.

    Args:
        found: the samples of a graph's rows.
        rows: the rows to compare.
        requests: the sequences of these rows.
        logits_BV: float32, the logits of these rows.
        sampling: the settings of all rows.
    """
    device = logits_BV.device
    processed_BV = None
    if sampling.never_sampled:
        never_sampled = devices.to_device(sampling.never_sampled, device)
        processed_BV = logits_BV.index_fill(1, never_sampled, -torch.inf)
    expected = sample(
        logits_BV,
        create_sampling_batch(requests, device),
        devices.to_device([request.num_generated for request in requests], device),
        sampling.mode,
        processed_BV,
    )
    tokens, logprobs = devices.to_host(expected.token_ids_B, expected.logprobs_B)
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        if not found.is_valid[row]:
            return f"row {row} is said to have no distribution"
        if found.tokens[row] != token:
            return f"row {row} samples token {found.tokens[row]}, not {token}"
        if not abs(found.logprobs[row] - logprob) <= LOGPROB_TOLERANCE:
            return f"row {row} has log-probability {found.logprobs[row]:.4f}, not {logprob:.4f}"
    return ""
