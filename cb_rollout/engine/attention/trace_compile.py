"""Has a trace compiled: what runs between two attentions becomes one function.

Layers of one form are one function with other weights, so a deep model takes hardly longer to
compile than one of three layers. Knows operators, never models.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from cb_rollout import _compat_tracing


def compile_stretches(module: fx.GraphModule, options: Mapping[str, Any]) -> None:
    """Replace every stretch between two marks of a traced graph by one call, in place.

    Args:
        module: as traced.
        options: of inductor.

    Raises:
        Exception: what tracing or a compiler raises.
    """
    functions: dict[object, Callable[..., Any]] = {}
    for nodes in list(_stretches(module.graph)):
        stretch = _Stretch(module, nodes)
        if not stretch.outputs:
            continue
        if stretch.key not in functions:
            functions[stretch.key] = _compat_tracing.compiled(stretch.module, options)
        stretch.replace(functions[stretch.key])
    module.graph.lint()


def _stretches(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or _compat_tracing.is_mark(node):
            yield nodes
            nodes = []
        elif node.op not in ("placeholder", "get_attr"):
            nodes.append(node)


class _Stretch:
    """Nodes of a graph as a graph of their own, which takes and gives tensors only."""

    def __init__(self, owner: fx.GraphModule, nodes: list[fx.Node]) -> None:
        self._owner, self._nodes, self._inside = owner, nodes, set(nodes)
        self.outputs = [
            node
            for node in nodes
            if _is_tensor(node) and any(user not in self._inside for user in node.users)
        ]
        self._inputs = list(dict.fromkeys(self._needed(nodes)))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self._forms: list[str] = []
        for node in self._inputs:
            example = _compat_tracing.example(self._owner, node)
            copies[node] = graph.placeholder(f"input_{len(copies)}")
            copies[node].meta = {"val": example}
            self._forms.append(f"{example.dtype} {example.shape} {example.stride()}")
        for node in nodes:
            _copy(node, graph, copies)
        graph.output(tuple(copies[node] for node in self.outputs))
        self.module = fx.GraphModule({}, graph)

    @property
    def key(self) -> object:
        """Equal for stretches that one function does."""
        return self.module.code, tuple(self._forms)

    def replace(self, function: Callable[..., Any]) -> None:
        """Have the owner's graph call a function in the nodes' place."""
        graph = self._owner.graph
        with graph.inserting_after(self._nodes[-1]):
            results = graph.call_function(function, tuple(self._inputs))
        for index, output in reversed(list(enumerate(self.outputs))):
            with graph.inserting_after(results):
                result = graph.call_function(operator.getitem, (results, index))
            result.meta = dict(output.meta)
            output.replace_all_uses_with(result)
        for node in reversed(self._nodes):
            # Numbers, like that of the rows, stay for the stretches behind.
            if not node.users:
                graph.erase_node(node)

    def _needed(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Tensors from outside; a number from outside is computed anew from the tensors it is of.

        Inductor knows a number of rows by the tensors that have them.
        """
        for node in nodes:
            for needed in node.all_input_nodes:
                if needed in self._inside:
                    continue
                if _is_tensor(needed):
                    yield needed
                else:
                    yield from self._needed([needed])


def _copy(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
    if node in copies:
        return
    for needed in node.all_input_nodes:
        _copy(needed, graph, copies)
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    # Names of its own would make every layer another function.
    copies[node] = graph.create_node(
        node.op, node.target, args, kwargs, name=f"value_{len(copies)}"
    )
    copies[node].meta = dict(node.meta)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"
