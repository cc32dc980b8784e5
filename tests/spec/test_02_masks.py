"""Only what the assistant says is supervised, exact to the token; a template that cannot say so is refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.spec.running import RECIPE, run

ROWS = [
    {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
    ]},
]  # fmt: skip
SUPERVISED = {"all": ["two", "four"], "last": ["four"]}


def inspected(*flags: str, code: int = 0) -> tuple[str, str]:
    """What ``data inspect`` says of :data:`ROWS`."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return run("data", "inspect", *RECIPE, "--data.train", "rows.jsonl", *flags, code=code)


def marked(text: str) -> list[str]:
    """What stands between the brackets of supervised tokens, line by line."""
    samples = text.partition("━━ ")[2]  # after the legend
    return [part.partition("⟧")[0] for part in samples.split("⟦")[1:]]


def test_the_assistants_turns_alone() -> None:
    for word, wanted in SUPERVISED.items():
        out, _ = inspected("--data.supervise", word)
        assert marked(out) == [f"{said}<|im_end|>" for said in wanted], word


def test_a_template_that_hides_what_was_said_is_refused() -> None:
    Path("upper.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}")
    said = inspected("--data.chat_template", "upper.jinja", code=1)[1]
    assert "rows.jsonl:1" in said


def test_nothing_to_learn_is_refused() -> None:
    Path("user.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "alone"}]}))
    said = run("data", "inspect", *RECIPE, "--data.train", "user.jsonl", code=1)[1]
    assert "user.jsonl" in said
