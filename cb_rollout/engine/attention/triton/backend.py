"""Run a model's decode steps with Triton kernels that read the pages directly.

In a traced forward, products that have the same input and adjacent weights are joined: query, key
and value become one product, and so do gate and up. `weights.replica` places these weights next to
each other in one storage, so nothing is copied. Called by the thread that runs a decode step or
captures a CUDA graph.

B: rows. Of a grouped product: S: rows, G: groups, M: size of a row, N: of a result.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

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

# A tile of wider keys does not fit into the shared memory of every card.
LARGEST_HEAD = 256

# The types that tensor cores multiply.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def join_products(graph: fx.Graph, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join products, in place; the graph's last inputs are these weights.

    Returns:
        The weights, and after them the joined ones, which are views of the same storage.
    """
    inputs = graph.find_nodes(op="placeholder")
    first_weight = len(inputs) - len(weights)
    tensors = dict(zip(inputs[first_weight:], weights, strict=True))
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
    """Add a weight that spans these adjacent weights, and a graph input for it."""
    first = tensors[0].detach()
    num_outputs = sum(tensor.shape[0] for tensor in tensors)
    shape = (num_outputs, *first.shape[1:])
    joined.append(first.as_strided(shape, first.stride(), first.storage_offset()))
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(f"joined_{len(joined)}")
    node.meta["val"] = inductor.fake_weight(graph, joined[-1])
    return node


def _runs_of_neighbours(
    layers: Sequence[LinearNode], tensors: dict[fx.Node, torch.Tensor]
) -> list[list[LinearNode]]:
    """Split layers with the same input into runs whose weights are adjacent in memory."""
    runs: list[list[LinearNode]] = []
    for layer in layers:
        if runs and _follows_layer(runs[-1][-1], layer, tensors):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _follows_layer(
    before: LinearNode, after: LinearNode, tensors: dict[fx.Node, torch.Tensor]
) -> bool:
    """Return whether each weight of a layer directly follows another layer's weight in memory."""
    for weight, following in zip(before.weights, after.weights, strict=True):
        if not _follows(tensors[weight], tensors[following]):
            return False
    return True


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether a weight starts where another ends, with the same number of columns."""
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
    """Replace layers by slices of one product with all their weights."""
    first = layers[0]
    spanning: list[fx.Node] = []
    # The weights first, and the biases if there are any.
    for place in range(len(first.weights)):
        neighbours = [tensors[layer.weights[place]] for layer in layers]
        spanning.append(_spanning(graph, neighbours, joined))
    weight, *biases = spanning
    with graph.inserting_before(first.node):
        transposed = inductor.call_function(graph, aten.t.default, weight)
        whole = inductor.call_function(graph, first.node.target, *biases, first.rows, transposed)
    replace_by_columns(graph, layers, whole)


TRACING = Tracing(
    # Tiles are chosen for this many rows, whose step takes time beyond reading weights.
    num_rows=251,
    # Most rows first: inductor measures tile sizes in the first run, and keeps the fastest.
    tried_rows=(251, 64, 3, 1),
    rewrite=join_products,
    simplify=None,
)


@dataclass(slots=True)
class KernelForms:
    """The attention kernel variants that may run; a failed proof removes one."""

    can_cut: bool = True
    """A row's keys may be cut into stretches, whose results are then combined."""
    can_share: bool = True
    """Rows may read a shared prompt together; keys are then cut too."""


class TritonBackend(AttentionBackend):
    """Run decode steps on a CUDA device without gathering."""

    name = "triton"
    device_type = "cuda"
    tracing = TRACING
    needs_keys = False
    saves_at_end = False

    @staticmethod
    def obstacle(device: torch.device, layout: CacheLayout | None) -> str | None:
        obstacle = device_obstacle(device)
        if obstacle is not None:
            return obstacle
        return unsupported_states(layout, DTYPES, LARGEST_HEAD)

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        # Triton is an optional dependency.
        from cb_rollout.engine.attention.triton.launch import TritonPagedAttention, grouped_product
        from cb_rollout.engine.attention.triton.states import addressed_layers

        self.layout = layout
        self._addressed_layers = addressed_layers
        self._create_attention = TritonPagedAttention
        self._grouped_product = grouped_product
        num_addresses = 2 * len(layout.layers) + 2
        num_addresses += sum(len(layer.per_sequence) for layer in layout.layers)
        self.addresses = torch.zeros(num_addresses, dtype=torch.int64, device=device)
        """`AttentionMetadata.addresses`; all zero until `find`."""
        self._written: list[int] = []
        self._rows_per_tile = {layer.index: 1 for layer in self.cache.paged}
        num_processors = 1
        if device.type == "cuda":
            num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_key_heads = max((layer.num_key_heads for layer in self.cache.paged), default=1)
        self.num_stretches = max_stretches(num_key_heads, num_processors)
        """Stretches that all keys of a step are cut into, besides one for each row."""
        self.forms = KernelForms()

    def prepare(self, batch: ForwardBatch) -> DecodeInputs:
        lengths_B = self._integers(batch.lengths)
        metadata = AttentionMetadata(
            addresses=self.find(batch.cache, batch.table),
            block_size=batch.table.block_size,
            table_rows_B=self._integers(batch.table_rows),
            lengths_B=lengths_B,
            num_stretches=self.num_stretches if self.is_cut(batch.lengths) else 0,
        )
        tokens_B1 = devices.to_device(batch.new_tokens, self.cache.device)
        positions_B1 = lengths_B.long()[:, None] - 1
        if batch.position_offsets:
            positions_B1 += devices.to_device(batch.position_offsets, self.cache.device)[:, None]
        return self.inputs(tokens_B1, positions_B1, metadata)

    def inputs(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, metadata: AttentionMetadata
    ) -> DecodeInputs:
        """Return a forward's inputs; kernels find pages and states through `metadata.addresses`."""
        attention = self._create_attention(metadata, self._rows_per_tile)
        return DecodeInputs(
            cache=self.cache,
            attend=attention.attend,
            tokens_B1=tokens_B1,
            positions_B1=positions_B1,
            table_rows_B=metadata.table_rows_B,
            recurrent=self._addressed_layers(self.layout, metadata),
            grouped_product=self._grouped_product,
        )

    def find(self, cache: PagedCache, table: BlockTable) -> torch.Tensor:
        """Return a tensor, at a fixed address, of the addresses of table, pages and states."""
        blocks = table.blocks
        addresses = [blocks.data_ptr(), blocks.shape[1], *cache.addresses]
        if addresses != self._written:
            self.addresses.copy_(devices.to_device(addresses, self.cache.device))
            self._written = addresses
        return self.addresses

    @property
    def rows_per_tile(self) -> int:
        """Maximum number of rows that read a shared prompt together, in every layer."""
        return min(self._rows_per_tile.values(), default=1)

    @property
    def rows_that_share(self) -> int:
        """Maximum number of rows that read a shared prompt together in a captured step; 0: none."""
        return self.rows_per_tile if self.forms.can_share else 0

    def is_cut(self, lengths: Sequence[int]) -> bool:
        """Return whether to cut any row of these lengths into stretches."""
        return self.forms.can_cut and is_cut(lengths, self.num_stretches)

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
    """Return why a CUDA device cannot run the kernels; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        got = ".".join(map(str, capability))
        return f"the kernels need compute capability {needed}, and the device has {got}"
    return None
