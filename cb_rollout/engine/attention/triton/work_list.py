"""Cut a decode step's keys into stretches, on the device: one program then attends over each.

A stretch is as long as keeps all processors busy, for the keys that all rows have together. So one
long row among short ones is cut alone, and a prompt that one group shares is cut as well. A list of
fixed size holds the stretches, so a captured CUDA graph stays valid while rows grow. Imports
Triton, so nothing imports it at the top.

B: rows, T: shared tiles, O: most stretches of rows' own keys, S: most of shared prompts.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# Triton types compile-time arguments as `constexpr`, but takes plain values and launch options.

from dataclasses import dataclass

import torch
import triton

from cb_rollout.engine.attention.backend import AttentionMetadata
from cb_rollout.engine.attention.triton.kernels import cut_kernel


@dataclass(frozen=True, slots=True)
class WorkList:
    """The stretches of one step, for the layers of one window; all tensors are int32."""

    sizes: torch.Tensor
    """Keys of a stretch of rows' own keys, and of a stretch of shared prompts."""
    own_O: torch.Tensor
    """Items: row x `MAX_SPLITS` + the stretch's number; -1: there is no such stretch."""
    shared_S: torch.Tensor
    """Items of tiles, in the same way."""
    first_parts: torch.Tensor
    """`[B + 1]`: each row's first part among all partial outputs, and the end of the last."""
    own_counts_B: torch.Tensor
    """Parts of each row's own keys, which stand before those of its shared prompt."""
    max_parts: int
    """Most parts of all rows together."""


def cut(metadata: AttentionMetadata, window: int | None) -> WorkList:
    """Cut the keys of a step, by one launch.

    Args:
        metadata: the step; `num_stretches` is not 0.
        window: newest tokens that the layers see; None: all.
    """
    lengths_B = metadata.lengths_B
    B, extra = lengths_B.shape[0], metadata.num_stretches
    has_shared = metadata.shared_B is not None
    T = 0 if metadata.first_T is None else metadata.first_T.shape[0]
    num_shared = T + extra if has_shared else 0
    # A tile of full size has a part of each of its rows in every stretch.
    max_parts = B + extra + (B + metadata.rows_per_tile * extra if has_shared else 0)
    work = WorkList(
        lengths_B.new_empty(2),
        lengths_B.new_empty(B + extra),
        lengths_B.new_empty(num_shared),
        lengths_B.new_empty(B + 1),
        lengths_B.new_empty(B),
        max_parts,
    )
    cut_kernel[(1,)](
        lengths_B,
        metadata.shared_B if has_shared else lengths_B,
        metadata.first_T if has_shared else lengths_B,
        metadata.count_T if has_shared else lengths_B,
        work.sizes,
        work.own_O,
        work.shared_S if has_shared else lengths_B,
        work.first_parts,
        work.own_counts_B,
        B,
        T,
        B + extra,
        num_shared,
        extra,
        metadata.least_stretch,
        metadata.stretch_interval,
        int(window or 0),
        HAS_SHARED=has_shared,
        HAS_WINDOW=window is not None,
        ROWS_WIDTH=triton.next_power_of_2(B),
        TILES_WIDTH=triton.next_power_of_2(max(1, T)),
        OWN_WIDTH=triton.next_power_of_2(B + extra),
        SHARED_WIDTH=triton.next_power_of_2(max(1, num_shared)),
        num_warps=4,
    )
    return work
