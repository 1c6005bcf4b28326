"""`qgraph generate`: a prompt in, a text out as it is made, and how fast it was."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qgraph.cli.options import RunTarget, Threads, print_json
from qgraph.errors import InputError
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.generation import Generation

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file of a decoder.")]
PromptText = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="The text to go on from.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message, for the chat template.")
]
Messages = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help='Instead of a prompt: a list of {"role": …, "content": …}, for the chat template.',
    ),
]
Batch = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Instead of a prompt: a text whose lines are prompts."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="The tokenizer.json, or the Hugging Face folder that holds it; by default the "
        "model's folder.",
    ),
]
MaxTokens = Annotated[
    int, typer.Option(metavar="N", min=1, max=1_000_000, help="At most so many tokens a prompt.")
]
Temperature = Annotated[
    float, typer.Option(metavar="T", min=0.0, help="0 takes the most likely token each time.")
]
TopK = Annotated[
    int, typer.Option(metavar="K", min=0, help="Only the K most likely tokens; 0: all.")
]
TopP = Annotated[
    float,
    typer.Option(metavar="P", help="Only the fewest tokens that have probability P together."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="For temperatures above 0.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the answer; repeatable.")
]
StopToken = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKEN",
        help="A token, or its number, that ends it besides those that generation_config.json, "
        "config.json or tokenizer_config.json name; repeatable.",
    ),
]
CacheLayout = Annotated[
    str,
    typer.Option(
        metavar="LAYOUT",
        help="Keep a float cache in fewer bits between steps, to see what that costs: fp8, one "
        "scale to a head; kivi8, kivi4, kivi2: keys by channel, values by token.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print tokens, texts and speeds as JSON, at the end.")
]
_LAYOUT = "\n\t"
"""Control characters that a terminal may be shown."""


def generate(
    model: Model,
    prompt: PromptText = None,
    chat: Chat = False,
    messages: Messages = None,
    batch: Batch = None,
    tokenizer: Tokenizer = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    stop_token: StopToken = None,
    target: RunTarget = "ort-cpu",
    threads: Threads = 0,
    cache_layout: CacheLayout = "",
    as_json: Json = False,
) -> None:
    """Continue a prompt with MODEL, and print the text as it is made.

    Example: qgraph generate model.int4.onnx --tokenizer FOLDER --chat --prompt "Who are you?"
    """
    _check(prompt, messages, batch)
    from qgraph import console
    from qgraph.generating import TextModel, whole_text
    from qgraph.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    given = _given(prompt, messages, batch)
    if prompt is not None:
        whole_text(prompt)  # before the model is loaded
    with console.Stages(console.messages()) as stages:
        stages.stage("loading the model")
        loaded = TextModel(
            model, tokenizer, target=target, threads=threads, cache_layout=cache_layout
        )
    found = loaded.generate(
        given,
        sampling,
        max_tokens=max_tokens,
        stop=stop or (),
        stop_tokens=[int(each) if each.isdecimal() else each for each in stop_token or ()],
        chat=chat,
    )
    if as_json:
        print_json(found.finish().to_json())
    elif len(found.rows) == 1:
        _stream(found)
    else:
        _print_all(found.finish())
    for note in found.notes:
        console.print_line(console.messages(), f"note: {note}")
    console.print_line(console.messages(), _speeds(found))


def _check(prompt: str | None, messages: Path | None, batch: Path | None) -> None:
    given = [each for each in (prompt, messages, batch) if each is not None]
    if len(given) != 1:
        raise InputError(
            "wanted --prompt TEXT, --messages FILE.json or --batch FILE: one of the three"
        )


def _given(prompt: str | None, messages: Path | None, batch: Path | None) -> Any:
    if messages is not None:
        from qgraph.chat_template import read_messages

        return read_messages(messages)
    if batch is None:
        return prompt
    try:
        lines = batch.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"--batch {batch} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"--batch {batch} cannot be read: {error.strerror}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--batch {batch} has no lines: write one prompt a line")
    return prompts


def _stream(found: Generation) -> None:
    shown = _shown if sys.stdout.isatty() else str
    for piece in found:
        sys.stdout.write(shown(piece.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_all(found: Generation) -> None:
    shown = _shown if sys.stdout.isatty() else str
    for at, text in enumerate(found.texts, 1):
        sys.stdout.write(f"--- {at} of {len(found.rows)}\n{shown(text)}\n")


def _shown(text: str) -> str:
    """What a terminal may be shown of a model's text, which may hold anything."""
    from qgraph.console import escape

    return "".join(
        character if character in _LAYOUT or unicodedata.category(character)[0] != "C"
        else escape(character)
        for character in text
    )  # fmt: skip


def _speeds(found: Generation) -> str:
    times = found.timings
    made = sum(len(row.tokens) for row in found.rows)
    stops = ", ".join(dict.fromkeys(row.stop for row in found.rows))
    parts = [
        f"prompt {counted(times.prompt_tokens, 'token')}, {times.prompt_speed:.1f} tokens/s",
        f"first token after {times.first_seconds:.2f} s",
        f"{counted(made, 'token')} made" + (f", {times.speed:.1f} tokens/s" if times.steps else ""),
        f"ended by {stops}",
    ]
    return " · ".join(parts)
