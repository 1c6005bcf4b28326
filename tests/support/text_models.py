"""A tiny Llama with a cache as ONNX, a byte tokenizer, and a decoder made of ONNX Runtime's ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<end>", "<begin>", "<user>")
END = 256
VOCABULARY = 272
POSITIONS = 96
TEMPLATE = (
    "{% for message in messages %}\n"
    "<user>{{ message['role'] }}: {{ message['content'] }}<end>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<user>{% endif %}"
)


def byte_tokenizer(folder: Path) -> Path:
    """256 bytes, each a token of its own, and three special tokens; with a config beside it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *SPECIALS]
    encoder = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(list(SPECIALS))
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "bos_token": "<begin>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "tokenizer.json"


def tiny_llama(path: Path, past: bool = True, plain: bool = True) -> Any:
    """Write a random Llama of two layers as ONNX; the transformers model that it is of.

    Without a past it is exported `plain` (opset 23, one op for attention), or by the exporter's
    defaults.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from qgraph.models.llama_torch import Decoder

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    llama = LlamaForCausalLM(config).eval()
    weights = ((name, value.numpy()) for name, value in llama.state_dict().items())
    decoder = Decoder(config, weights)
    model = decoder.export_past() if past else decoder.export(plain)
    ir.save(model, path)
    return llama


def attention_decoder(path: Path, *, measures_past: bool = False, padded: bool = False) -> Path:
    """Embedding, one GroupQueryAttention with a cache, and a head; two heads of 16 on one.

    measures_past: the number of tokens is taken from the past's shape, not from the mask.
    padded: the last axis of the cache is open, as some builders leave it.
    """
    rng = np.random.default_rng(0)
    head, heads, wide = 16, 2, 64
    floats = {
        "table": rng.standard_normal((VOCABULARY, 32)),
        "qkv": rng.standard_normal((32, wide)) / 6,
        "out": rng.standard_normal((32, VOCABULARY)) / 3,
        "cos": np.cos(np.arange(POSITIONS)[:, None] / 10 ** (np.arange(8) / 4)),
        "sin": np.sin(np.arange(POSITIONS)[:, None] / 10 ** (np.arange(8) / 4)),
    }
    constants = [
        *(numpy_helper.from_array(v.astype(np.float32), name) for name, v in floats.items()),
        numpy_helper.from_array(np.array(1, np.int64), "one"),
        numpy_helper.from_array(np.array(2, np.int64), "two"),
        numpy_helper.from_array(np.array([1], np.int64), "axis"),
    ]
    node = helper.make_node
    total = [
        node("Shape", ["attention_mask"], ["sizes"]),
        node("Gather", ["sizes", "one"], ["total"]),
    ]
    if measures_past:
        total = [
            node("Shape", ["past_0_key"], ["sizes"]),
            node("Gather", ["sizes", "two"], ["before"]),
            node("Shape", ["input_ids"], ["new_sizes"]),
            node("Gather", ["new_sizes", "one"], ["new"]),
            node("Add", ["before", "new"], ["total"]),
        ]
    cached = ["cos", "sin"]
    nodes = [
        *total,
        node("ReduceSum", ["attention_mask", "axis"], ["count"], keepdims=0),
        node("Sub", ["count", "one"], ["last"]),
        node("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        node("Cast", ["total"], ["total32"], to=TensorProto.INT32),
        node("Gather", ["table", "input_ids"], ["x"]),
        node("MatMul", ["x", "qkv"], ["packed"]),
        node(
            "GroupQueryAttention",
            ["packed", "", "", "past_0_key", "past_0_value", "seqlens", "total32", *cached],
            ["attended", "present_0_key", "present_0_value"],
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=1,
            do_rotary=1,
        ),
        node("MatMul", ["attended", "out"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    size: int | str = "size" if padded else head
    parts = ("key", "value")
    ids = [info(name, TensorProto.INT64, ["B", dim]) for name, dim in
           (("input_ids", "T"), ("attention_mask", "all"))]  # fmt: skip
    pasts = [info(f"past_0_{part}", TensorProto.FLOAT, ["B", 1, "P", size]) for part in parts]
    presents = [
        info(f"present_0_{part}", TensorProto.FLOAT, ["B", 1, "all", size]) for part in parts
    ]
    logits = info("logits", TensorProto.FLOAT, ["B", "T", VOCABULARY])
    graph = helper.make_graph(nodes, "small", [*ids, *pasts], [logits, *presents], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path
