"""Has a trace compiled: what runs between two attentions becomes one function.

Layers of one form are one function with other weights, so a deep model takes hardly longer to
compile than one of three layers. Knows operators, never models.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention.trace_stretches import Stretch


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
        stretch = Stretch(module, nodes)
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
