"""Backends of `torch.compile` that run a forward of tokens with one fault planted in its graph."""

import torch
from torch import fx

ATTENTION = ("cb_rollout.attend.default", "cb_rollout.attend_packed.default")


def planted(operators, change, which=None):
    """Return a backend that changes the results of these operators; `which`: one of them only."""

    def backend(module: fx.GraphModule, inputs):
        nodes = [node for node in module.graph.nodes if str(node.target) in operators]
        assert nodes, f"no {operators} in this graph"
        for node in nodes if which is None else [nodes[which(nodes)]]:
            insert_after(node, change)
        module.recompile()
        return module.forward

    return backend


def insert_after(node: fx.Node, change):
    with node.graph.inserting_after(node):
        changed = node.graph.call_function(change, (node,))
    node.replace_all_uses_with(changed)
    changed.args = (node,)


def middle(nodes):
    return len(nodes) // 2


def last(nodes):
    return -1


def one_percent_more(states):
    return states * 1.01


def a_tenth_of_a_percent_more(states):
    return states * 1.001


def without_first_head(outputs):
    kept = torch.ones_like(outputs)
    kept[:, :, 0] = 0
    return outputs * kept


def with_a_hundredth_of_the_row_before(outputs):
    return outputs + 0.01 * as_the_row_before(outputs)


def as_the_row_before(states):
    """Packed tokens are `[1, N, ...]`, and rows of a decode step `[B, 1, ...]`."""
    rows = 1 if states.shape[0] == 1 else 0
    return states.roll(1, rows)


def rope_off(module: fx.GraphModule, inputs):
    """Rotate queries and keys by frequencies that are 1% too high."""
    for node in module.graph.nodes:
        if str(node.target) in ("aten.cos.default", "aten.sin.default"):
            with module.graph.inserting_before(node):
                angles = module.graph.call_function(one_percent_more, (node.args[0],))
            node.args = (angles,)
    module.recompile()
    return module.forward


FAULTS = {
    "RoPE frequencies off by 1%": rope_off,
    "one head missing in one layer": planted(ATTENTION, without_first_head, middle),
    "attention leaks between rows": planted(ATTENTION, with_a_hundredth_of_the_row_before),
    "a norm off by 0.1%": planted(["aten.rsqrt.default"], a_tenth_of_a_percent_more, middle),
    "one activation off by 1%": planted(["aten.silu.default"], one_percent_more, last),
    "logits of the row before": planted(["aten._unsafe_view.default"], as_the_row_before, last),
}
