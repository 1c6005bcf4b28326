"""Hugging Face folders: local, safetensors, no code of theirs; same numbers as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import qgraph
from qgraph.errors import InputError
from qgraph.frontends import hf_config, hf_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 100}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **options
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, num_attention_heads=4)
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16}
    config = transformers.T5Config(**sizes, vocab_size=100, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config)


def routed(kind: str) -> Any:
    """A mixture of four experts, two to a token."""
    sizes = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    if kind == "Qwen3Moe":
        experts |= {"num_experts": 4, "moe_intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(**sizes, **experts)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def saved(make: Callable[[], Any], folder: Path) -> Any:
    """The model, saved to `folder`."""
    torch.manual_seed(0)
    module = make().eval()
    module.save_pretrained(folder)
    return module


IDS = np.random.default_rng(0).integers(0, 100, (3, 11))
MASK = np.ones_like(IDS)
MASK[1, 6:] = 0
IMAGE = np.random.default_rng(0).standard_normal((3, 3, 32, 32), np.float32)
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "llama": (llama, {"input_ids": IDS}, 9),
    "bert": (bert, {"input_ids": IDS, "attention_mask": MASK}, 11),
    "t5": (t5, {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4]}, 21),
    "vit": (vit, {"pixel_values": IMAGE}, 7),
    "mixtral": (lambda: routed("Mixtral"), {"input_ids": IDS}, 9),
    "gpt-oss": (lambda: routed("GptOss"), {"input_ids": IDS}, 9),
    "qwen3-moe": (lambda: routed("Qwen3Moe"), {"input_ids": IDS}, 9),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    make, feeds, sites = KINDS[kind]
    module = saved(make, tmp_path / "model")
    graph = qgraph.capture(tmp_path / "model")
    assert [value.name for value in graph.model.graph.inputs] == list(feeds)
    assert len(graph.sites()) == sites
    gathers = any("each token gathers the weights of its experts" in note for note in graph.notes)
    assert graph.gathers_experts == gathers
    assert gathers == (kind in ("mixtral", "gpt-oss", "qwen3-moe"))
    assert tmp_path / "model" / "model.safetensors" in graph.files
    found = qgraph.open(graph).run(feeds)
    with torch.no_grad():
        wanted = module(**{key: torch.from_numpy(each) for key, each in feeds.items()})
    assert "logits" in found
    for key, each in found.items():
        want = wanted[key].numpy()
        assert np.abs(each - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.filterwarnings("ignore")
def test_an_older_runtime_gets_an_older_opset_and_the_same_fused_ops(tmp_path: Path) -> None:
    module = saved(llama, tmp_path / "model")
    output = tmp_path / "old.onnx"
    qgraph.optimize(tmp_path / "model", output, format="float", min_runtime="1.22")
    made = ir.load(output)
    assert made.opset_imports[""] == 22
    assert sum(node.op_type == "GroupQueryAttention" for node in made.graph) == 1
    with torch.no_grad():
        wanted = module(input_ids=torch.from_numpy(IDS)).logits.numpy()
    found = qgraph.open(output).run({"input_ids": IDS})["logits"]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.filterwarnings("ignore")
def test_bfloat16_is_read_as_float32_and_nothing_is_lost(tmp_path: Path) -> None:
    module = saved(lambda: llama().bfloat16(), tmp_path / "model")
    stored(tmp_path / "model", mtp__head__weight=torch.ones(2, 2).double())
    graph = qgraph.capture(tmp_path / "model")
    bits, rounded, unused = graph.notes
    assert bits.startswith("weights stored as bfloat16 are float32 in the graph, which holds them")
    assert rounded == "weights stored as float64 are rounded to float32"
    assert unused.endswith("no place in its LlamaForCausalLM and was left out: mtp.head.weight")
    tensor = graph.model.graph.initializers["model.layers.0.mlp.up_proj.weight"].const_value
    assert tensor is not None
    assert tensor.dtype == ir.DataType.FLOAT
    wanted = module.model.layers[0].mlp.up_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(tensor.numpy(), wanted)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def shortened(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def stored(folder: Path, **tensors: Any) -> None:
    """Add or replace tensors; dots of names are written as two underscores."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state.update({name.replace("__", "."): each for name, each in tensors.items()})
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def indexed(folder: Path, place: str) -> None:
    """Move the weights to `place`, as seen from the folder, and name it in an index."""
    (folder / "model.safetensors").rename(folder / place)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def linked(folder: Path, name: str) -> None:
    """Put a link in the place of a file of the folder, which now lies beside it."""
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(Path("..") / name)


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (as_pickle, r"weights as pickles \(pytorch_model.bin\).*wanted model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "remote code": (
        lambda f: change(f, model_type="mine", auto_map={"AutoModel": "code.Mine"}),
        "a 'mine', which transformers .* does not know and brings its own code, which is not run",
    ),
    "quantized": (
        lambda f: change(f, quantization_config={"quant_method": "gptq"}),
        r"quantized weights \(quant_method 'gptq'\)",
    ),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "a value of another type": (
        lambda f: change(f, hidden_size="64"),
        "cannot load .*Validation error for field 'hidden_size': .*expected int",
    ),
    "no type": (lambda f: change(f, model_type=None), "names no model_type"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    "a missing weight": (shortened, "lacks 1 weight of its LlamaForCausalLM, such as model.norm"),
    "a cut file": (truncated, "model.safetensors cannot be read: SafetensorError"),
    "quantized part": (
        lambda f: change(f, text_config={"compression_config": {"quant_method": "fp"}}),
        r"quantized weights \(quant_method 'fp'\)",
    ),
    "an index that leads out": (
        lambda f: indexed(f, "../out.safetensors"),
        r"refused: its '\.\./out.safetensors' is /.*, outside the folder",
    ),
    "an absolute index": (
        lambda f: indexed(f, str(f.parent / "out.safetensors")),
        "refused: its '/.*out.safetensors' is /.*, outside the folder",
    ),
    "an index of pickles": (lambda f: indexed(f, "model.bin"), r"lists 'model\.bin': wanted saf"),
    "an index that is no map": (
        lambda f: (indexed(f, "x"), (f / "model.safetensors.index.json").write_text("[]")),
        "has no weight_map of files",
    ),
    "a gone shard": (
        lambda f: (indexed(f, "a.safetensors"), (f / "a.safetensors").unlink()),
        "lacks 'a.safetensors'",
    ),
    "no index": (
        lambda f: (f / "model.safetensors").rename(f / "a.safetensors"),
        "has a.safetensors, but neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights nowhere": (
        lambda f: (linked(f, "model.safetensors"), (f.parent / "model.safetensors").unlink()),
        "lacks 'model.safetensors' .*No such file",
    ),
    "weights elsewhere": (lambda f: linked(f, "model.safetensors"), "'model.safetensors' is /"),
    "a configuration elsewhere": (lambda f: linked(f, "config.json"), "'config.json' is /"),
    "a bias too many": (
        lambda f: stored(f, model__layers__0__self_attn__q_proj__bias=torch.ones(64)),
        r"holds model\.layers\.0\.self_attn\.q_proj\.bias, which the LlamaForCausalLM .* does not",
    ),
    "an adapter within": (
        lambda f: stored(f, layers__0__mlp__up_proj__lora_A__weight=torch.ones(2, 64)),
        r"holds layers\.0\.mlp\.up_proj\.lora_A\.weight, .*Merge an adapter",
    ),
    "integers": (
        lambda f: stored(
            f, model__layers__0__mlp__up_proj__weight=torch.ones(128, 64, dtype=torch.int8)
        ),
        r"up_proj\.weight as int8, and its config\.json names no quantization",
    ),
    "8-bit floats": (
        lambda f: stored(f, model__norm__weight=torch.ones(64).to(torch.float8_e4m3fn)),
        r"model\.norm\.weight as float8_e4m3fn",
    ),
    "another shape": (
        lambda f: stored(f, model__norm__weight=torch.ones(63)),
        r"holds model\.norm\.weight with shape \[63\], where the LlamaForCausalLM .*has \[64\]",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused_say_why(tmp_path: Path, case: str) -> None:
    spoil, words = REFUSED[case]
    saved(llama, tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(InputError, match=words) as caught:
        qgraph.capture(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved(llama, folder)
    marker = tmp_path / "marker"
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    change(folder, auto_map={"AutoModelForCausalLM": "code.Mine", "AutoConfig": "code.Mine"})
    # Kernels of a hub are code too.
    change(folder, _attn_implementation="evil/kernel", experts_implementation="evil/kernel")
    change(folder, use_kernels=True, fusion_config={"evil": True}, dtype="evil")
    assert len(qgraph.capture(folder).sites()) == 9
    assert not marker.exists()


def test_links_within_the_cache_of_huggingface_hub_are_followed(tmp_path: Path) -> None:
    home = tmp_path / "models--a--b"
    folder = home / "snapshots" / "1234"
    for place in (folder, home / "blobs", home / "refs"):
        place.mkdir(parents=True)
    (home / "blobs" / "ab12").write_bytes(b"x")
    (home / "refs" / "main").write_bytes(b"x")
    (folder / "model.safetensors").symlink_to("../../blobs/ab12")
    assert hf_weights.files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../refs/main")
    with pytest.raises(InputError, match=r"refused: its 'model.safetensors' is .*refs/main"):
        hf_weights.files(folder)


def test_whatever_chooses_code_or_files_is_taken_out_at_any_depth() -> None:
    config = {
        "model_type": "a",
        "_attn_implementation": {"": "evil/kernel"},
        "parts": [{"attn_implementation_internal": "x", "size": 1, "_name_or_path": "evil/x"}],
        "text_config": {"auto_map": {}, "transformers_weights": "../x", "hidden_size": 2},
    }
    assert hf_config.cleaned(config) == {
        "model_type": "a",
        "parts": [{"size": 1}],
        "text_config": {"hidden_size": 2},
    }


def test_a_folder_without_a_model_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder, with no \.onnx file in it"):
        qgraph.capture(tmp_path)
