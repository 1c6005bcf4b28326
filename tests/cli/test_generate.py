"""`qgraph generate`: text as it is made, JSON, batches, wrong usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_models import attention_decoder, byte_tokenizer

from qgraph.cli.generate import _shown

Command = Callable[..., Any]


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    byte_tokenizer(tmp_path)
    return attention_decoder(tmp_path / "model.onnx")


def test_text_goes_to_stdout_and_speeds_to_stderr(qgraph: Command, decoder: Path) -> None:
    ran = qgraph("generate", decoder, "--prompt", "abc", "--max-tokens", 5)
    assert ran.status == 0, ran.err
    told = qgraph("generate", decoder, "--prompt", "abc", "--max-tokens", 5, "--json")
    found = json.loads(told.out)
    assert ran.out == found["rows"][0]["text"] + "\n"
    assert (found["schema"], len(found["rows"][0]["tokens"])) == (1, 5)
    assert found["rows"][0]["stop"] == "length"
    last = ran.err.splitlines()[-1]
    assert last.startswith("prompt 3 tokens, ") and "5 tokens made, " in last
    assert last.endswith("ended by length")


def test_a_seed_repeats_and_a_temperature_draws(qgraph: Command, decoder: Path) -> None:
    def made(*options: object) -> list[int]:
        ran = qgraph("generate", decoder, "--prompt", "abc", "--max-tokens", 8, "--json", *options)
        assert ran.status == 0, ran.err
        tokens: list[int] = json.loads(ran.out)["rows"][0]["tokens"]
        return tokens

    drawn = made("--temperature", 2, "--top-k", 50, "--top-p", 0.99, "--seed", 1)
    assert drawn == made("--temperature", 2, "--top-k", 50, "--top-p", 0.99, "--seed", 1)
    assert drawn != made("--temperature", 2, "--top-k", 50, "--top-p", 0.99, "--seed", 2)
    assert made("--temperature", 2, "--top-k", 1) == made()


def test_lines_of_a_file_are_a_batch(qgraph: Command, decoder: Path, tmp_path: Path) -> None:
    batch = tmp_path / "prompts.txt"
    batch.write_text("abc\n\ndef\n")
    ran = qgraph("generate", decoder, "--batch", batch, "--max-tokens", 3)
    assert ran.status == 0, ran.err
    assert [line for line in ran.out.splitlines() if line.startswith("--- ")] == [
        "--- 1 of 2",
        "--- 2 of 2",
    ]
    assert "6 tokens made" in ran.err


def test_chats_come_from_a_prompt_or_from_messages(
    qgraph: Command, decoder: Path, tmp_path: Path
) -> None:
    messages = tmp_path / "m.json"
    messages.write_text('[{"role": "user", "content": "Hi"}]')
    one = qgraph("generate", decoder, "--chat", "--prompt", "Hi", "--max-tokens", 3, "--json")
    two = qgraph("generate", decoder, "--messages", messages, "--max-tokens", 3, "--json")
    first, second = (json.loads(ran.out)["rows"][0] for ran in (one, two))
    assert first == second
    assert first["prompt_tokens"] == len("user: Hi\n") + 3  # three special tokens


def test_a_stop_token_is_a_number_or_a_text(qgraph: Command, decoder: Path) -> None:
    base = ("generate", decoder, "--prompt", "abc", "--max-tokens", 4, "--json")
    first = json.loads(qgraph(*base).out)["rows"][0]["tokens"][0]
    row = json.loads(qgraph(*base, "--stop-token", first).out)["rows"][0]
    assert (row["tokens"], row["stop"], row["text"]) == ([first], "end", "")
    ran = qgraph(*base, "--stop-token", "<nothing>")
    assert (ran.status, "no token '<nothing>'" in ran.err) == (2, True)


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "wanted --prompt TEXT, --messages FILE.json or --batch FILE"),
        (("--prompt", "x", "--batch", "f"), "one of the three"),
        (("--prompt", " "), "the prompt is empty"),
        (("--batch", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--prompt", "x", "--target", "ort-cup"), "did you mean 'ort-cpu'"),
        (("--prompt", "x", "--top-p", "0"), "top-p 0.0: wanted a number above 0"),
        (("--prompt", "x", "--tokenizer", "nowhere"), "no tokenizer.json at nowhere"),
    ],
)
def test_wrong_usage_is_told(
    qgraph: Command, decoder: Path, options: tuple[str, ...], message: str
) -> None:
    ran = qgraph("generate", decoder, *options)
    assert ran.status == 2
    assert message in ran.err


def test_a_model_without_tokens_names_the_way_out(
    qgraph: Command, model: Path, tmp_path: Path
) -> None:
    byte_tokenizer(tmp_path)
    ran = qgraph("generate", model, "--prompt", "x")
    assert ran.status == 2
    assert "takes no token ids [batch, tokens]: its inputs are x float32 [rows, 128]" in ran.err


def test_a_terminal_is_shown_no_control_characters() -> None:
    assert _shown("a\tb\n\x1b[2J\u202ec\x07é") == "a\tb\n\\x1b[2J\\u202ec\\x07é"


def test_bench_decode_measures_sides_in_turn(qgraph: Command, decoder: Path) -> None:
    ran = qgraph(
        "bench", decoder, "--against", decoder, "--decode", "--prompt-tokens", 8,
        "--new-tokens", 4, "--rounds", 3, "--format", "json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert (found["prompt_tokens"], found["new_tokens"], found["rounds"]) == (8, 4, 3)
    first, second = found["sides"]
    assert second["name"] == f"{decoder} (2)"
    assert first["shared"] and first["cached"]
    assert first["peak_mb"]["loaded"] <= first["peak_mb"]["prompt"] <= first["peak_mb"]["end"]
    assert len(second["rounds_token_ms"]) == 3
    assert second["decode_ratio"]["low"] <= second["decode_ratio"]["high"]
    assert first["decode_ratio"]["value"] == 1
    assert found["memory"] is True


def test_bench_decode_may_leave_memory_out(qgraph: Command, decoder: Path) -> None:
    numbers = ("--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 3)
    table = qgraph("bench", decoder, "--decode", *numbers, "--no-memory")
    lines = table.out.splitlines()
    assert lines[2] == "a prompt of 8 tokens, then 2 tokens one by one"
    assert lines[-2].endswith("shared buffer")
    assert lines[-1] == "peak memory was left out (--no-memory)"
    assert "measuring memory" not in table.err
    told = qgraph("bench", decoder, "--decode", *numbers, "--no-memory", "--format", "json")
    found = json.loads(told.out)
    assert (found["memory"], found["sides"][0]["peak_mb"]) == (False, None)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--decode", "--rows", "1"), "--rows does not go with --decode"),
        (("--decode", "--no-sites"), "--sites does not go with --decode"),
        (("--new-tokens", "4"), "--new-tokens goes only with --decode"),
        (("--no-memory",), "--memory goes only with --decode"),
        (("--decode", "--prompt-tokens", "96"), "has 96 positions, and 96 + 64 tokens need more"),
    ],
)
def test_bench_decode_refuses_what_makes_no_sense(
    qgraph: Command, decoder: Path, options: tuple[str, ...], message: str
) -> None:
    ran = qgraph("bench", decoder, *options)
    assert (ran.status, message in ran.err) == (2, True), ran.err
