"""What rounding a weight does, measured stage by stage, against the whole model in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoders import decoder, encoder, forward, tokens, weights

from qgraph import kl_divergence, registry
from qgraph.calibration import Calibration, collect
from qgraph.formats.base import parse
from qgraph.passes.sensitivity import Probe, output_errors
from qgraph.pipeline import capture

FORMAT = "uint4:group=32"
NAMES = {"embed": "embed.weight", "up": "up.weight", "down": "down.weight", "head": "head.weight"}


def data(**inputs: np.ndarray) -> Calibration:
    """Two batches of unlike sizes."""
    first, last = ({k: v[part] for k, v in inputs.items()} for part in (slice(2), slice(2, None)))
    return collect([first, last], registry.load("target", "ort-cpu").stream)


def rounded(w: dict[str, np.ndarray], *sites: str) -> dict[str, np.ndarray]:
    """The weights, those of some sites rounded; an embedding's rows are its own, the others' N."""
    fmt, found = parse(FORMAT), dict(w)
    for site in sites:
        rows = w[NAMES[site]] if site == "embed" else w[NAMES[site]].T
        made = fmt.dequantize(fmt.quantize(np.ascontiguousarray(rows), ir.DataType.FLOAT))
        found[NAMES[site]] = made if site == "embed" else made.T
    return found


@pytest.mark.parametrize("sites", [("embed",), ("up",), ("down",), ("head",), tuple(NAMES)])
def test_divergence_of_logits(tmp_path: Path, sites: tuple[str, ...]) -> None:
    w, ids = weights(), tokens()
    graph = capture(decoder(tmp_path / "model.onnx", w))
    probe = Probe(graph, graph.sites(), "logits")
    assert set(probe.sites) == set(NAMES)
    found = probe.measure([{}, dict.fromkeys(sites, FORMAT)], data(input_ids=ids))
    logits = [forward(each, ids)["head"] for each in (w, rounded(w, *sites))]
    assert found[0] == 0
    assert found[1] == pytest.approx(kl_divergence(*logits).mean(), rel=1e-3)
    assert found[1] > 1e-5


def test_streams_do_not_mix(tmp_path: Path) -> None:
    """Many variants at once give what each gives alone."""
    graph = capture(decoder(tmp_path / "model.onnx"))
    probe = Probe(graph, graph.sites(), "logits")
    variants = [{"down": FORMAT}, {"up": FORMAT}, {"up": FORMAT, "head": FORMAT}, {"embed": FORMAT}]
    given = data(input_ids=tokens())
    together = probe.measure(variants, given)
    alone = [probe.measure([each], given)[0] for each in variants]
    assert together == pytest.approx(alone, rel=1e-6)
    assert len(set(together)) == len(variants)


def test_relative_error_of_other_outputs(tmp_path: Path) -> None:
    """The mean over the float outputs of ‖y − ŷ‖²/‖y‖²; an output of integers has none."""
    w = weights()
    graph = capture(encoder(tmp_path / "model.onnx"))
    x = np.random.default_rng(0).standard_normal((3, 5, 80)).astype(np.float32)
    probe = Probe(graph, graph.sites(), None)
    found = probe.measure([{"down": FORMAT}], data(x=x))[0]
    hidden = np.maximum(x @ w["up.weight"], 0)
    one, two = (hidden @ each["down.weight"] for each in (w, rounded(w, "down")))
    pooled = [each.mean(1) for each in (one, two)]
    errors = [((a - b) ** 2).sum() / (a**2).sum() for a, b in ((one, two), pooled)]
    assert found == pytest.approx(np.mean(errors), rel=1e-3)


def test_padding_does_not_count(tmp_path: Path) -> None:
    graph = capture(decoder(tmp_path / "model.onnx"))
    ids = tokens(2)
    mask = np.ones_like(ids)
    mask[1, 4:] = 0
    run = registry.load("target", "ort-cpu").stream
    given = collect([{"input_ids": ids, "attention_mask": mask}], run)
    found = Probe(graph, graph.sites(), "logits").measure([{"up": FORMAT}], given)[0]
    w = weights()
    kl = kl_divergence(*(forward(each, ids)["head"] for each in (w, rounded(w, "up"))))
    assert found == pytest.approx(kl[mask == 1].mean(), rel=1e-3)


def test_output_errors(tmp_path: Path) -> None:
    graph = capture(decoder(tmp_path / "model.onnx"))
    site = next(site for site in graph.sites() if site.name == "down")
    x = np.random.default_rng(1).standard_normal((7, site.k)).astype(np.float32)
    w = weights()
    found = output_errors(site, [FORMAT, "int8:group=64"], x)
    off = x @ (w["down.weight"] - rounded(w, "down")["down.weight"])
    assert found[FORMAT] == pytest.approx((off**2).sum() / 7, rel=1e-4)
    assert found["int8:group=64"] < found[FORMAT] / 50
