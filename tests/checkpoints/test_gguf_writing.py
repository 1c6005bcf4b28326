"""GGUF files that are written: the gguf package reads the very numbers that we have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import TYPES, rows, write_gguf
from rounded_entries import rounded

from qgraph.checkpoints.base import Entry, Outgoing
from qgraph.checkpoints.gguf import GGUF
from qgraph.checkpoints.gguf_file import read_header
from qgraph.checkpoints.gguf_metadata import fields_of
from qgraph.checkpoints.gguf_writing import FILE_TYPES
from qgraph.checkpoints.opening import open_checkpoint
from qgraph.errors import InputError
from qgraph.formats.base import Array

gguf = pytest.importorskip("gguf")
UP, UP_HERE = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"
SIZES = {
    "vocab_size": 80,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, **SIZES}


class Floats:
    """A float tensor in memory."""

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array, self.shape, self.dtype = name, array, array.shape, array.dtype

    def rows(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


def read_back(path: Path) -> dict[str, tuple[str, Array]]:
    """Type and values of each tensor, by the gguf package."""
    reader = gguf.GGUFReader(path)
    return {
        t.name: (t.tensor_type.name, gguf.dequantize(t.data, t.tensor_type).astype(np.float32))
        for t in reader.tensors
    }


def saved(path: Path, entries: list[Entry], *floats: Floats, **config: Any) -> Path:
    out = path / "out.gguf"
    assert GGUF.save(out, Outgoing(entries, floats, {**LLAMA, **config})) == [out]
    return out


@pytest.mark.parametrize(
    "spelled, name",
    [
        ("int4:group=32", "Q4_0"),
        ("int4:group=32,scale=signed", "Q4_0"),
        ("int8:group=32", "Q8_0"),
    ],
)
def test_rounded_weights_are_written_exactly(tmp_path: Path, spelled: str, name: str) -> None:
    entry = rounded(UP_HERE, 512, 256, spelled)
    kind, values = read_back(saved(tmp_path, [entry]))[UP]
    assert kind == name
    np.testing.assert_array_equal(values, entry.dequantized(0, 512))


def test_rows_of_q_and_k_are_paired_again(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{which}_proj.weight" for which in "qk"]
    entries: list[Entry] = [
        rounded(name, n, 64, "int8:group=32") for name, n in zip(names, (64, 32), strict=True)
    ]
    floats = Floats(names[0].replace("weight", "bias"), np.arange(64, dtype=np.float16))
    path = saved(tmp_path, entries, floats)
    q = read_back(path)["blk.0.attn_q.weight"][1]
    own = entries[0].dequantized(0, 64)
    np.testing.assert_array_equal(q[:4], own[[0, 8, 1, 9]])  # heads of 16 rows
    found = open_checkpoint(path)
    for entry in entries:
        back = found.entries[entry.name].dequantized(0, entry.n)
        np.testing.assert_array_equal(back, entry.dequantized(0, entry.n))
    bias = found.floats[floats.name]
    assert bias.dtype == np.float32
    assert bias.rows(0, 64).tolist() == list(range(64))


def test_metadata_of_a_model(tmp_path: Path) -> None:
    floats = Floats("model.norm.weight", np.ones(256, np.float16))
    table = Floats("model.embed_tokens.weight", np.ones((80, 256), np.float16))
    path = saved(tmp_path, [rounded(UP_HERE, 512, 256, "int4:group=32")], floats, table)
    header = read_header(path)
    wanted = {
        "general.architecture": "llama",
        "general.file_type": 2,
        "general.quantization_version": 2,
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 64,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": 80,
    }
    assert wanted.items() <= dict(header.fields).items()
    kinds = {name: kind for name, (kind, _) in read_back(path).items()}
    assert kinds == {UP: "Q4_0", "output_norm.weight": "F32", "token_embd.weight": "F16"}


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    table = {
        "added_tokens": [{"id": 3, "content": "<|end|>", "special": True}],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "use_regex": True},
            ],
        },
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    config = {**LLAMA, "vocab_size": 5, "eos_token_id": [3]}
    outgoing = Outgoing([rounded(UP_HERE, 64, 256, "int4:group=32")], [], config, folder)
    GGUF.save(tmp_path / "out.gguf", outgoing)
    fields = read_header(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.tokens"] == ["a", "b", "ab", "<|end|>", "[PAD4]"]
    assert fields["tokenizer.ggml.token_type"].tolist() == [1, 1, 1, 3, 5]
    assert fields["tokenizer.ggml.merges"] == ["a b"]
    assert fields["tokenizer.ggml.pre"] == "smollm"
    assert fields["tokenizer.ggml.eos_token_id"] == 3
    assert fields["tokenizer.chat_template"] == "{{ x }}"
    table["pre_tokenizer"] = {"type": "Metaspace"}
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=r"no byte-level BPE that llama\.cpp cuts words for"):
        GGUF.save(tmp_path / "other.gguf", outgoing)


@pytest.mark.parametrize(
    "config, name, message",
    [
        ({"model_type": "t5"}, UP_HERE, r"written for the model types llama, .*found 't5'"),
        (
            {"model_type": None},
            UP_HERE,
            r"found None: name a GGUF file of the float model, or its folder, with --like",
        ),
        ({"num_hidden_layers": None}, UP_HERE, r"num_hidden_layers None, wanted a whole number"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            UP_HERE,
            r"scales its rotary positions \('llama3'\)",
        ),
        ({}, "model.layers.0.mlp.other.weight", r"mlp\.other\.weight has no place in a GGUF file"),
    ],
)
def test_models_it_has_no_words_for(
    tmp_path: Path, config: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        saved(tmp_path, [rounded(name, 64, 256, "int4:group=32")], **config)
    assert not list(tmp_path.iterdir())


def test_what_no_type_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot hold model\.layers\.0\.mlp\.up_proj.*group=64"):
        saved(tmp_path, [rounded(UP_HERE, 64, 256, "int4:group=64")])
    assert not list(tmp_path.iterdir())


def test_file_types_are_the_packages() -> None:
    """The number of a file that is mostly of one type; of several recipes, the smallest one's."""
    for name, number in FILE_TYPES.items():
        label = gguf.LlamaFileType(number).name.removeprefix("MOSTLY_")
        assert label in (name, f"{name}_S", f"{name}_M", f"{name}_MOE")


@pytest.mark.parametrize(
    "post, settings, begins",
    [
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        ({"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}, {}, True),
        ({"single": [{"SpecialToken": {}}]}, {"add_bos_token": False}, False),
        ({"processors": [{"type": "ByteLevel"}, {"single": [{"SpecialToken": {}}]}]}, {}, True),
        ({"single": [{"Sequence": {}}]}, {}, False),
        ({"single": "odd"}, {}, False),
    ],
)
def test_whether_texts_get_a_first_token(
    tmp_path: Path, post: Any, settings: dict[str, Any], begins: bool
) -> None:
    table = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel"},
        "post_processor": post,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert fields_of(LLAMA, tmp_path)["tokenizer.ggml.add_bos_token"] is begins


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": {"vocab": {"a": -1}}}, r"gives 'a' the number -1, .* vocab_size of 80"),
        ({"model": {"vocab": {"a": 80}}}, r"gives 'a' the number 80"),
        ({"model": {"vocab": {"a": 1.0}}}, r"gives 'a' the number 1\.0"),
        ({"model": {"vocab": []}}, "has no BPE"),
        ({"added_tokens": [7]}, "has no BPE"),
        ({"pre_tokenizer": {"pretokenizers": ["odd"]}}, "has no BPE"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ["x"]}}}, "no byte-level BPE"),
    ],
)
def test_damaged_tokenizers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    table: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    table["model"] |= change.pop("model", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(table | change))
    with pytest.raises(InputError, match=message):
        fields_of(LLAMA, tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps '1e-5', wanted a number above 0"),
        ({"rope_theta": -1}, r"rope_theta -1, wanted a number above 0"),
        ({"rope_theta": float("nan")}, r"rope_theta nan"),
        ({"vocab_size": 1 << 31}, r"vocab_size of 2147483648"),
    ],
)
def test_damaged_configurations(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    table = {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=message):
        fields_of({**LLAMA, **change}, tmp_path)


def like(path: Path, architecture: str = "llama", **more: Any) -> Path:
    """The GGUF file of a float model, its tensors in an order of its own."""
    rng = np.random.default_rng(3)
    tensors = {
        "output_norm.weight": rng.standard_normal(256).astype(np.float32),
        UP: rng.standard_normal((64, 256)).astype(np.float16),
        "blk.0.attn_q.weight": ("Q8_0", rows(TYPES["Q8_0"], 32, 256)),
        "blk.0.attn_k.bias": rng.standard_normal(16).astype(np.float16),
        "token_embd.weight": rng.standard_normal((80, 256)).astype(np.float16),
    }
    fields = {f"{architecture}.attention.head_count": 4, "general.name": "mine", **more}
    return write_gguf(path / "like.gguf", tensors, fields, architecture)


def outgoing_like(path: Path, *entries: Entry) -> Outgoing:
    """Everything that the file has, but for what `entries` replace."""
    found, names = open_checkpoint(path), {entry.name for entry in entries}
    others = [entry for name, entry in found.entries.items() if name not in names]
    floats = [tensor for name, tensor in found.floats.items() if name not in names]
    return Outgoing([*entries, *others], floats, {}, path)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "falcon"])
def test_a_file_like_another(tmp_path: Path, architecture: str) -> None:
    """Fields, names, order and the other tensors are that file's, to the byte."""
    path = like(tmp_path, architecture, **{"general.file_type": 1, "quantize.imatrix.file": "x"})
    here = UP if architecture == "falcon" else UP_HERE
    entry = rounded(here, 64, 256, "int4:group=32")
    GGUF.save(tmp_path / "out.gguf", outgoing_like(path, entry))
    old, new = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "out.gguf")
    assert [t.name for t in new.tensors] == [t.name for t in old.tensors]
    for one, other in zip(old.tensors, new.tensors, strict=True):
        if one.name != UP:
            assert one.tensor_type == other.tensor_type
            np.testing.assert_array_equal(one.data, other.data)
    changed = {"general.file_type", "quantize.imatrix.file"}
    for name, field in old.fields.items():
        if name not in changed and not name.startswith("GGUF."):
            assert new.fields[name].types == field.types
            assert new.fields[name].contents() == field.contents()
    assert new.fields["general.file_type"].contents() == 2
    assert "quantize.imatrix.file" not in new.fields
    kind, values = read_back(tmp_path / "out.gguf")[UP]
    assert kind == "Q4_0"
    np.testing.assert_array_equal(values, entry.dequantized(0, 64))


def test_norms_of_gemma_that_changed_lie_one_higher(tmp_path: Path) -> None:
    path = like(tmp_path, "gemma2")
    made = outgoing_like(path, rounded(UP_HERE, 64, 256, "int4:group=32"))
    norm = Floats("model.norm.weight", np.arange(256, dtype=np.float32) / 256)
    floats = [norm if each.name == norm.name else each for each in made.floats]
    GGUF.save(tmp_path / "out.gguf", dataclasses.replace(made, floats=floats))
    found = read_back(tmp_path / "out.gguf")["output_norm.weight"][1]
    np.testing.assert_array_equal(found, norm.array + 1)


def test_a_file_of_another_model(tmp_path: Path) -> None:
    path, out = like(tmp_path), tmp_path / "out.gguf"
    made = outgoing_like(path, rounded(UP_HERE, 64, 256, "int4:group=32"))
    other = rounded(UP_HERE, 64, 512, "int4:group=32")
    with pytest.raises(
        InputError, match=r"is \[64, 512\], and blk\.0\.ffn_up\.weight in .* \[64, 256\]"
    ):
        GGUF.save(out, outgoing_like(path, other))
    with pytest.raises(InputError, match=r"'blk\.0\.ffn_up\.weight' of .*like\.gguf is missing"):
        GGUF.save(out, dataclasses.replace(made, entries=made.entries[1:]))
    more = rounded(UP_HERE.replace("up", "gate"), 64, 256, "int4:group=32")
    with pytest.raises(InputError, match=r"has no 'blk\.0\.ffn_gate\.weight'; did you mean"):
        GGUF.save(out, dataclasses.replace(made, entries=[*made.entries, more]))
    assert not out.exists()


def test_a_part_of_a_model_is_no_model(tmp_path: Path) -> None:
    path = like(tmp_path, **{"split.count": 3})
    assert "one of 3 that hold the model" in open_checkpoint(path).warnings[0]
    with pytest.raises(InputError, match="one of 3 files that hold the model"):
        GGUF.save(tmp_path / "out.gguf", outgoing_like(path))


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    with pytest.raises(InputError, match=r"out\.gguf exists"):
        saved(tmp_path, [rounded(UP_HERE, 64, 256, "int4:group=32")])
    assert (tmp_path / "out.gguf").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "spelled, kinds",
    [(None, {"Q4_0"}), ("int8:group=32", {"Q8_0"}), ("uint4:group=32,zero=float", {"Q4_1"})],
)
def test_a_llama_folder_is_exported_and_imported(
    tmp_path: Path, spelled: str | None, kinds: set[str]
) -> None:
    """From the folder to GGUF; what the package reads is what the graph made of it computes."""
    import qgraph

    pytest.importorskip("onnxruntime")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    module = transformers.LlamaForCausalLM(config).eval()
    module.save_pretrained(tmp_path / "f")
    out = tmp_path / "m.gguf"
    done = qgraph.export_checkpoint(tmp_path / "f", out, layout="gguf", format=spelled)
    assert done.files == [out]
    found = read_back(out)
    assert {found[name][0] for name in found if ".ffn_" in name and "norm" not in name} == kinds
    own = open_checkpoint(out)
    values = {name: entry.dequantized(0, entry.n) for name, entry in own.entries.items()}
    np.testing.assert_array_equal(found[UP][1], values[UP_HERE])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in values:
                parameter.copy_(torch.from_numpy(values[name]))
        ids = torch.arange(12).reshape(2, 6)
        want = module(input_ids=ids).logits.numpy()
    qgraph.import_checkpoint(out, tmp_path / "f", tmp_path / "m.onnx", accuracy_level=0)
    logits = qgraph.open(tmp_path / "m.onnx").run({"input_ids": ids.numpy()})["logits"]
    assert np.abs(logits - want).max() <= 1e-5 * np.abs(want).max()
