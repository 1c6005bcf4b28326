"""Each rule of canonical form, broken once; the error names what breaks it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from qgraph.errors import GraphError
from qgraph.verify import verify

TEXT = """
<ir_version: 10, opset_import: ["": 18, "qgraph": 1]>
main (float[2, 3] x, bool c) => (float[2, 3] y) <float[3, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
    [mm] h = MatMul (x, W)
    [neg] g = Neg (h)
    [choose] y = If (c) <
        then_branch = yes () => (float[2, 3] a) <float[3] bias = {1, 2, 3}> {
            [add] a = Add (g, bias)
        },
        else_branch = no () => (float[2, 3] b) { [ours] b = qgraph.F (h) }
    >
}
<domain: "qgraph", opset_import: ["": 18]>
F (x) => (out) { [mm] out = Neg (x) }
"""


def good() -> ir.Model:
    return ir.from_proto(parser.parse_model(TEXT))


def named(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph.all_nodes() if node.name == name)


def body(model: ir.Model, place: int) -> ir.Graph:
    return list(model.graph.subgraphs())[place]


def test_a_graph_in_canonical_form_passes() -> None:
    verify(good())
    verify(good().clone())


def nameless_node(model: ir.Model) -> None:
    named(model, "neg").name = ""


def nameless_value(model: ir.Model) -> None:
    named(model, "neg").outputs[0].name = ""


def nameless_input(model: ir.Model) -> None:
    model.graph.inputs[1].name = None


def node_name_twice(model: ir.Model) -> None:
    named(model, "add").name = "mm"


def value_name_twice(model: ir.Model) -> None:
    named(model, "add").outputs[0].name = "h"


def value_name_of_two_bodies(model: ir.Model) -> None:
    named(model, "add").outputs[0].name = "b"


def constant_node(model: ir.Model) -> None:
    value = ir.AttrTensor("value", ir.tensor([1.0, 2.0]))
    node = ir.Node("", "Constant", [], [value], name="k")
    node.outputs[0].name = "kv"
    model.graph.insert_before(named(model, "neg"), node)


def overridable_input(model: ir.Model) -> None:
    model.graph.inputs.append(model.graph.initializers["W"])


def input_twice(model: ir.Model) -> None:
    model.graph.inputs.append(model.graph.inputs[0])


def no_data(model: ir.Model) -> None:
    model.graph.initializers["W"].const_value = None


def wrong_key(model: ir.Model) -> None:
    model.graph.initializers.data["V"] = model.graph.initializers.data.pop("W")


def foreign_function(model: ir.Model) -> None:
    (function,) = model.functions.values()
    function.domain = "local"
    model.functions[function.identifier()] = function


def undefined_function(model: ir.Model) -> None:
    model.functions.clear()


def weight_in_a_body(model: ir.Model) -> None:
    tensor = ir.tensor(np.ones((3, 1), np.float32), name="V")
    body(model, 0).register_initializer(ir.Value(name="V", const_value=tensor))


def undefined_value(model: ir.Model) -> None:
    named(model, "neg").replace_input_with(0, ir.Value(name="nowhere"))


def removed_producer(model: ir.Model) -> None:
    model.graph.remove(named(model, "mm"))


def later_producer(model: ir.Model) -> None:
    node = named(model, "mm")
    model.graph.remove(node)
    model.graph.append(node)


def value_of_another_body(model: ir.Model) -> None:
    named(model, "ours").replace_input_with(0, body(model, 0).initializers["bias"])


def value_of_a_body_outside(model: ir.Model) -> None:
    node = ir.Node("", "Neg", [named(model, "add").outputs[0]], name="late")
    node.outputs[0].name = "late_out"
    model.graph.append(node)


def missing_import(model: ir.Model) -> None:
    del model.opset_imports["qgraph"]


def output_of_nothing(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="y2")


def outer_value_as_body_output(model: ir.Model) -> None:
    body(model, 0).outputs.data[0] = named(model, "neg").outputs[0]


def initializer_with_a_producer(model: ir.Model) -> None:
    value = named(model, "neg").outputs[0]
    value.const_value = ir.tensor([1.0])
    model.graph.initializers.data["g"] = value


BREAKS: dict[Callable[[ir.Model], None], str] = {
    nameless_node: "a Neg node without a name",
    nameless_value: "without a name: output of node 'neg'",
    nameless_input: "a graph input without a name",
    node_name_twice: "two nodes are named 'mm'",
    value_name_twice: "value name 'h' is defined twice",
    value_name_of_two_bodies: "value name 'b' is defined twice",
    constant_node: "node 'k' is a Constant",
    overridable_input: "'W' is both a graph input and an initializer",
    input_twice: "value name 'x' is defined twice",
    no_data: "initializer 'W' has no data",
    wrong_key: "initializer 'V' holds the value 'W'",
    foreign_function: "function local::F is left",
    undefined_function: "node 'ours' calls qgraph::F",
    weight_in_a_body: r"weight 'V' \[3, 1\] lies in body 'yes'",
    undefined_value: "input 0 of node 'neg' .Neg. is 'nowhere', which nothing defines",
    removed_producer: "made by node 'mm', which is no longer in the graph",
    later_producer: "made by node 'mm' in another scope or later",
    value_of_another_body: "input 0 of node 'ours' .F. is 'bias'",
    value_of_a_body_outside: "made by node 'add' in another scope or later",
    missing_import: "node 'ours' is a F of domain 'qgraph', which the model does not import",
    output_of_nothing: "output 'y2' of the main graph is not produced there",
    outer_value_as_body_output: "output 'g' of body 'yes' is not produced there",
    initializer_with_a_producer: "initializer 'g' is also the output of a node",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_each_rule(break_it: Callable[[ir.Model], None]) -> None:
    model = good()
    break_it(model)
    with pytest.raises(GraphError, match=BREAKS[break_it]):
        verify(model)


def test_strings_may_stay_constants() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    main () => (string[2] y) {
        [k] a = Constant <value_strings = ["p", "q"]> ()
        [id] y = Identity (a)
    }
    """
    verify(ir.from_proto(parser.parse_model(text)))


def test_5000_nodes_take_milliseconds() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    value, nodes = x, []
    for i in range(5000):
        nodes.append(ir.Node("", "Add", [value, value], name=f"n{i}"))
        value = nodes[-1].outputs[0]
        value.name = f"v{i}"
    graph = ir.Graph([x], [value], nodes=nodes, opset_imports={"": 18}, name="main")
    model = ir.Model(graph, ir_version=10)
    start = time.process_time()
    verify(model)
    assert time.process_time() - start < 0.2, "50 ms on an idle machine"
