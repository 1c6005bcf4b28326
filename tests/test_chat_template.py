"""Chat templates: the conventions they are written for, and what the sandbox keeps from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qgraph.chat_template import read_messages, render
from qgraph.errors import InputError

MESSAGES = [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "<b>"}]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n<|{{ m.role }}|>{{ m['content'] | trim }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}S\n{% endif %}"
    "{{ m | tojson }}{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "  {%- set x = namespace(n=0) %}\n  {% for m in messages %}\n    {% set x.n = x.n + 1 %}\n"
    "  {% endfor %}\n{{ x.n }} of {{ messages | length }}{# note #}\nend",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(template, MESSAGES, {"bos_token": "<s>"}) == wanted


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for %}", "fails on these messages: .*line 1"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | length }}", "OverflowError|Range"),
        ("{{ messages[9].role }}", "no element 9|undefined"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(template, MESSAGES, {})


def test_messages_are_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(MESSAGES), encoding="utf-8")
    assert read_messages(path) == MESSAGES


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is no JSON"),
        ("[]", "wanted a list of messages"),
        ('{"role": "user"}', "wanted a list of messages"),
        ('[{"content": "x"}]', "message 1 has no role"),
        (b"\xff", "is no JSON"),
        (None, "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "m.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_messages(path)


def test_marks_of_answers_are_taken_as_the_text_that_they_enclose() -> None:
    template = "a{% generation %}{{ messages[0].content }}{% endgeneration %}b"
    assert render(template, MESSAGES, {}) == "aHi éb"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * (10 ** 11) }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_template_counts_and_repeats_within_bounds(template: str) -> None:
    with pytest.raises(InputError, match="1,000,000 is the most"):
        render(template, MESSAGES, {})
    assert render("{{ 2 ** 10 * 3 }}{{ '-' * 3 }}{{ range(3) | list }}", MESSAGES, {}) == (
        "3072---[0, 1, 2]"
    )
