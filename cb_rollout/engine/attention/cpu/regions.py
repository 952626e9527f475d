"""Compile the operators between matrix products and attentions of a traced graph by inductor.

A region is a run of operators that neither multiply matrices nor attend, such as a residual sum and
the norm after it. Layers have the same regions, and each is compiled once. Compiling the whole
graph instead is no faster than not compiling: every product would be called through torch's
dispatcher.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from cb_rollout.compat import inductor
from cb_rollout.engine.attention.joined_products import RESHAPES

aten = torch.ops.aten

VIEWS = {
    *RESHAPES,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.unsqueeze.default,
}

ARITHMETIC = {
    aten._to_copy.default,
    aten.add.Tensor,
    aten.cat.default,
    aten.div.Tensor,
    aten.gelu.default,
    aten.mean.dim,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.sub.Tensor,
    aten.sum.dim_IntList,
    aten.tanh.default,
}

# Calling fewer operators takes no longer than calling what inductor compiles them to.
LEAST_ARITHMETIC = 2


def compile_regions(graph: fx.Graph) -> None:
    """Replace each region of a traced graph by a call of its compiled form, in place.

    `linear` computes the graph's linear layers. Passes on inductor's exceptions.
    """
    _infer_numbers_of_rows(graph)
    inductor.propagate_fake_tensors(graph)
    compiled: dict[str, Callable[..., Any]] = {}
    for region in list(_regions(graph)):
        inputs = _inputs_of(region)
        outputs = [node for node in region if not set(region).issuperset(node.users)]
        copied = _copied(region, inputs, outputs)
        types: list[tuple[str, str, str]] = []
        for node in inputs:
            x = node.meta["val"]
            types.append((str(x.dtype), str(x.shape), str(x.stride())))
        key = f"{copied.python_code('self').src} {types}"
        if key not in compiled:
            compiled[key] = inductor.compile_outputs(copied)
        _replace(graph, region, inputs, outputs, compiled[key])


def _inputs_of(region: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that a region reads and does not compute, each once."""
    members = set(region)
    # A dict keeps their order.
    inputs: dict[fx.Node, None] = {}
    for node in region:
        for source in node.all_input_nodes:
            if source not in members:
                inputs[source] = None
    return list(inputs)


def _infer_numbers_of_rows(graph: fx.Graph) -> None:
    """Make reshapes infer the size that depends on the number of rows, in place."""
    for node in graph.nodes:
        if node.target not in RESHAPES:
            continue
        source, sizes = node.args
        unknown = [index for index, size in enumerate(sizes) if isinstance(size, fx.Node)]
        if len(unknown) == 1:
            known = list(node.meta["val"].shape)
            known[unknown[0]] = -1
            node.args = (source, known)
    graph.eliminate_dead_code()


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    region: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        tensors = [node, *node.all_input_nodes]
        is_tensor = all(isinstance(x.meta.get("val"), torch.Tensor) for x in tensors)
        if node.target in VIEWS | ARITHMETIC and is_tensor:
            region.append(node)
        else:
            yield from _worthwhile(region)
            region = []


def _worthwhile(region: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield a region, less the views of its inputs that others use: returning them is slow."""
    kept = set(region)
    for node in reversed(region):
        source: Any = node
        while source in kept and source.target in VIEWS:
            source = source.args[0]
        if source not in kept and not kept.issuperset(node.users):
            kept.remove(node)
    arithmetic = [node for node in kept if node.target in ARITHMETIC]
    if len(arithmetic) >= LEAST_ARITHMETIC:
        yield [node for node in region if node in kept]


def _copied(
    region: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """Return a region's graph, with names that do not depend on the region's position."""
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = copied.placeholder(f"input_{number}")
        x = node.meta["val"]
        with x.fake_mode:
            # Inductor must not see which tensor it is a view of.
            fresh = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        copies[node].meta["val"] = fresh
    for node in region:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = copied.create_node(node.op, node.target, args, kwargs)
    copied.output(tuple(copies[node] for node in outputs))
    return copied


def _replace(
    graph: fx.Graph,
    region: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    compiled: Callable[..., Any],
) -> None:
    """Call a function in place of a region's operators.

    Args:
        graph: the whole graph.
        region: neighbours in it, in their order.
        inputs: nodes that the region reads.
        outputs: its nodes that others read.
        compiled: takes the inputs, and returns the outputs.
    """
    with graph.inserting_after(region[-1]):
        call = graph.call_function(compiled, tuple(inputs))
    last = call
    for number, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, number))
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in region)
    for node in reversed(region):
        graph.erase_node(node)
