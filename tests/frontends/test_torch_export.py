"""Torch modules become graphs: same numbers, same names, nothing of this machine, clear errors."""

from __future__ import annotations

import functools
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import qgraph
from qgraph import registry
from qgraph.errors import InputError
from qgraph.planning import make_plan
from qgraph.recipe import Recipe
from qgraph.selectors import ALIASES, MODULE, Selector

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402  (needs torch)

from tests.frontends.torch_modules import MODULES, WIDTH, Case  # noqa: E402

NAMES = sorted(set(MODULES) - {"decoder_float16"})  # mlp_float16 stands for that type
RUNS = sorted(set(NAMES) - {"mlp_bfloat16"})  # ONNX Runtime's CPU has no bfloat16 Gemm


@functools.cache
def case(name: str) -> Case:
    return MODULES[name]()


@functools.cache
def captured(name: str) -> qgraph.Graph:
    module, args, dynamic = case(name)
    return qgraph.capture(module, args, dynamic_shapes=dynamic)


def eager(name: str) -> list[Any]:
    module, args, _ = case(name)
    with torch.no_grad():
        found = module(*args)
    outputs = list(found.values()) if isinstance(found, dict) else [found]
    return [each.numpy() for each in outputs]


def plan(graph: qgraph.Graph) -> qgraph.QuantPlan:
    capabilities = registry.load("target", "ort-cpu").capabilities()
    return make_plan(graph.sites(), Recipe(min_elements=0), capabilities)


@pytest.mark.parametrize("target", ["ort-cpu", "torch-cpu"])
@pytest.mark.parametrize("name", RUNS)
def test_the_graph_computes_what_the_module_does(name: str, target: str) -> None:
    pytest.importorskip("onnxruntime")
    graph = captured(name)
    inputs = [value.name for value in graph.model.graph.inputs]
    found = qgraph.open(graph, target).run(
        {key: each.numpy() for key, each in zip(inputs, case(name).args, strict=True)}
    )
    tolerance = 1e-5 if "float16" not in name else 5e-3
    for got, want in zip(found.values(), eager(name), strict=True):
        assert got.dtype == want.dtype
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def test_bfloat16_weights_come_bit_for_bit() -> None:
    graph = captured("mlp_bfloat16")
    tensor = graph.model.graph.initializers["up.weight"].const_value
    assert tensor is not None
    assert tensor.dtype == ir.DataType.BFLOAT16
    stored = case("mlp_bfloat16").module.up.weight.detach()
    np.testing.assert_array_equal(tensor.numpy().astype(np.float32), stored.float().numpy())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_keep_their_names_and_lie_once(name: str) -> None:
    module = case(name).module
    graph = captured(name)
    names = set(graph.model.graph.initializers)
    for _, aliases in [(v.name, v.meta.get(ALIASES, ())) for v in initializers(graph)]:
        names |= set(aliases)
    assert {key for key, _ in module.named_parameters(remove_duplicate=False)} <= names
    sizes = [v.const_value.size for v in initializers(graph) if v.const_value is not None]
    assert sizes.count(max(sizes)) == sum(
        p.numel() == max(sizes) for p in module.parameters()
    )  # tied weights once


def initializers(graph: qgraph.Graph) -> list[ir.Value]:
    return list(graph.model.graph.initializers.values())


def test_sites_carry_module_paths_also_in_bodies_and_after_saving(tmp_path: Path) -> None:
    graph = captured("cond")
    modules = {site.weight_name: site.node.meta[MODULE] for site in graph.sites()}
    assert modules == {
        "positive.weight": "positive",
        "negative.weight": "negative",
        "head.weight": "head",
    }
    graph.save(tmp_path / "model.onnx")
    assert plan(qgraph.capture(tmp_path / "model.onnx")) == plan(graph)


def test_the_plan_is_that_of_the_exported_file(tmp_path: Path) -> None:
    module, args, dynamic = case("encoder_decoder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            args,
            str(tmp_path / "model.onnx"),
            dynamic_shapes=dynamic,
            dynamo=True,
            optimize=False,
            opset_version=23,
            verbose=False,
        )
    filed = plan(qgraph.capture(tmp_path / "model.onnx"))
    mine = plan(captured("encoder_decoder"))
    assert mine == filed
    assert len(mine.decisions) == 16
    assert all(decision.module for decision in mine.decisions)


def test_selectors_find_every_name_of_a_tied_weight(tmp_path: Path) -> None:
    graph = captured("encoder_decoder")
    graph.save(tmp_path / "model.onnx")
    for each in (graph, qgraph.capture(tmp_path / "model.onnx")):
        for name in ("head.weight", "embedding.weight"):
            found = [s.op for s in each.sites() if Selector(name).matches(s, 0)]
            assert found == ["Gather", "Gather", "MatMul"]


def test_two_parameters_of_one_storage_are_one_initializer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = nn.Parameter(self.first.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    graph = qgraph.capture(Shared(), (torch.randn(2, 8),))
    assert list(graph.model.graph.initializers) == ["first.weight"]
    assert [site.weight_name for site in graph.sites()] == ["first.weight"] * 2
    assert initializers(graph)[0].meta[ALIASES] == ("second.weight",)


def test_no_path_and_no_trace_of_this_machine_is_left() -> None:
    text = ir.serde.serialize_model(captured("encoder_decoder").model).SerializeToString()
    assert not re.search(rb"torch_modules|\.py\b|pkg\.|/lib/|stack_trace", text)


def test_the_module_is_left_as_it_was() -> None:
    module, args, _ = MODULES["cnn"]()
    module.train()
    module.classifier[1].eval()
    flags = [each.training for each in module.modules()]
    before = {key: each.clone() for key, each in module.state_dict().items()}
    places = [each.data_ptr() for each in module.parameters()]
    level, disabled = logging.getLogger("torch").level, logging.root.manager.disable
    graph = qgraph.capture(module, args)
    assert [each.training for each in module.modules()] == flags
    assert [each.data_ptr() for each in module.parameters()] == places
    for key, each in module.state_dict().items():
        assert torch.equal(each, before[key])
    assert (logging.getLogger("torch").level, logging.root.manager.disable) == (level, disabled)
    # Traced as it infers: batch norm by its running statistics.
    assert all(node.attributes.get_int("training_mode", 0) == 0 for node in graph.model.graph)


def test_flags_are_restored_after_a_failure() -> None:
    module = Outer(Branching()).train()
    with pytest.raises(InputError):
        qgraph.capture(module, (torch.randn(2, 4),))
    assert all(each.training for each in module.modules())


def test_inputs_and_outputs_are_named_as_the_module_names_them() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, Any]:
            y = self.linear(x)
            found = {"twice": y, "x": x, "none": None, "nested": {"pair": (y * 2, y)}}
            return found if scale is None else {**found, "linear": y * scale}

    x = torch.randn(2, 4)
    graph = qgraph.capture(Nested(), (x,), {"scale": torch.ones(4)}, ({0: "rows"}, None))
    assert [value.name for value in graph.model.graph.inputs] == ["x", "scale"]
    names = [value.name for value in graph.model.graph.outputs]
    assert names[0] == "twice"
    assert names[2:] == ["nested.pair.0", "nested.pair.1", "linear"]
    assert list(graph.model.graph.inputs[0].shape or ()) == [ir.SymbolicDim("rows"), 4]
    outputs = qgraph.open(graph).run({"x": x.numpy(), "scale": np.full(4, 3, np.float32)})
    np.testing.assert_array_equal(list(outputs.values())[1], x.numpy())
    np.testing.assert_allclose(outputs["linear"], 3 * outputs["twice"], rtol=1e-6)
    np.testing.assert_array_equal(outputs["nested.pair.1"], outputs["twice"])


@pytest.mark.parametrize("dim", ["AUTO", "DYNAMIC"])
def test_dimension_hints_leave_axes_open(dim: str) -> None:
    hint = getattr(torch.export.Dim, dim)
    graph = qgraph.capture(case("mlp").module, case("mlp").args, dynamic_shapes=({0: hint},))
    shape = graph.model.graph.inputs[0].shape
    assert shape is not None
    assert isinstance(shape[0], ir.SymbolicDim)


def test_an_exported_program_is_a_source() -> None:
    module, args, dynamic = case("mlp")
    program = torch.export.export(module, args, dynamic_shapes=dynamic)
    graph = qgraph.capture(program)
    assert [s.weight_name for s in graph.sites()] == ["up.weight", "down.weight"]
    assert [s.node.meta[MODULE] for s in graph.sites()] == ["up", "down"]
    with pytest.raises(InputError, match=r"for a torch\.nn\.Module"):
        qgraph.capture(program, args)


def test_a_buffer_that_forward_changes_is_said() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls

    graph = qgraph.capture(Counting(), (torch.zeros(2),))
    assert graph.notes == [
        "forward writes to calls: the graph reads what it held at capture, and each run starts "
        "from that"
    ]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Untranslated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x @ x.T).real


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.zeros(7, 3)


class Number(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, 3


class Quoted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({'x"y': nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts['x"y'](x)


FAULTS = {
    "data-dependent": (
        Outer(Branching()),
        r"Outer, module layers\.1, cannot be exported: GuardOnDataDependentSymNode: Could not "
        r"guard on data-dependent expression .* .line \d+ of test_torch_export\.py: return x if "
        r"x\.sum\(\) > 0 else -x.*torch\.cond",
    ),
    "no translation": (
        Outer(Untranslated()),
        r"Outer, module layers\.1, cannot be exported: DispatchError: No ONNX function found for "
        r".*linalg_eig.*; this op has no ONNX translation",
    ),
    "wrong shapes": (
        Outer(Broken()),
        r"Outer, module layers\.1, cannot be exported: RuntimeError: .*\[2, 4\] X \[7, 3\]",
    ),
    "a name that is no text of source": (
        Quoted(),
        r"Quoted cannot be exported: torch makes Python source of the names .*, such as that of "
        r"""'parts\.x"y\.weight' .*: rename it""",
    ),
    "no tensor": (Number(), "Number cannot become an ONNX graph: forward returns something"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_torch_cannot_export_is_one_line_with_module_and_reason(
    fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module, words = FAULTS[fault]
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(module, (torch.randn(2, 4),))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    assert "/" not in message
    assert caught.value.__cause__ is None
    assert capfd.readouterr() == ("", "")


def test_examples_that_do_not_fit_are_refused() -> None:
    mlp = case("mlp_static").module
    x = torch.randn(3, WIDTH)
    with pytest.raises(InputError, match="needs an example of its inputs"):
        qgraph.capture(mlp)
    with pytest.raises(InputError, match="args is a Tensor: wanted a tuple"):
        qgraph.capture(mlp, x)
    with pytest.raises(InputError, match=r"positional argument.*give args and kwargs as forward"):
        qgraph.capture(mlp, (x, x))
    with pytest.raises(InputError, match=r"one entry for each input"):
        qgraph.capture(mlp, (x,), dynamic_shapes={"y": {0: "batch"}})
    with pytest.raises(
        InputError, match=r"opens axis 2 of x, .*shape \[3, 64\]: its axes are 0 to"
    ):
        qgraph.capture(mlp, (x,), dynamic_shapes=({0: "batch", 2: "other"},))
    with pytest.raises(InputError, match="opens axis -3 of x"):
        qgraph.capture(mlp, (), {"x": x}, dynamic_shapes={"x": {-3: "rows"}})
    with pytest.raises(InputError, match="args, kwargs and dynamic_shapes are for"):
        qgraph.capture("model.onnx", (x,))
    with pytest.raises(InputError, match="a model was wanted, found a int"):
        qgraph.capture(3)  # type: ignore[arg-type]


def test_weights_without_data_are_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"2 weights without data.*such as weight: load"):
        qgraph.capture(module, (torch.randn(2, 4),))


def test_packed_weights_are_no_source() -> None:
    from qgraph.runtimes.torch import ops

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.zeros(4, 1, 16, dtype=torch.uint8))
            self.register_buffer("scales", torch.ones(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            op = torch.ops.qgraph.linear
            return op(x, self.codes, self.scales, None, None, 32, "Int4V1")

    assert "linear" in ops.SCHEMAS
    with pytest.raises(InputError, match=r"packed by qgraph already: use the \.onnx file"):
        qgraph.capture(Packed(), (torch.randn(2, 32),))


@pytest.mark.download
@pytest.mark.slow
def test_smollm2_from_its_module_has_the_plan_of_its_file() -> None:
    for package in ("transformers", "gguf"):
        pytest.importorskip(package)
    from qgraph.models import smollm2

    module = smollm2.load()
    ids = torch.arange(14).reshape(2, 7)
    graph = qgraph.capture(module, (ids,), dynamic_shapes=({0: "batch", 1: "sequence"},))
    mine, filed = plan(graph), plan(qgraph.capture(smollm2.build(variant="plain")))
    assert mine == filed
    assert mine.coverage.line("q").startswith("q 211/211 linears")


@pytest.mark.download
@pytest.mark.slow
def test_minilm_computes_what_the_module_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import shutil

    from transformers import BertModel

    from qgraph.models import minilm

    for member in ("model/model.safetensors", "model/config.json"):
        shutil.copyfile(minilm.source(member), tmp_path / Path(member).name)
    graph = qgraph.capture(tmp_path)
    module = BertModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 30000, (3, 17))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    with torch.no_grad():
        wanted = module(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
    for target in ("ort-cpu", "torch-cpu"):
        outputs = qgraph.open(graph, target).run(feeds)
        error = np.abs(outputs["last_hidden_state"] - wanted).max()
        assert error <= 1e-5 * np.abs(wanted).max(), target
