"""List the kernels that vLLM 0.32.0 launches for a Qwen3 model on a CUDA device, by hand.

Read from its source, not traced. Paths are below its package:

- `config/vllm.py`: optimization level 2, the default, has full CUDA graphs for decode steps, and
  inductor in place of the custom operators; `enable_qk_norm_rope_fusion` is off.
- `model_executor/models/`, `qwen3.py` and `qwen2.py`: one product for query, key and value, and one
  for gate and up.
- `v1/attention/backends/flash_attn.py`: `reshape_and_cache_flash`, then `flash_attn_varlen_func`.
- `v1/worker/gpu/`: inputs, head and sampling run outside the graph.

Inductor's kernels are counted as one for each norm, rotation and activation; it may fuse more.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.roofline.kernel_recorder import Kernel
from benchmarks.roofline.steps import Rows, Step, Traced

VERSION = "0.32.0"

# Bytes of a number in bfloat16.
BF16 = 2

# Most tokens of a forward that runs as a graph before Blackwell (`max_cudagraph_capture_size`).
MAX_CAPTURED_TOKENS = 512

# Small Triton kernels of a step (`input_batch.py`, `block_table.py`): positions and lengths, token
# ids, block tables, slots, numbers of sampled tokens, the update after sampling; and flash
# attention's schedule.
BOOKKEEPING = 8


class LayerSizes(NamedTuple):
    """Numbers of a layer's states; `queries` and `keys` of all heads."""

    hidden: int
    queries: int
    keys: int
    inner: int
    vocab: int

    @classmethod
    def of(cls, shape: dict[str, Any]) -> "LayerSizes":
        """Read the sizes from the arguments of `AutoConfig.for_model`."""
        head = shape["head_dim"]
        return cls(
            shape["hidden_size"],
            shape["num_attention_heads"] * head,
            shape["num_key_value_heads"] * head,
            shape["intermediate_size"],
            shape["vocab_size"],
        )


def product(rows: int, inputs: int, outputs: int) -> Kernel:
    """Return a matrix product in bfloat16."""
    num_bytes = BF16 * (rows * inputs + inputs * outputs + rows * outputs)
    return Kernel("mm", num_bytes, 2 * rows * inputs * outputs)


def moving(name: str, num_elements: int) -> Kernel:
    """Return a kernel that reads and writes so many elements of bfloat16, together."""
    return Kernel(name, BF16 * num_elements, 0)


def _layer(sizes: LayerSizes, rows: Rows, num_new: int) -> Iterator[Kernel]:
    """List the kernels of one layer for `num_new` new tokens of each row."""
    hidden, queries, keys, inner, _ = sizes
    tokens = rows.num_rows * num_new
    yield moving("add and rms_norm", 4 * tokens * hidden)
    yield product(tokens, hidden, queries + 2 * keys)
    for name in ("rms_norm", "rotary_embedding"):
        yield moving(name, 2 * tokens * queries)
        yield moving(name, 2 * tokens * keys)
    yield moving("reshape_and_cache_flash", 4 * tokens * keys)
    # A new token of a prefill sees half of the prompt on average.
    seen = rows.num_tokens if num_new == 1 else rows.num_tokens / 2
    moved = BF16 * (2 * tokens * queries + 2 * rows.num_rows * rows.num_tokens * keys)
    yield Kernel("flash_attn_varlen_func", moved, int(4 * tokens * seen * queries))
    yield product(tokens, queries, hidden)
    yield moving("add and rms_norm", 4 * tokens * hidden)
    yield product(tokens, hidden, 2 * inner)
    yield moving("silu and mul", 3 * tokens * inner)
    yield product(tokens, inner, hidden)


def _end(sizes: LayerSizes, rows: Rows) -> Iterator[Kernel]:
    """List what runs after the layers, outside the graph: head, sampling, log-probabilities."""
    count = rows.num_rows
    logits = count * sizes.vocab
    for name in ("logits_indices", "positions", "input_ids"):
        yield moving(name, 2 * count * (sizes.hidden if name == "logits_indices" else 4))
    yield product(count, sizes.hidden, sizes.vocab)
    # One maximum for each 1,024 logits.
    yield moving("_gumbel_sample_kernel", logits + 6 * logits // 1024)
    yield moving("argmax", 2 * logits // 1024)
    yield moving("gather", 4 * count)
    # The softmax reads the logits twice: for the maximum and for the sum.
    yield moving("_topk_log_softmax_kernel", 2 * logits)
    yield moving("_ranks_kernel", logits)
    yield from (moving("bookkeeping", 16 * count) for _ in range(BOOKKEEPING))


def vllm_step(shape: dict[str, Any], rows: Rows, *, is_decode: bool) -> Traced:
    """Return a decode step, or a prefill of whole prompts, at temperature 1 with log-probabilities.

    Args:
        shape: a Qwen3's arguments of `AutoConfig.for_model`.
        rows: the sequences.
        is_decode: one new token for each row; False: all tokens are new.
    """
    sizes, num_new = LayerSizes.of(shape), 1 if is_decode else rows.num_tokens
    tokens = rows.num_rows * num_new
    layer = Counter(_layer(sizes, rows, num_new))
    # The embedding and the last norm.
    num_layers = shape["num_hidden_layers"]
    body = Counter({moving("embedding and norm", 3 * tokens * sizes.hidden): 2})
    for kernel, count in layer.items():
        body[kernel] += num_layers * count
    end = Counter(_end(sizes, rows))
    if tokens <= MAX_CAPTURED_TOKENS:
        return Traced(Step(graphed=body, eager=end), Step(graphed=layer), num_layers)
    return Traced(Step(eager=body + end), Step(eager=layer), num_layers)
