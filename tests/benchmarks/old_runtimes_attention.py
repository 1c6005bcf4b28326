"""Attention as numpy computes it, and the ops of ONNX Runtime that are to compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Told: TypeAlias = list[tuple[str, Array, bool] | None]
H, G, D = 4, 2, 32
"""Heads of queries, of keys and values, and elements of each."""
_SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
_SITUATIONS = {
    "prompt": (2, 0, 5), "chunk": (1, 4, 3), "chunks": (2, 4, 3), "step": (2, 4, 1),
    "padded_prompt": (2, 0, 5), "padded_chunk": (2, 4, 3), "padded_step": (2, 4, 1),
}  # fmt: skip
"""Rows of a batch, tokens in the cache, and new ones."""


def rotary(x: Array, positions: Array, cos: Array, sin: Array, pairs: bool) -> Array:
    """Heads `[B, H, S, D]` turned by a table `[rows, half]` at positions `[B, S]`."""
    c, s = cos[positions][:, None], sin[positions][:, None]
    half = cos.shape[1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairs:
        a, b = part[..., ::2], part[..., 1::2]
        turned = np.stack([a * c - b * s, a * s + b * c], -1).reshape(part.shape)
    else:
        a, b = part[..., :half], part[..., half:]
        turned = np.concatenate([a * c - b * s, a * s + b * c], -1)
    return np.concatenate([turned, rest], -1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    causal: bool = True,
    window: int = 0,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """softmax(q kᵀ / √D + mask) v over heads; keys are the last new ones and all before them.

    sinks: `[H]`, a score of each head that takes its share and has no value.
    """
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if cap:
        scores = cap * np.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    new, total = scores.shape[-2:]
    behind = total - new + np.arange(new)[:, None] - np.arange(total)
    hidden = (behind < 0) & causal
    if window:
        hidden |= behind >= window
    scores = np.where(hidden, -np.inf, scores)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return (weights / total) @ v


def attention_cases() -> Iterator[tuple[str, str, Told, dict[str, Array], float, dict[str, Any]]]:
    """Name, op, inputs, results, limit and attributes."""
    for situation in _SITUATIONS:
        padded = situation.startswith("padded")
        for positions, bias, queries in (
            (False, False, False), (True, False, False), (True, False, True), (True, True, False),
            (True, True, True), (None, False, False), (None, True, False),
        ):  # fmt: skip
            if padded and not (positions is not False and bias):
                continue
            yield _grouped(situation, positions, bias, queries)
    for name, more in (
        ("window", {"local_window_size": 2}), ("softcap", {"softcap": 2.0}),
        ("packed", {}), ("scale", {}), ("sinks", {}),
    ):  # fmt: skip
        for situation in ("prompt", "chunk", "step"):
            yield _grouped(situation, None, False, False, name, **more)
    for storage in ("int8.channel", "int8.tensor", "int4.channel"):
        for situation in ("prompt", "chunk", "step"):
            yield _grouped(situation, None, False, False, storage)
            yield _grouped(situation, None, False, True, storage)
        for situation in ("padded_prompt", "padded_step"):
            yield _grouped(situation, True, True, True, storage)
            if (storage, situation) != ("int4.channel", "padded_step"):  # which 1.27 has right
                yield _grouped(situation, None, True, False, storage)
        yield _halved(_grouped("step", None, False, False, storage))
    yield from _without_cache()
    yield from _multi_head()


def _grouped(
    situation: str,
    positions: bool | None,
    biased: bool,
    queries: bool,
    variant: str = "",
    **attributes: Any,
) -> tuple[str, str, Told, dict[str, Array], float, dict[str, Any]]:
    """GroupQueryAttention with a cache.

    positions: whether it is told them; None where it does not turn heads at all.
    """
    batch, past, new = _SITUATIONS[situation]
    total = past + new
    make = np.random.default_rng(0).standard_normal
    q, k, v = (make((batch, n, new, D)).astype(np.float32) for n in (H, G, G))
    cache = [make((batch, G, past, D)).astype(np.float32) for _ in range(2)]
    padding = np.array([0, 2]) if situation.startswith("padded") else np.zeros(batch, np.int64)
    places = np.maximum(past + np.arange(new)[None] - padding[:, None], 0)
    angles = np.outer(np.arange(16), 10000.0 ** -(np.arange(D // 2) / (D // 2)))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rq, rk = q, k
    if positions is not None:
        rq, rk = (rotary(each, places, cos, sin, False) for each in (q, k))
        attributes["do_rotary"] = 1
    hidden = np.where(np.arange(total)[None] < padding[:, None], np.finfo(np.float32).min, 0)
    bias = np.broadcast_to(hidden[:, None, None], (batch, 1, new, total)).astype(np.float32)
    scales: list[Array] = []
    stored, presents = cache, [np.concatenate(each, 2) for each in zip(cache, (rk, v), strict=True)]
    read = presents
    limit = 1e-4
    if variant.startswith("int"):
        stored, presents, read, scales, limit = _rounded(variant, cache, presents, past)
        kind = "PER_CHANNEL" if "channel" in variant else "PER_TENSOR"
        attributes |= {"kv_cache_bit_width": int(variant[3]), "k_quant_type": kind,
                       "v_quant_type": kind}  # fmt: skip
    if variant == "scale":
        rq, attributes["scale"] = 2 * rq, 2 / np.sqrt(D)
    y = attend(
        rq, *read, bias if biased else None,
        window=attributes.get("local_window_size", 0), cap=attributes.get("softcap", 0.0),
        sinks=_SINKS if variant == "sinks" else None,
    )  # fmt: skip
    unseen = past + np.arange(new) < padding[:, None]
    y = np.where(unseen[:, None, :, None], np.nan, y)  # what padding is given, nobody reads
    parts: Told = [("q", _flat(q), False), ("k", _flat(k), False), ("v", _flat(v), False)]
    if variant == "packed":
        whole = np.concatenate([_flat(each) for each in (q, k, v)], -1)
        parts = [("q", whole, False), None, None]
    lengths = np.full(batch, total - 1, np.int32), np.array([total], np.int32)
    told: Told = [
        *parts, ("past_key", stored[0], False), ("past_value", stored[1], False),
        ("last", lengths[0], False), ("total", lengths[1], False),
    ]  # fmt: skip
    if positions is not None:
        told += [("cos", cos, True), ("sin", sin, True)]
        told += [("places", places.astype(np.int64), False)] if positions else []
    told += [None] * (10 - len(told))
    told += [("bias", bias, False) if biased else None]
    told += [("sinks", _SINKS, True) if variant == "sinks" else None]
    told += [("k_scale", scales[0], True), ("v_scale", scales[1], True)] if scales else [None] * 2
    told += [None, None, ("new", np.full(batch, new, np.int32), False) if queries else None]
    while told[-1] is None:
        told.pop()
    names = [variant] if variant else []
    names += ["rotary"] if positions is not None else ["turned"] if not variant else []
    names += ["positions"] if positions else []
    names += ["bias"] if biased else []
    names += ["queries"] if queries else []
    name = f"gqa.cache.{'+'.join(names)}.{situation}"
    results = {"y": _flat(y).astype(np.float32), "key": presents[0], "value": presents[1]}
    attributes |= {"num_heads": H, "kv_num_heads": G}
    return name, "GroupQueryAttention", told, results, limit, attributes


def _halved(
    case: tuple[str, str, Told, dict[str, Array], float, dict[str, Any]],
) -> tuple[str, str, Told, dict[str, Array], float, dict[str, Any]]:
    """The case in float16; scales of a cache are float32 there too."""
    name, op, told, results, limit, attributes = case

    def half(array: Array) -> Array:
        return array.astype(np.float16) if array.dtype == np.float32 else array

    given: Told = [
        None if each is None else
        (each[0], each[1] if each[0].endswith("_scale") else half(each[1]), each[2])
        for each in told
    ]  # fmt: skip
    found = {key: half(array) for key, array in results.items()}
    return f"{name}.float16", op, given, found, limit, attributes


def _flat(heads: Array) -> Array:
    return heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1)


def _rounded(
    variant: str, cache: list[Array], presents: list[Array], past: int
) -> tuple[list[Array], list[Array], list[Array], list[Array], float]:
    """Codes in the cache; scales are of keys and values as a whole, or one to a channel."""
    most = 127 if variant.startswith("int8") else 7
    stored, codes, read, scales = [], [], [], []
    for whole in presents:
        span = np.abs(whole).max((0, 2), keepdims=True) if "channel" in variant else 4.0
        scale = np.broadcast_to(np.asarray(span, np.float32) / most, (1, G, 1, D))
        found = np.clip(np.rint(whole / scale), -most - 1, most).astype(np.int8)
        read.append(found * scale)
        scales.append(scale.copy() if "channel" in variant else scale.reshape(-1)[:1].copy())
        if most == 7:
            found = found + 8
            found = (found[..., ::2] | found[..., 1::2] << 4).astype(np.uint8)
        codes.append(found)
        stored.append(found[:, :, :past])
    return stored, codes, read, scales, 2e-2


def _without_cache() -> Iterator[tuple[str, str, Told, dict[str, Array], float, dict[str, Any]]]:
    make = np.random.default_rng(1).standard_normal
    batch, new = 2, 5
    q, k, v = (make((batch, n, new, D)).astype(np.float32) for n in (H, G, G))
    angles = np.outer(np.arange(16), 10000.0 ** -(np.arange(D // 2) / (D // 2)))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    bias = make((batch, 1, new, new)).astype(np.float32)
    for turned, biased, causal in (
        (True, False, True), (True, True, True), (False, False, True), (False, True, True),
        (False, False, False), (False, True, False),
    ):  # fmt: skip
        rq, rk = q, k
        places = np.broadcast_to(np.arange(new), (batch, new))
        if turned:
            rq, rk = (rotary(each, places, cos, sin, False) for each in (q, k))
        y = attend(rq, rk, v, bias if biased else None, causal)
        told: Told = [
            ("q", _flat(q), False), ("k", _flat(k), False), ("v", _flat(v), False), None, None,
            ("last", np.full(batch, new - 1, np.int32), False),
            ("total", np.array([new], np.int32), False),
        ]  # fmt: skip
        told += [("cos", cos, True), ("sin", sin, True)] if turned else []
        if biased:
            told += [None] * (10 - len(told))
            told.append(("bias", bias, False))
        attributes = {"num_heads": H, "kv_num_heads": G}
        attributes |= {"do_rotary": 1} if turned else {}
        attributes |= {} if causal else {"causal": 0}
        names = ["rotary"] * turned + ["bias"] * biased + ["not_causal"] * (not causal)
        name = f"gqa.{'+'.join(names) or 'plain'}"
        yield (
            name,
            "GroupQueryAttention",
            told,
            {"y": _flat(y).astype(np.float32)},
            1e-4,
            attributes,
        )


def _multi_head() -> Iterator[tuple[str, str, Told, dict[str, Array], float, dict[str, Any]]]:
    make = np.random.default_rng(2).standard_normal
    q, k, v = (make((2, H, n, D)).astype(np.float32) for n in (5, 6, 6))
    bias = make((2, H, 5, 6)).astype(np.float32)
    for name, given in (("", None), (".bias", bias), (".one_row", bias[:, :1])):
        y = _flat(attend(q, k, v, given, causal=False))
        told: Told = [("q", _flat(q), False), ("k", _flat(k), False), ("v", _flat(v), False)]
        told += [None, None, ("bias", given, False)] if given is not None else []
        yield (
            f"mha{name}",
            "MultiHeadAttention",
            told,
            {"y": y.astype(np.float32)},
            1e-4,
            {"num_heads": H},
        )
