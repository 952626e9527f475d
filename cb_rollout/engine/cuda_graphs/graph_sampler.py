"""Sample inside captured decode steps: the rows' parameters, and the kernels' launch.

Parameters of rows are lines of `GraphInputs`. Called by the thread that steps the engine.

B: rows of a graph, N: most rows, V: vocabulary, U: different parameters.
"""

# pyright: reportCallIssue=false
# Triton's kernels take launch options besides their arguments.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cb_rollout.config.enums import LogprobsMode
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.cuda_graphs.inputs import Line
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request, distinct_params
from cb_rollout.engine.sampling.truncation import LEAST_TOP_P

# Columns of the results: token id, log-probability, whether the logits make a distribution, whether
# a token is left to sample, and of a truncated row the logarithm of the kept probability and the
# number of kept tokens.
NUM_RESULTS = 6


@dataclass(frozen=True, slots=True)
class GraphSampling:
    """The sampling settings that all graphs of an engine share."""

    never_sampled: tuple[int, ...] = ()
    """Token ids of the vocabulary that are never sampled."""
    mode: LogprobsMode = LogprobsMode.POLICY
    """The distribution that log-probabilities are taken from."""
    keeps_ids: bool = False
    """True if the token ids that truncation kept are recorded, which no graph does."""

    def can_sample(self, params: SamplingParams) -> bool:
        return params.can_be_graphed and not (self.keeps_ids and params.is_truncated)


PLAIN_SAMPLING = GraphSampling()


def _numbers(params: SamplingParams) -> dict[Line, float]:
    """Return a request's parameters as the kernels read them; unused ones are neutral."""
    numbers: dict[Line, float] = {
        Line.IS_GREEDY: params.is_greedy,
        Line.TEMPERATURE: 1.0,
        Line.TOP_K: 0,
        Line.TOP_P: 1.0,
        Line.MIN_P: 0.0,
    }
    if not params.is_greedy:
        numbers[Line.TEMPERATURE] = params.temperature
    if params.is_truncated:
        numbers[Line.TOP_K] = params.top_k
        numbers[Line.TOP_P] = max(params.top_p, LEAST_TOP_P)
        numbers[Line.MIN_P] = params.min_p
    return numbers


class _Buffers(NamedTuple):
    """Buffers that graphs write between their kernels."""

    kept_NV: torch.Tensor
    """In the logits' dtype: the logits of rows that keep them."""
    measures: torch.Tensor
    """float32, `[N, NUM_MEASURES, parts]`."""
    limits: torch.Tensor
    """float32, `[N, NUM_LIMITS]`."""


class GraphSampler:
    """Samples the rows of every graph of an engine."""

    def __init__(self, max_rows: int, device: torch.device, sampling: GraphSampling) -> None:
        self.sampling = sampling
        self.results = torch.zeros(max_rows, NUM_RESULTS, dtype=torch.float64, device=device)
        """float64, `[N, NUM_RESULTS]`."""
        self._never_sampled = devices.to_device(sampling.never_sampled or (0,), device)
        # Shared by all graphs, because separate buffers would all stay in the memory pool.
        self._buffers: _Buffers | None = None

    def forget(self) -> None:
        """Drop the buffers that graphs write, after the graphs."""
        self._buffers = None

    def kept(self, num_rows: int) -> torch.Tensor:
        """Return the logits of a step that kept them, in the model's dtype, `[num_rows, V]`."""
        assert self._buffers is not None, "no step has run"
        return self._buffers.kept_NV[:num_rows]

    def lines(self, requests: Sequence[Request]) -> Mapping[Line, Sequence[float] | np.ndarray]:
        """Return the lines of `GraphInputs` that say how each row is sampled."""
        # Most requests share their parameters: each kind is converted once.
        index_of_params: dict[int, int] = {}
        numbers: list[list[float]] = []
        names: list[Line] = []
        for params in distinct_params(requests):
            of_params = _numbers(params)
            names = list(of_params)
            index_of_params[id(params)] = len(numbers)
            numbers.append(list(of_params.values()))
        numbers_UC = np.array(numbers)
        indices_B = [index_of_params[id(request.params)] for request in requests]
        numbers_BC = numbers_UC[indices_B]

        lines: dict[Line, Sequence[float] | np.ndarray] = {}
        for name, column_B in zip(names, numbers_BC.T, strict=True):
            lines[name] = column_B
        lines[Line.SEED] = [request.seed for request in requests]
        lines[Line.INDEX] = [len(r.token_ids) - len(r.prompt_ids) for r in requests]
        return lines

    def sample(self, logits_BV: torch.Tensor, lines_LN: torch.Tensor) -> None:
        """Sample each row, and write the results and the next step's inputs; or keep the logits.

        Of the lines of `GraphInputs`, the first B rows are read.
        """
        # Triton is an optional dependency.
        from cb_rollout.engine.cuda_graphs import sampling_kernels as kernels

        B, V = logits_BV.shape
        N = lines_LN.shape[1]
        num_parts = -(-V // kernels.CHUNK)
        if self._buffers is None:
            # Allocated in a run before the capture, outside of its pool.
            self._buffers = _Buffers(
                kept_NV=logits_BV.new_empty(N, V),
                measures=logits_BV.new_empty(N, 5, num_parts, dtype=torch.float32),
                limits=logits_BV.new_empty(N, 3, dtype=torch.float32),
            )
        buffers = self._buffers
        if logits_BV.stride(1) != 1:
            logits_BV = logits_BV.contiguous()
        # What all three kernels take.
        shared: dict[str, Any] = {
            "logits": logits_BV,
            "measures": buffers.measures,
            "lines": lines_LN,
            "never": self._never_sampled,
            "line_stride": N,
            "logits_stride": logits_BV.stride(0),
            "vocab_size": V,
            "num_parts": num_parts,
            "NUM_NEVER": len(self.sampling.never_sampled),
            "CHUNK": kernels.CHUNK,
        }
        parts_width = 1 << (num_parts - 1).bit_length()
        kernels.measure_kernel[(B, num_parts)](kept=buffers.kept_NV, **shared, num_warps=8)
        kernels.truncate_kernel[(B,)](
            limits=buffers.limits, **shared, PARTS_WIDTH=parts_width, num_warps=16
        )
        kernels.draw_kernel[(B,)](
            limits=buffers.limits,
            results=self.results,
            **shared,
            IS_PROCESSED=self.sampling.mode == LogprobsMode.PROCESSED,
            PARTS_WIDTH=parts_width,
            num_warps=16,
        )
