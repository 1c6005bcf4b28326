"""A decoder that mixes tokens outside of attention gets no cache."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from fusing import CPU, evaluate
from text_models import tiny_llama

from qgraph import registry
from qgraph.capturing import capture
from qgraph.decoder_graph import CACHING
from qgraph.errors import InputError
from qgraph.graph import Graph
from qgraph.passes.base import Context
from qgraph.planning import make_plan
from qgraph.recipe import Recipe

MIXES = {
    "nothing": "y = Identity(x)",
    "the length of all tokens": "m = LpNormalization<axis = 1>(x)  y = Add(x, m)",
    "scores without a softmax": """t = Transpose<perm = [0, 2, 1]>(x)  s = MatMul(x, t)
        u = Tanh(s)  v = MatMul(u, x)  y = Add(x, v)""",
}

PASSES = ("fuse_transformer", "cleanup", "add_cache", "cleanup")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder") / "model.onnx"
    tiny_llama(path, past=False, plain=False)
    return path


def mixed(path: Path, mix: str) -> Graph:
    """The decoder whose embeddings go through `mix` first."""
    model = ir.load(path)
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[b, s, k] x) => (float[b, s, k] y) {{ {mix} }}"""
    part = ir.from_onnx_text(text).graph
    first = next(node for node in model.graph if node.op_type == "Gather"
                 and node.inputs[1] in model.graph.inputs)  # fmt: skip
    made = {part.inputs[0]: first.outputs[0]}
    readers = list(first.outputs[0].uses())
    after = first
    for node in list(part):
        inputs = [made.get(value, value) for value in node.inputs]
        copy = ir.Node("", node.op_type, inputs, list(node.attributes.values()))
        copy.outputs[0].name = f"mixed/{node.outputs[0].name}"
        copy.name = copy.outputs[0].name
        made[node.outputs[0]] = copy.outputs[0]
        model.graph.insert_after(after, copy)
        after = copy
    for reader, index in readers:
        reader.replace_input_with(index, made[part.outputs[0]])
    return capture(model)


def run(graph: Graph, *passes: str) -> Graph:
    capabilities = CPU.capabilities()
    plan = make_plan(graph.sites(), Recipe(add_cache=True), capabilities)
    context = Context(plan, capabilities, evaluate=evaluate)
    for name in passes:
        registry.load("pass", name)().run(graph, context)
    graph.verify()
    return graph


@pytest.mark.parametrize("mix", MIXES)
def test_steps_must_say_what_the_whole_text_says(mix: str, decoder: Path) -> None:
    graph = mixed(decoder, MIXES[mix])
    if mix == "nothing":
        names = [value.name for value in run(graph, *PASSES).model.graph.outputs]
        assert "present.1.value" in names
        return
    with pytest.raises(InputError, match=r"--add-cache: read step by step .* is \d+% off, so the"):
        run(graph, *PASSES)


def test_an_attention_may_be_a_result_of_the_model(decoder: Path) -> None:
    graph = run(capture(decoder), "fuse_transformer", "cleanup")
    outputs = graph.model.graph.outputs
    result = next(n for n in graph.model.graph if n.op_type == CACHING).outputs[0]
    result.name = "attended"
    outputs.append(result)
    run(graph, "add_cache", "cleanup")
    made = outputs[1].producer()
    assert outputs[1].name == "attended"
    assert made is not None and made.inputs[3] is not None
    assert made.inputs[3].name == "past_key_values.0.key"
