"""Sample inside captured decode steps: the rows' parameters, and the kernels' launch.

Parameters of rows are lines of `GraphInputs`. Called by the thread that steps the engine.

B: rows of a graph, N: most rows, V: vocabulary, U: different parameters.
"""

# pyright: reportCallIssue=false
# Triton's kernels take launch options beside their arguments.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    is_greedy, is_truncated = params.is_greedy, params.is_truncated
    return {
        Line.IS_GREEDY: is_greedy,
        Line.TEMPERATURE: 1.0 if is_greedy else params.temperature,
        Line.TOP_K: params.top_k if is_truncated else 0,
        Line.TOP_P: max(params.top_p, LEAST_TOP_P) if is_truncated else 1.0,
        Line.MIN_P: params.min_p if is_truncated else 0.0,
    }


class GraphSampler:
    """Samples the rows of every graph of an engine."""

    def __init__(self, max_rows: int, device: torch.device, sampling: GraphSampling) -> None:
        self.sampling = sampling
        self.results = torch.zeros(max_rows, NUM_RESULTS, dtype=torch.float64, device=device)
        """float64, `[N, NUM_RESULTS]`."""
        self._never_sampled = devices.to_device(sampling.never_sampled or (0,), device)
        # Of all graphs, because each graph's own would stay in the memory pool beside the others'.
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drop the buffers that graphs write, after the graphs."""
        self._buffers = None

    def kept(self, num_rows: int) -> torch.Tensor:
        """Return the logits of a step that kept them, in the model's dtype, `[num_rows, V]`."""
        assert self._buffers is not None, "no step has run"
        return self._buffers[0][:num_rows]

    def lines(self, requests: Sequence[Request]) -> Mapping[Line, Sequence[float] | np.ndarray]:
        distinct = distinct_params(requests)
        indices = {id(params): index for index, params in enumerate(distinct)}
        numbers = [_numbers(params) for params in distinct]
        numbers_UC = np.array([[*of_params.values()] for of_params in numbers])
        numbers_BC = numbers_UC[[indices[id(request.params)] for request in requests]]
        return dict(zip(numbers[0], numbers_BC.T, strict=True)) | {
            Line.SEED: [request.seed for request in requests],
            Line.INDEX: [len(r.token_ids) - len(r.prompt_ids) for r in requests],
        }

    def sample(self, logits_BV: torch.Tensor, lines_LN: torch.Tensor) -> None:
        """Sample each row, and write the results and the next step's inputs; or keep the logits.

        Of the lines of `GraphInputs`, the first B rows are read.
        """
        # Triton is an optional dependency.
        from cb_rollout.engine.cuda_graphs import sampling_kernels as kernels

        (B, V), N = logits_BV.shape, lines_LN.shape[1]
        num_parts = -(-V // kernels.CHUNK)
        if self._buffers is None:
            # In a run before a capture: outside of its pool.
            new = partial(logits_BV.new_empty, dtype=torch.float32)
            measures, limits = new(N, 5, num_parts), new(N, 3)
            self._buffers = logits_BV.new_empty(N, V), measures, limits
        kept_NV, measures, limits = self._buffers
        if logits_BV.stride(1) != 1:
            logits_BV = logits_BV.contiguous()
        rows = lines_LN, self._never_sampled, N, logits_BV.stride(0), V, num_parts
        never = len(self.sampling.never_sampled)
        fixed: dict[str, Any] = {"NUM_NEVER": never, "CHUNK": kernels.CHUNK}
        kernels.measure_kernel[(B, num_parts)](
            logits_BV, kept_NV, measures, *rows, **fixed, num_warps=8
        )
        fixed["PARTS_WIDTH"] = 1 << (num_parts - 1).bit_length()
        inputs = logits_BV, measures, limits
        kernels.truncate_kernel[(B,)](*inputs, *rows, **fixed, num_warps=16)
        fixed["IS_PROCESSED"] = self.sampling.mode == LogprobsMode.PROCESSED
        kernels.draw_kernel[(B,)](*inputs, self.results, *rows, **fixed, num_warps=16)
