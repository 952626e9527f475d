"""The smallest Triton kernel with a mask: what `preflight` compiles for a card."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(source, target, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < count
    tl.store(target + places, 2 * tl.load(source + places, mask=is_inside), mask=is_inside)


def double(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    """Write twice the first `count` numbers of a tensor into another of its shape."""
    block = 256
    _double_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block)
