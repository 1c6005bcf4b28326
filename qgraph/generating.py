"""`generate`: text in, text out, token by token, through a runtime with the model's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qgraph import registry
from qgraph.capturing import Source, runnable
from qgraph.chat_template import Message, check_messages, render
from qgraph.decoders import open_decoder
from qgraph.errors import InputError
from qgraph.generation import Generation, Request
from qgraph.sampling import Sampling, require_whole
from qgraph.text import known_tokens, load_tokenizer
from qgraph.tokenizer_files import TokenizerFiles
from qgraph.tokenizer_fit import small_tokenizer
from qgraph.wording import counted

if TYPE_CHECKING:
    from qgraph.runtimes.base import Runtime

Prompt: TypeAlias = "str | Sequence[Message]"
MAX_TOKENS = 256
_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_CACHE = (
    "the model has no cache (no past_key_values): every token reads the whole text again; "
    "an export with past_key_values is far faster"
)


def generate(
    model: Source,
    prompt: Prompt | Sequence[Prompt],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int | str] = (),
    chat: bool = False,
    target: str = "ort-cpu",
    threads: int = 0,
    cache_layout: str = "",
) -> Generation:
    """Continue a prompt with a decoder; the result yields pieces of text as they are made.

    Args:
        model: a path, a graph, or what else `capture` takes without an example.
        prompt: a text, or messages `[{"role": …, "content": …}]`, which the model's chat
            template makes into one; a list of several is a batch.
        tokenizer: the tokenizer.json, or the folder that holds it; None: the model's folder.
        max_tokens: at most so many per prompt.
        temperature, top_k, top_p, seed: see `Sampling`; by default the most likely token.
        stop: texts that end the answer, and are no part of it.
        stop_tokens: tokens (ids, or their texts) that end it besides those that the files beside
            the tokenizer name.
        chat: a text is a user's message, for the chat template.
        target: what runs the model.
        threads: within an operator; 0 is the runtime's own choice.
        cache_layout: keep the cache as "fp8" (a scale to a head), or "kivi8", "kivi4", "kivi2"
            (keys by channel, values by token) between steps; empty: in floats, as it is.

    Raises:
        InputError: no decoder, no tokenizer, one that does not fit the model, an empty prompt,
            or one longer than the model's positions.
        MissingExtra: a package is not installed.
    """
    found = TextModel(model, tokenizer, target=target, threads=threads, cache_layout=cache_layout)
    return found.generate(
        prompt,
        Sampling(temperature, top_k, top_p, seed),
        max_tokens=max_tokens,
        stop=stop,
        stop_tokens=stop_tokens,
        chat=chat,
    )


class TextModel:
    """A decoder and its tokenizer, loaded once for any number of prompts; see `generate`.

    notes: what a user would not expect.
    """

    def __init__(
        self,
        model: Source,
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        target: str = "ort-cpu",
        threads: int = 0,
        cache_layout: str = "",
    ) -> None:
        self.runtime: Runtime = registry.load("target", target)
        source = runnable(model)
        folder = source.absolute().parent if isinstance(source, Path) else None
        if tokenizer is None and folder is None:
            raise InputError("a graph in memory has no folder: name its tokenizer")
        where = Path(tokenizer) if tokenizer is not None else folder
        assert where is not None
        self.files = TokenizerFiles(where, folder)
        self.encoder: Any = load_tokenizer(self.files.path)
        opened = open_decoder(self.runtime, source, threads, cache_layout)
        self.decoder, self.vocabulary = opened.decoder, opened.vocabulary
        limits = [size for size in (opened.positions, self.files.positions()) if size]
        self.positions = min(limits, default=None)
        small = small_tokenizer(known_tokens(self.encoder), self.vocabulary)
        self.notes = (*small, *(() if self.decoder.io.cache else (_NO_CACHE,)))

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int | str] = (),
        chat: bool = False,
    ) -> Generation:
        """Continue one prompt, or a list of them; see the function `generate`."""
        require_whole(max_tokens, "max tokens")
        if max_tokens < 1:
            raise InputError(f"max tokens {max_tokens}: wanted 1 or more")
        if isinstance(stop, str):
            raise InputError(f"stop is the text {stop!r}: wanted a list of texts")
        for each in stop:
            if not isinstance(each, str):
                raise InputError(f"stop has {each!r}: wanted texts")
            whole_text(each, "the stop text")
        ends = frozenset(self.files.ends(self.encoder) | self._named_ends(stop_tokens))
        prompts = tuple(self.encode(each, chat) for each in _prompts(prompt))
        how = sampling or Sampling()
        request = Request(prompts, how, max_tokens, tuple(stop), ends, self.positions)
        notes = list(self.notes)
        if not ends:
            notes.append(
                f"no file beside {self.files.path.name} names a token that ends a text: it goes on "
                "to the last token; name one with --stop-token"
            )
        return Generation(self.decoder, self.encoder, request, tuple(notes))

    def encode(self, prompt: Prompt, chat: bool = False) -> tuple[int, ...]:
        """The tokens of a prompt.

        Raises:
            InputError: it is empty, too long, or has tokens that the model does not have.
        """
        if isinstance(prompt, str) and not prompt.strip():
            raise InputError("the prompt is empty: give some text to go on from")
        if chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            ids = self.encoder.encode(whole_text(prompt)).ids
        else:
            # The template writes special tokens itself.
            text = whole_text(self._chat(prompt))
            ids = self.encoder.encode(text, add_special_tokens=False).ids
        if not ids:
            raise InputError("the prompt has no tokens: give some text to go on from")
        if self.vocabulary is not None and max(ids) >= self.vocabulary:
            raise InputError(
                f"the tokenizer {self.files.path} makes token {max(ids)}, and the model has tokens "
                f"below {self.vocabulary}: it belongs to another model; give --tokenizer"
            )
        if self.positions is not None and len(ids) >= self.positions:
            raise InputError(
                f"the prompt has {counted(len(ids), 'token')}, and the model has "
                f"{counted(self.positions, 'position')}, of which the answer needs one: shorten "
                "the prompt"
            )
        return tuple(ids)

    def _chat(self, messages: Sequence[Message]) -> str:
        check_messages(messages, "the prompt")
        specials = {name: self.files.special(name) for name in _SPECIALS}
        return render(self.files.template(), messages, specials)

    def _named_ends(self, tokens: Sequence[int | str]) -> dict[int, str]:
        found = {}
        for token in tokens:
            if isinstance(token, str):
                whole_text(token, "the stop token")
            known = token if isinstance(token, int) else self.encoder.token_to_id(token)
            if known is None:
                raise InputError(
                    f"the tokenizer {self.files.path} has no token {token!r}: give a token's "
                    "text as the tokenizer spells it, or --stop TEXT"
                )
            size = self.vocabulary if self.vocabulary is not None else known + 1
            if not 0 <= known < size:
                raise InputError(f"stop token {known}: the model has tokens 0 to {size - 1}")
            found[int(known)] = "--stop-token"
        return found


def whole_text(text: str, what: str = "the prompt") -> str:
    """The text; half characters, which come of bytes that are no text, are refused.

    Raises:
        InputError: it has some.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} has {text[error.start]!r} at character {error.start + 1}, which is half "
            "a character: was it read from bytes that are no UTF-8?"
        ) from None
    return text


def _prompts(prompt: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a batch of one."""
    if not isinstance(prompt, str | Sequence):
        raise InputError(f"the prompt is {prompt!r}: wanted a text, messages, or a list of them")
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
        return (prompt,)  # type: ignore[return-value]
    if not prompt:
        raise InputError("no prompt was given: give some text to go on from")
    return prompt  # type: ignore[return-value]
