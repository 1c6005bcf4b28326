"""Messages as the text of a prompt, by a model's own chat template."""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from qgraph.errors import InputError, MissingExtra

Message: TypeAlias = Mapping[str, Any]
_MOST = 1_000_000
"""Steps of loops over numbers, and repetitions, of one text."""
_EXAMPLE = '[{"role": "user", "content": "…"}]'


def render(template: str, messages: Sequence[Message], specials: Mapping[str, str]) -> str:
    """The text of a conversation up to where the model's answer begins.

    The template comes with the model and is not trusted: it runs in Jinja's sandbox, where it
    reaches nothing but the messages, and counts and repeats within bounds.

    specials: the texts of special tokens, as `bos_token`.

    Raises:
        InputError: the template is damaged, refuses the messages, or reaches for more.
        MissingExtra: the package jinja2 is not installed.
    """
    environment = _environment()
    errors = importlib.import_module("jinja2").TemplateError
    try:
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, tools=None, **specials
        )
    except errors as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise InputError(
            f"the chat template fails on these messages: {error}{where}; write the prompt out "
            "with --prompt instead"
        ) from None
    except (
        TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError
    ) as error:  # fmt: skip
        raise InputError(
            f"the chat template fails on these messages: {type(error).__name__}: {error}"
        ) from None
    return str(text)


def _environment() -> Any:
    try:
        sandbox = importlib.import_module("jinja2.sandbox")
    except ImportError:
        raise MissingExtra(
            "jinja2", "text", "a chat template", "Or write the prompt out with --prompt."
        ) from None
    bounded, marked = _bounded(sandbox.ImmutableSandboxedEnvironment), _marked()
    # Blocks and comments leave no line breaks: what chat templates are written for.
    found = bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", marked]
    )
    found.globals["range"] = _counting()
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found


def _bounded(sandbox: Any) -> Any:
    """The sandbox, with products and powers of moderate size alone."""

    class Bounded(sandbox):  # type: ignore[misc]
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """See the base: what `left operator right` is."""
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__") and isinstance(other, int):
                    _require_few(len(one) * other)
            if operator == "**":
                _require_few(abs(right))
                _require_few(abs(left))
            return super().call_binop(context, operator, left, right)

    return Bounded


def _counting() -> Callable[..., range]:
    """`range`, which counts to so many in one text, in loops within loops too."""
    left = [_MOST]

    def counted(*ends: int) -> range:
        found = range(*ends)
        left[0] -= len(found)
        _require_few(_MOST - left[0])
        return found

    return counted


def _require_few(count: float) -> None:
    if count > _MOST:
        raise OverflowError(f"it counts or repeats to {count:,}, and {_MOST:,} is the most")


def _marked() -> Any:
    """Takes `{% generation %}`, which marks answers to train on, as the text that it encloses."""
    extension: Any = importlib.import_module("jinja2.ext").Extension
    scope = importlib.import_module("jinja2.nodes").Scope

    class Generation(extension):  # type: ignore[misc]
        tags = frozenset(["generation"])

        def parse(self, parser: Any) -> Any:
            """See the base: the node behind a tag."""
            line = next(parser.stream).lineno
            return scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)

    return Generation


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise importlib.import_module("jinja2").TemplateError(message)


def read_messages(path: Path) -> list[Message]:
    """The messages of a JSON file: a list of objects with `role` and `content`.

    Raises:
        InputError: anything else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--messages {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"--messages {path} is no JSON: {error}; wanted {_EXAMPLE}") from None
    check_messages(found, f"--messages {path}")
    return list(found)


def check_messages(found: Any, where: str) -> None:
    """Refuse what is no list of messages.

    Raises:
        InputError: it is none, or it is empty.
    """
    if not isinstance(found, list | tuple) or not found:
        raise InputError(f"{where}: wanted a list of messages, {_EXAMPLE}")
    for number, each in enumerate(found, 1):
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise InputError(f"{where}: message {number} has no role; wanted {_EXAMPLE}")
