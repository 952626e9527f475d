"""Run decode steps of one model on a CPU, by a C++ kernel that reads the pages directly.

The kernel is compiled once for each shape of a layer's states. The graph of a traced forward is
rewritten to cheap calls and products by C++ kernels. Called by the thread that runs a step.

B: rows, H: query heads, K: key heads, D: size of a key, E: size of a value, P: slots of the pages.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.backend import AttentionBackend
from cb_rollout.engine.attention.cpu.linear import (
    FEW_ROWS,
    MOST_ROWS,
    compile_kernels,
    linear,
)
from cb_rollout.engine.attention.cpu.regions import compile_regions
from cb_rollout.engine.attention.decode_cache import (
    AttentionSpec,
    DecodeInputs,
    DecodeLayer,
    UnsupportedAttentionError,
    unsupported_states,
)
from cb_rollout.engine.attention.joined_products import (
    RESHAPES,
    LinearNode,
    linear_nodes,
    replace_by_columns,
)
from cb_rollout.engine.attention.traced_forward import Tracing, call_attention
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache, PagedLayer
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.kernels import TYPES, kernel, proof_of, with_unit_stride
from cb_rollout.engine.numerics.signatures import States, Step

aten = torch.ops.aten

CPU = torch.device("cpu")

_LINEAR = torch.ops.cb_rollout.linear.default

# Calling torch's own functions takes half the time of calling operators.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.gelu.default: functional.gelu,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.silu.default: functional.silu,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.cb_rollout.attend.default: call_attention,
    torch.ops.cb_rollout.grouped_product.default: inductor.grouped_product,
    _LINEAR: linear,
}

METHODS: dict[Any, str] = {
    # The C++ kernels return contiguous tensors even for other inputs, where `view` might fail.
    aten._unsafe_view.default: "reshape",
    aten.expand.default: "expand",
    aten.sym_size.int: "size",
    aten.view.default: "reshape",
}


def replace_linear_layers(graph: fx.Graph, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the linear layers of a traced graph by `linear`, in place.

    Layers with the same rows, such as query, key and value, are one product.
    """
    for same_rows in linear_nodes(graph):
        # Layers whose weights are inputs of the graph.
        held: list[LinearNode] = []
        # Layers whose weights the forward computes, maybe after the first product.
        computed: list[LinearNode] = []
        for layer in same_rows:
            if layer.node.meta["val"].dtype not in TYPES:
                continue
            if all(weight.op == "placeholder" for weight in _before_autocast(layer)):
                held.append(layer)
            else:
                computed.append(layer)
        if held:
            _join_as_linear(graph, held)
        for layer in computed:
            _join_as_linear(graph, [layer])
    return weights


def _join_as_linear(graph: fx.Graph, layers: list[LinearNode]) -> None:
    """Replace layers of the same rows, all with a bias or none, by one call of `linear`."""
    weights_NK: list[fx.Node] = []
    biases_N: list[fx.Node] = []
    for layer in layers:
        weight, *bias = _before_autocast(layer)
        weights_NK.append(weight)
        biases_N += bias
    first = layers[0]
    with graph.inserting_before(first.node):
        product = inductor.call_function(
            graph, _LINEAR, first.rows, tuple(weights_NK), tuple(biases_N)
        )
    replace_by_columns(graph, layers, product)


def _before_autocast(layer: LinearNode) -> list[fx.Node]:
    """Return a layer's weight and bias before autocast casts them: `linear` rounds the weights."""
    nodes: list[fx.Node] = []
    for node in layer.weights:
        if node.target is aten._to_copy.default:
            nodes.append(node.all_input_nodes[0])
        else:
            nodes.append(node)
    return nodes


def simplify(graph: fx.Graph, is_compiled: bool) -> None:
    """Call the operators of a traced graph in the cheapest way, in place, or compile regions."""
    _join_reshapes(graph)
    graph.eliminate_dead_code()
    if is_compiled:
        compile_regions(graph)
    for node in graph.nodes:
        if node.target is aten.slice.Tensor:
            _narrow(node)
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.target in METHODS:
            node.op = "call_method"
            node.target = METHODS[node.target]
    graph.lint()


def _join_reshapes(graph: fx.Graph) -> None:
    """Reshape each tensor of a traced graph once, whatever shapes it goes through, in place."""
    reshapes: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in RESHAPES:
            continue
        if node.args[0].target in RESHAPES:
            node.args = (node.args[0].args[0], node.args[1])
        source, sizes = node.args
        if source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
            continue
        first = reshapes.setdefault((source, tuple(sizes)), node)
        if first is not node:
            node.replace_all_uses_with(first)


def _narrow(node: fx.Node) -> None:
    """Replace a slice of known size by `narrow`, which takes a third of the time."""
    source, dim, start, end, *step = node.args
    assert isinstance(source, fx.Node)
    size = source.meta["val"].shape[dim]
    if step or not all(type(number) is int for number in (size, start, end)):
        return
    first, last, _ = slice(start, end).indices(size)
    node.target = torch.narrow
    node.args = (source, dim, first, max(0, last - first))


TRACING = Tracing(
    num_rows=3,
    # By the kernel for few rows, by the one for many, and by torch.
    tried_rows=(1, FEW_ROWS, FEW_ROWS + 1, 33, MOST_ROWS + 1),
    rewrite=replace_linear_layers,
    simplify=simplify,
)


class CpuBackend(AttentionBackend):
    """Run decode steps with no gather, on a CPU."""

    name = "cpp"
    device_type = "cpu"
    tracing = TRACING

    @staticmethod
    def obstacle(device: torch.device, layout: CacheLayout | None) -> str | None:
        obstacle = inductor.compiler_obstacle()
        if obstacle:
            return f"the kernel needs a C++ compiler, g++ or the one that CXX names ({obstacle})"
        return unsupported_states(layout, TYPES)

    def __init__(self, layout: CacheLayout, device: torch.device = CPU) -> None:
        super().__init__(layout, device)
        if self.traced_forward.can_be_traced:
            compile_kernels(self.cache.paged[0].key_dtype)

    @property
    def proof(self) -> str:
        first = self.cache.paged[0]
        sizes = {
            "NUM_KEY_HEADS": first.num_key_heads,
            "KEY_SIZE": first.key_size,
            "VALUE_SIZE": first.value_size,
        }
        verdict = proof_of("attend", first.key_dtype, **sizes)
        verdict = verdict or proof_of("attend_paged", first.key_dtype)
        return "" if verdict is None else str(verdict)

    def prepare(self, batch: ForwardBatch) -> DecodeInputs:
        tokens_B = devices.to_device([token_id for (token_id,) in batch.new_tokens], CPU)
        lengths_B = devices.to_device(batch.lengths, CPU)
        table_rows_B = devices.to_device(batch.table_rows, CPU)
        attention = CpuPagedAttention(batch.cache, batch.table, table_rows_B, lengths_B)
        positions_B = lengths_B - 1
        if batch.position_offsets:
            positions_B = positions_B + devices.to_device(batch.position_offsets, CPU)
        return DecodeInputs(
            cache=self.cache,
            attend=attention.attend,
            tokens_B1=tokens_B[:, None],
            positions_B1=positions_B[:, None],
            table_rows_B=table_rows_B,
            recurrent=batch.cache.stateful,
        )


@dataclass(frozen=True, slots=True)
class CpuPagedAttention:
    """Attend over the pages of one decode step; a `PagedAttention`.

    Table rows and lengths are int64; a length counts the new token.
    """

    cache: PagedCache
    table: BlockTable
    table_rows_B: torch.Tensor
    lengths_B: torch.Tensor

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Write the new states, and attend.

        Args:
            layer: the layer that attends.
            query: `[B, H, 1, D]`, in the dtype of the pages, or rounded to it under autocast.
            key: `[B, K, 1, D]`, likewise.
            value: `[B, K, 1, E]`, likewise.
            spec: the layer's attention.

        Returns:
            `[B, 1, H, E]`, in the dtype of the pages.

        Raises:
            UnsupportedAttentionError: the dtypes differ in another way.
        """
        dtype = layer.key_dtype
        dtypes = {dtype, layer.value_dtype, query.dtype, key.dtype, value.dtype}
        # Autocast rounds states to 16 bits where they are attended; pages hold them rounded.
        if layer.value_dtype != dtype or (len(dtypes) > 1 and dtype.itemsize > 2):
            raise UnsupportedAttentionError(
                f"its queries are {query.dtype}, its keys {key.dtype}, its values {value.dtype}, "
                f"and its pages {dtype} and {layer.value_dtype}"
            )
        query = with_unit_stride(query.to(dtype))
        key = key.to(dtype)
        value = value.to(dtype)
        B, H, _, D = query.shape
        _, K, _, E = value.shape
        outputs_B1HE = query.new_empty(B, 1, H, E)
        sinks_H = None if spec.sinks_H is None else spec.sinks_H.to(dtype).contiguous()
        if operators.are_installed():
            # The order of sums is that of `kernels.attend`.
            attend_step = kernel("attend_paged", dtype)
        else:
            # Compiled at the first call for states of a new shape; known sizes unroll loops.
            sizes = {"NUM_HEADS": H, "NUM_KEY_HEADS": K, "KEY_SIZE": D, "VALUE_SIZE": E}
            attend_step = kernel("attend", dtype, **sizes)
        paged = self.cache.layers[layer.index]
        assert isinstance(paged, PagedLayer)
        key_pages, value_pages = paged.pages
        blocks = self.table.blocks
        step = Step(
            queries=States.of(query),
            new_keys=States.of(key),
            new_values=States.of(value),
            outputs=outputs_B1HE.data_ptr(),
            keys=key_pages.data_ptr(),
            values=value_pages.data_ptr(),
            table=blocks.data_ptr(),
            table_width=blocks.shape[1],
            block_size=self.table.block_size,
            table_rows=self.table_rows_B.data_ptr(),
            lengths=self.lengths_B.data_ptr(),
            num_rows=B,
            num_heads=H,
            num_key_heads=K,
            key_size=D,
            value_size=E,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            window=spec.window or 0,
            sinks=None if sinks_H is None else sinks_H.data_ptr(),
        )
        attend_step(ctypes.byref(step))
        return outputs_B1HE
