"""Run decode steps of one model by Triton kernels that read the pages directly.

In the graph of a traced forward, products of the same rows by neighbouring weights are joined:
query, key and value are then one product, and so are gate and up. Neighbours are weights that lie
one after the other in one storage, as `weights.replica` places them; nothing is copied. Called by
the thread that runs a decode step, and by captures of CUDA graphs.

B: rows. Of a grouped product: S: rows, G: groups, M: size of a row, N: of a result.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import fx

from cb_rollout.compat import inductor
from cb_rollout.compat.moe import waits_for_groups
from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.decode_cache import DecodeInputs, unsupported_states
from cb_rollout.engine.attention.joined_products import (
    LinearNode,
    linear_nodes,
    replace_by_columns,
)
from cb_rollout.engine.attention.shared_prefix import (
    AttentionMetadata,
    is_cut,
    max_stretches,
)
from cb_rollout.engine.attention.traced_forward import Tracing
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices

aten = torch.ops.aten

# Ampere, the first whose tensor cores take bfloat16, and that copies memory asynchronously.
LEAST_CAPABILITY = (8, 0)

# A tile of longer keys does not fit the shared memory of every card.
LARGEST_HEAD = 256

# The types that tensor cores multiply.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def join_products(graph: fx.Graph, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join products, in place; the graph's last inputs are these weights.

    Returns:
        The weights, and after them the joined ones, which are views of the same storage.
    """
    inputs = graph.find_nodes(op="placeholder")
    tensors = dict(zip(inputs[-len(weights) :], weights, strict=True)) if weights else {}
    joined: list[torch.Tensor] = []
    for layers in linear_nodes(graph):
        held = [layer for layer in layers if tensors.keys() >= set(layer.weights)]
        for neighbours in _runs_of_neighbours(held, tensors):
            if len(neighbours) > 1:
                _join(graph, neighbours, tensors, joined)
    return [*weights, *joined]


def _spanning(
    graph: fx.Graph, tensors: Sequence[torch.Tensor], joined: list[torch.Tensor]
) -> fx.Node:
    """Add an input of a weight that spans these neighbours, and the weight to the joined ones."""
    first = tensors[0].detach()
    shape = sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]
    joined.append(first.as_strided(shape, first.stride(), first.storage_offset()))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(f"joined_{len(joined)}")
    node.meta["val"] = inductor.fake_weight(graph, joined[-1])
    return node


def _runs_of_neighbours(
    layers: Sequence[LinearNode], tensors: dict[fx.Node, torch.Tensor]
) -> list[list[LinearNode]]:
    """Split layers of the same rows where a weight does not follow the one before it."""
    runs: list[list[LinearNode]] = []
    for layer in layers:
        pairs = zip(runs[-1][-1].weights, layer.weights, strict=True) if runs else ()
        if runs and all(_follows(tensors[weight], tensors[other]) for weight, other in pairs):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a contiguous weight begins where another one ends, and has equal columns."""
    return (
        before.untyped_storage()._cdata == after.untyped_storage()._cdata
        and before.dtype == after.dtype
        and before.shape[1:] == after.shape[1:]
        and before.is_contiguous()
        and after.is_contiguous()
        and before.storage_offset() + before.numel() == after.storage_offset()
    )


def _join(
    graph: fx.Graph,
    layers: Sequence[LinearNode],
    tensors: dict[fx.Node, torch.Tensor],
    joined: list[torch.Tensor],
) -> None:
    """Replace layers by slices of one product of all their weights."""
    first = layers[0]
    wholes = [
        _spanning(graph, [tensors[weight] for weight in weights], joined)
        for weights in zip(*(layer.weights for layer in layers), strict=True)
    ]
    with graph.inserting_before(first.node):
        transposed = inductor.call_function(graph, aten.t.default, wholes[0])
        target = first.node.target
        whole = inductor.call_function(graph, target, *wholes[1:], first.rows, transposed)
    replace_by_columns(graph, layers, whole)


TRACING = Tracing(
    # Tiles are chosen for so many rows, where a step's time is no longer reading weights alone.
    num_rows=251,
    tried_rows=(1, 3, 64, 251),
    rewrite=join_products,
    simplify=None,
)


class TritonBackend(AttentionBackend):
    """Run decode steps with no gather, on a CUDA device."""

    name = "triton"
    device_type = "cuda"
    tracing = TRACING
    needs_keys = saves_at_end = False

    @staticmethod
    def obstacle(device: torch.device, layout: CacheLayout | None) -> str | None:
        return device_obstacle(device) or unsupported_states(layout, DTYPES, LARGEST_HEAD)

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        # Triton is an optional dependency.
        from cb_rollout.engine.attention.triton.launch import TritonPagedAttention, grouped_product
        from cb_rollout.engine.attention.triton.states import addressed_layers

        self._layout, self._addressed_layers = layout, addressed_layers
        self._create_attention = TritonPagedAttention
        self._grouped_product = grouped_product
        num_addresses = 2 * len(layout.layers) + 2
        num_addresses += sum(len(layer.per_sequence) for layer in layout.layers)
        self.addresses = torch.zeros(num_addresses, dtype=torch.int64, device=device)
        """`AttentionMetadata.addresses`; all zero until `find`."""
        self._written: list[int] = []
        self._rows_per_tile = dict.fromkeys((layer.index for layer in self.cache.paged), 1)
        num_processors = 1
        if device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_key_heads = max((layer.num_key_heads for layer in self.cache.paged), default=1)
        self.num_stretches = max_stretches(num_key_heads, num_processors)
        """Stretches that all keys of a step are cut into, beside one for each row."""

    def prepare(self, batch: ForwardBatch) -> DecodeInputs:
        lengths_B = self._integers(batch.lengths)
        metadata = AttentionMetadata(
            self.find(batch.cache, batch.table),
            batch.table.block_size,
            self._integers(batch.table_rows),
            lengths_B,
            self.num_stretches if self.is_cut(batch.lengths) else 0,
        )
        tokens_B1 = devices.to_device(batch.new_tokens, self.cache.device)
        positions_B1 = lengths_B.long()[:, None] - 1
        if batch.position_offsets:
            positions_B1 += devices.to_device(batch.position_offsets, self.cache.device)[:, None]
        return self.inputs(tokens_B1, positions_B1, metadata)

    def inputs(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, metadata: AttentionMetadata
    ) -> DecodeInputs:
        """Return the inputs of a forward; kernels find pages and states by `metadata.addresses`."""
        layers = self._addressed_layers(self._layout, metadata)
        attend = self._create_attention(metadata, self._rows_per_tile).attend
        rows_B, product = metadata.table_rows_B, self._grouped_product
        return DecodeInputs(self.cache, attend, tokens_B1, positions_B1, rows_B, layers, product)

    def find(self, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Return the current addresses of table, pages and states, in a tensor that never moves."""
        blocks = table.blocks
        addresses = [blocks.data_ptr(), blocks.shape[1], *cache.addresses]
        if addresses != self._written:
            self.addresses.copy_(devices.to_device(addresses, self.cache.device))
            self._written = addresses
        return self.addresses

    @property
    def rows_per_tile(self) -> int:
        """Most rows that read a shared prompt together, in every layer."""
        return min(self._rows_per_tile.values(), default=1)

    def is_cut(self, lengths: Sequence[int]) -> bool:
        """Return whether any row of these lengths is worth cutting."""
        return is_cut(lengths, self.num_stretches)

    def _integers(self, values: Sequence[int]) -> torch.Tensor:
        return devices.to_device(values, self.cache.device, torch.int32)


def _multiply_groups(
    rows_SM: torch.Tensor, weights_GMN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Multiply the experts of a traced forward, without waiting for the device."""
    if not waits_for_groups(weights_GMN):
        return inductor.grouped_product(rows_SM, weights_GMN, ends_G)
    from cb_rollout.engine.attention.triton.launch import grouped_product

    return grouped_product(rows_SM.to(weights_GMN.dtype), weights_GMN, ends_G)


torch.library.impl(inductor.GROUPED, "CUDA", _multiply_groups)


def device_obstacle(device: torch.device) -> str | None:
    """Return why a CUDA device cannot run the kernels; None: it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, got = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, capability))
        return f"the kernels need compute capability {needed}, and the device has {got}"
    return None
