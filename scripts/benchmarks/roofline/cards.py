"""Model the time of a step on a card: a roofline of each kernel, and the cost of launching it.

The rates are those of the data sheets, which no kernel reaches, so modelled times are lower bounds.
A kernel's tensors come from the card's memory, as if there were no cache.
"""

from collections import Counter
from dataclasses import dataclass

from benchmarks.roofline.kernel_recorder import Kernel
from benchmarks.roofline.steps import Step

# Time between two kernels of a CUDA graph in which the device does nothing, on an H100: Hazy
# Research, "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", May 2025.
KERNEL_SECONDS = 1.3e-6

# Time of the host for a launch outside a graph, in a forward that waits for the host: 5.0 ms a
# step of about 1,300 launches, by a transformers model on an H100 (deepspeedai/DeepSpeed#8271).
HOST_SECONDS = 5.0e-3 / 1300


@dataclass(frozen=True)
class Card:
    """A card's rates and sizes, from NVIDIA's data sheet of the SXM form."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """In bfloat16, with float32 sums, without sparsity."""
    num_processors: int
    """Streaming multiprocessors."""
    memory_bytes: float

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel that reaches the roofline."""
        return max(
            kernel.num_bytes / self.bytes_per_second, kernel.num_flops / self.flops_per_second
        )

    def step_seconds(self, step: Step) -> float:
        """Return the modelled time of a step.

        Outside a graph the host launches ahead of the device, so the slower of the two counts.
        """
        host_seconds = step.eager.total() * HOST_SECONDS
        return self._device_seconds(step.graphed) + max(
            host_seconds, self._device_seconds(step.eager)
        )

    def _device_seconds(self, kernels: Counter[Kernel]) -> float:
        return sum(n * (KERNEL_SECONDS + self.kernel_seconds(k)) for k, n in kernels.items())


CARDS = (
    # "NVIDIA A100 Tensor Core GPU" data sheet, A100 80GB SXM.
    Card("A100", 2.039e12, 312e12, 108, 80e9),
    # "NVIDIA H100 Tensor Core GPU" data sheet, H100 SXM.
    Card("H100", 3.35e12, 989e12, 132, 80e9),
    # "NVIDIA H200 Tensor Core GPU" data sheet, H200 SXM.
    Card("H200", 4.8e12, 989e12, 132, 141e9),
)
