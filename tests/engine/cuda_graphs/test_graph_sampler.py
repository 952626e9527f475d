"""The kernels of a captured step sample what `draw.sample` samples, in Triton's interpreter."""

import random

import pytest
import torch
from kernel_faults import with_fault

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine import cuda_graphs
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampler, GraphSampling
from cb_rollout.engine.cuda_graphs.inputs import GraphInputs, Line
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.draw import create_sampling_batch, sample

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU")

CPU = torch.device("cpu")
POLICY, PROCESSED = LogprobsMode.POLICY, LogprobsMode.PROCESSED
# Parts of so few tokens, that small vocabularies have several.
CHUNK = 128

PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.7, "temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 1e-9},
    {"top_k": 3, "temperature": 0.8},
    {"top_p": 0.8, "min_p": 0.05},
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    from cb_rollout.engine.cuda_graphs import sampling_kernels

    monkeypatch.setattr(sampling_kernels, "CHUNK", CHUNK)


def batch_of(token_ids, lengths):
    num_rows = len(lengths)
    pages = PagedCache(
        CacheLayout(()), num_blocks=0, block_size=8, num_table_rows=num_rows, device=CPU
    )
    tokens = [[token_id] for token_id in token_ids]
    return ForwardBatch(tokens, lengths, range(num_rows), pages, BlockTable(num_rows, 8, CPU))


def request_of(row, params, seed=0, vocab_size=200):
    chance = random.Random(seed * 1000 + row)
    prompt = [chance.randrange(vocab_size) for _ in range(6)]
    stop = frozenset({chance.randrange(vocab_size), 2})
    request = Request(str(row), prompt, SamplingParams(**params), 99, stop, seed=seed * 77 + row)
    for _ in range(1 + row % 5):
        # Few different tokens, so that some come twice.
        request.append(chance.choice([t for t in range(12) if t not in stop]), 0.0, 0)
    return request


def logits_of(seed, num_rows, vocab_size, dtype):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)


class Sampled:
    """What one step's kernels sample for these requests."""

    def __init__(self, requests, logits_BV, sampling=None, sampler=None, inputs=None):
        num_rows = len(requests)
        self.sampler = sampler or GraphSampler(num_rows + 2, CPU, sampling or GraphSampling())
        self.inputs = inputs or GraphInputs(num_rows + 2, CPU)
        if not sampler:
            with self.inputs.emptied():
                self.sampler.sample(logits_BV, self.inputs.tensor)
        batch = batch_of([0] * num_rows, [r.num_tokens for r in requests])
        self.inputs.load(batch, 3, requests, self.sampler.lines(requests))
        self.sampler.sample(logits_BV, self.inputs.tensor)
        self.results_B6 = self.sampler.results[:num_rows].clone()

    def column(self, index):
        return self.results_B6[:, index]


def reference(requests, logits_BV, sampling):
    """What `draw.sample` gives for the same rows, each by itself."""
    never = torch.tensor(sampling.never_sampled, dtype=torch.int64)
    for row, request in enumerate(requests):
        logits_1V = logits_BV[row : row + 1].float()
        batch = create_sampling_batch([request], torch.device("cpu"))
        index_1 = torch.tensor([request.num_generated])
        processed_1V = logits_1V.index_fill(1, never, -torch.inf) if len(never) else None
        yield sample(logits_1V, batch, index_1, sampling.mode, processed_1V)


def assert_same(found, requests, logits_BV, sampling):
    for row, expected in enumerate(reference(requests, logits_BV, sampling)):
        token, logprob, is_valid, is_possible, log_mass, num_kept = found.results_B6[row].tolist()
        assert bool(is_valid * is_possible) is bool(
            expected.is_valid_B
            & (True if expected.is_possible_B is None else expected.is_possible_B)
        )
        if not is_valid * is_possible:
            continue
        assert token == expected.token_ids_B.item(), requests[row].params
        assert logprob == pytest.approx(expected.logprobs_B.item(), abs=1e-5)
        if expected.kept_RV is not None:
            assert num_kept == expected.kept_RV.sum()
            assert log_mass == pytest.approx(expected.log_mass_R.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("mode", "dtype", "never_sampled"),
    [
        (PROCESSED, torch.bfloat16, (0, 130)),
        pytest.param(POLICY, torch.bfloat16, (0, 130), marks=pytest.mark.slow),
        pytest.param(POLICY, torch.float32, (), marks=pytest.mark.slow),
        pytest.param(PROCESSED, torch.float32, (), marks=pytest.mark.slow),
    ],
)
def test_kernels_sample_what_torch_samples(mode, dtype, never_sampled):
    """Each kind of row beside the others; bfloat16 has many equally likely tokens."""
    sampling = GraphSampling(never_sampled, mode)
    requests = [request_of(row, params) for row, params in enumerate(PARAMS)]
    logits_BV = logits_of(1, len(PARAMS), 200, dtype)
    found = Sampled(requests, logits_BV, sampling)
    assert_same(found, requests, logits_BV, sampling)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered")
def test_rows_without_a_distribution_or_a_choice_are_told_from_the_others():
    sampling = GraphSampling((7,))
    requests = [request_of(row, {"top_k": 5} if row == 2 else {}) for row in range(6)]
    logits_BV = logits_of(2, 6, 200, torch.float32)
    logits_BV[1, 150] = torch.nan
    logits_BV[2, 3] = torch.inf
    logits_BV[3] = -torch.inf
    # Only a token is left that is never sampled; and one that may be.
    logits_BV[4:] = -torch.inf
    logits_BV[4, 7] = logits_BV[5, 199] = 1.0
    found = Sampled(requests, logits_BV, sampling)
    is_sound = found.results_B6[:, 2] * found.results_B6[:, 3]
    assert is_sound.tolist() == [1, 0, 0, 0, 0, 1]
    assert_same(found, requests, logits_BV, sampling)


def test_a_step_writes_the_next_ones_inputs():
    take_two_steps()


def take_two_steps():
    """The second step continues from the first; another sampler that loads the tokens agrees."""
    params = [{"top_k": 9, "temperature": 0.7}, {}, {"top_p": 0.9}]
    requests = [request_of(row, one) for row, one in enumerate(params)]
    logits_BV = logits_of(3, 3, 200, torch.float32) * 3
    first = Sampled(requests, logits_BV)
    for request, token in zip(requests, first.column(0).long().tolist(), strict=True):
        request.append(token, 0.0, 0)
    first.sampler.sample(logits_BV, first.inputs.tensor)
    loaded = Sampled(requests, logits_BV)
    torch.testing.assert_close(first.sampler.results[:3], loaded.results_B6)


def test_a_row_whose_logits_are_kept_is_not_sampled():
    sampler, inputs = GraphSampler(4, CPU, GraphSampling()), GraphInputs(4, CPU)
    logits_BV = logits_of(4, 2, 200, torch.bfloat16)
    inputs.load(batch_of([5, 6], [3, 4]), 3)
    sampler.sample(logits_BV, inputs.tensor)
    assert torch.equal(sampler.kept(2), logits_BV)
    assert inputs.tensor[Line.LENGTH].tolist() == [3, 4, 0, 0]


FAULTS = {
    "a part's sum is doubled": (
        "SUM * num_parts, total)\n\n\n",
        "SUM * num_parts, total * 2.0)\n\n\n",
    ),
    "top-k keeps one more": ("top_k.to(tl.float32), False", "top_k.to(tl.float32) + 1.0, False"),
    "top-p is left out": ("mass * top_p, True", "mass, True"),
    "min-p is left out": (
        "tl.maximum(least, _number(lines, line_stride, row, MIN_P_LINE))",
        "least",
    ),
    "kept tokens are not summed": (
        "KEPT_SUM * num_parts + part, total)",
        "KEPT_SUM * num_parts + part, 1.0)",
    ),
    "every draw has the same number": ("whole * _uniform(lines, line_stride, row)", "whole * 0.5"),
    "a token is sampled that never is": ("ids == tl.load(never + place)", "ids < 0"),
    "a log-probability is not normalised": ("logprob -= tl.log(", "logprob -= 0 * tl.log("),
    "the next draw has the same number": ("row, index + 1)", "row, index)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_kernel_with_a_fault_is_refused(fault, tmp_path, monkeypatch):
    sampling = GraphSampling((0, 130), PROCESSED)
    params = [PARAMS[row] for row in (1, 2, 3, 5, 8, 9)]
    requests = [request_of(row, one) for row, one in enumerate(params)]
    logits_BV = logits_of(1, len(params), 200, torch.float32)

    def compare():
        assert_same(Sampled(requests, logits_BV, sampling), requests, logits_BV, sampling)
        take_two_steps()

    if fault is None:
        compare()
        return
    from triton.runtime.errors import InterpreterError

    faulty = with_fault(cuda_graphs.sampling_kernels, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(cuda_graphs, "sampling_kernels", faulty)
    faulty.CHUNK = CHUNK
    # Numbers that are none are refused before any comparison.
    with pytest.raises((AssertionError, InterpreterError)):
        compare()
