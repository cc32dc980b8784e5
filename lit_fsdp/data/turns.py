"""Which characters of a rendered conversation the assistant says: exactly, or the row is refused.

A second rendering has tags around what each assistant turn says (text, thoughts, names of called tools) and in what
tools return. Without its tags it must be the same text, or the template does something else with this conversation and
the row is refused; with them it says where everything stands. What the assistant says then goes

- from where the model takes over, which is behind the generation prompt,
- to the special token behind what it says, which the model has to emit to stop, whether that ends this turn or, as in
  GLM-4, begins the next. A token that begins the assistant's own header is none.
- What a tool returned is cut out where a template shows it inside of the turn, as Gemma 4 does.

With ``{% generation %}`` marks the template says itself what is supervised, in one piece per turn or in several; the
tags then say which turn a mark belongs to, and whether the marks hold all that the turn says. Marks around the content
alone are extended to the special token behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from lit_fsdp.data.chat_template import ChatTemplate
from lit_fsdp.data.formats import Conversation, Message
from lit_fsdp.data.masks import Span
from lit_fsdp.errors import DataError

_TAG = re.compile("(\\s?)\ue000(\\d+)([a-z]\\d*)\ue001")
_PLACE = re.compile("\ue002(\\d+)\ue003")
_FIRST, _SAID, _EMPTY, _NAME, _RESULT = "s", "z", "e", "c", "t"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_HEADER_SIZE = 100
"""Characters before a turn among which the last special token of its header is."""
_MAX_KEPT = 4096


class _Tag(NamedTuple):
    """Where something that a message says begins or ends in the text."""

    position: int
    message: int
    kind: str


class _Rendered(NamedTuple):
    """One conversation as text, what stands where in it, and whether the template trims what is said."""

    conversation: Conversation
    text: str
    trims: bool
    tags: list[_Tag]


_Shape = list[tuple[str | int, bool]]
"""A conversation in pieces: a text that the template writes, or whose content stands here; and if it is supervised."""


class AssistantTurns:
    """Finds assistant turns in what one template renders; a special token of the tokenizer ends them."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        self._template = template
        self._tokens = {token for token in tokenizer.added_tokens_encoder if token}
        self._sizes = sorted({len(token) for token in self._tokens}, reverse=True)
        self._first = re.compile("|".join(sorted({re.escape(token[0]) for token in self._tokens})) or "(?!)")
        self._final = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {tokenizer.eos_token}
        self._bos, self._eos = tokenizer.bos_token, tokenizer.eos_token
        self._openings: dict[Any, tuple[str, str, bool]] = {}
        self._shapes: dict[Any, _Shape | None] = {}

    def find(self, conversation: Conversation, wanted: Sequence[int], location: str) -> tuple[str, list[Span]]:
        """The text of a conversation, and the characters of its ``wanted`` turns, ends of turn included.

        Messages have no keys of ours; the half-open ranges are in order and apart.

        Raises:
            DataError: The template refuses the row, or its turns cannot be told exactly.
        """
        text, marks = self._template.render(conversation, location)
        if not wanted:
            return text, []
        return text, self._by_shape(conversation, wanted, text, location) or self._by_tags(
            conversation, wanted, text, marks, location
        )

    def _by_tags(
        self, conversation: Conversation, wanted: Sequence[int], text: str, marks: list[Span] | None, location: str
    ) -> list[Span]:
        rendered = self._tagged(conversation, text, location)
        found = []
        for index in wanted:
            spans = self._derived(rendered, index) if marks is None else self._marked(rendered, index, marks)
            if not spans or not _shows_arguments("".join(text[a:b] for a, b in spans), conversation.messages[index]):
                raise _refusal(location, index)
            found += spans
        return _joined(found)

    def _by_shape(
        self, conversation: Conversation, wanted: Sequence[int], text: str, location: str
    ) -> list[Span] | None:
        """Spans by a conversation of the same roles, tagged once, if the text is that one's with its own contents."""
        if any(len(message) != 2 for message in conversation.messages):
            return None
        contents = [message["content"] for message in conversation.messages]
        roles = tuple((message["role"], not message["content"]) for message in conversation.messages)
        key = (roles, tuple(wanted), repr(conversation.tools), repr(conversation.template_kwargs))
        if key not in self._shapes:
            _make_room(self._shapes)
            self._shapes[key] = self._shape(conversation, wanted, location)
        shape = self._shapes[key]
        if shape is None:
            return None
        return _filled(shape, contents, text) or _filled(shape, [said.strip() for said in contents], text)

    def _shape(self, conversation: Conversation, wanted: Sequence[int], location: str) -> _Shape | None:
        blank = [
            {**m, "content": f"\ue002{i}\ue003" if m["content"] else ""} for i, m in enumerate(conversation.messages)
        ]
        shape = replace(conversation, messages=blank)
        try:
            text, marks = self._template.render(shape, location)
            spans = self._by_tags(shape, wanted, text, marks, location)
        except DataError:  # which is said of the row itself
            return None
        places = {match.span(): int(match[1]) for match in _PLACE.finditer(text)}
        cuts = sorted({0, len(text), *(at for span in (*spans, *places) for at in span)})
        return [(places.get((a, b), text[a:b]), any(s <= a and b <= e for s, e in spans)) for a, b in pairwise(cuts)]

    def _tagged(self, conversation: Conversation, text: str, location: str) -> _Rendered:
        """Render with tags, outside or inside of the blanks around what is said; the text must be the same."""
        for trims in (False, True):
            tagged = self._template.text_of(conversation, _with_tags(conversation.messages, trims))
            for takes_blank in (False, True):
                clean, tags = _read_tags(tagged or "", takes_blank)
                if clean == text:
                    return _Rendered(conversation, text, trims, tags)
        raise DataError(
            f"{location}: the chat template does something else with this conversation once its texts are tagged, so "
            "that assistant turns cannot be told from the rest\n"
            "  fix:     give data.chat_template with {% generation %} … {% endgeneration %} around what is supervised"
        )

    def _derived(self, rendered: _Rendered, index: int) -> list[Span] | None:
        """Spans of one turn of a template without marks; ``None`` if it does not show all that the turn says."""
        before, runs = _runs(rendered.tags, index)
        if not runs or not _is_whole(rendered.conversation.messages[index], [tag for run in runs for tag in run]):
            return None
        first = self._start(rendered, index, before, runs[0][0])
        if first is None:
            return None
        barred, spans = self._header_tokens(rendered, index, before, first), []
        for number, run in enumerate(runs):
            end, ended = run[-1].position, False
            if run[-1].kind[0] == _NAME:
                called = self._end_of_call(rendered, run[-1], barred)
                if called is None:
                    return None
                end, ended = called
            start = run[0].position if number else first
            spans.append((start, end if ended else self._through_token(rendered.text, end, barred)))
        return spans

    def _marked(self, rendered: _Rendered, index: int, marks: Sequence[Span]) -> list[Span] | None:
        """The marks of one turn, to the special token behind them; ``None`` if they do not hold what the turn says."""
        before, runs = _runs(rendered.tags, index)
        tags = [tag for run in runs for tag in run]
        if not tags or not _is_whole(rendered.conversation.messages[index], tags):
            return None
        spans = [mark for mark in marks if self._owner(rendered, mark) == index]
        last = next((span for span in reversed(spans) if span[0] <= tags[-1].position <= span[1]), None)
        if last is None or not all(any(a <= tag.position <= b for a, b in spans) for tag in tags if _is_said(tag)):
            return None
        behind = rendered.text[tags[-1].position : last[1]]
        is_call = tags[-1].kind[0] == _NAME
        ended = self._ends_turn(behind) if is_call else bool(self._tokens_in(behind, 0, len(behind)))
        if not ended:
            barred = self._header_tokens(rendered, index, before, spans[0][0])
            spans.append((last[1], self._through_token(rendered.text, last[1], barred)))
        return spans

    def _owner(self, rendered: _Rendered, mark: Span) -> int | None:
        """The turn that a mark belongs to; ``None`` if it holds something of several."""
        inside = {tag.message for tag in rendered.tags if mark[0] <= tag.position <= mark[1]}
        if inside:
            return inside.pop() if len(inside) == 1 else None
        begun = None
        for index in dict.fromkeys(tag.message for tag in rendered.tags if tag.kind != _RESULT):
            before, runs = _runs(rendered.tags, index)
            start = self._start(rendered, index, before, runs[0][0])
            if start is not None and start <= mark[0]:
                begun = index
        return begun

    def _start(self, rendered: _Rendered, index: int, before: int, first: _Tag) -> int | None:
        """Where the model takes over in a turn that says ``first`` first; ``None`` if the text does not show it.

        ``before`` is where what an earlier message says ends.
        """
        opening, header, is_prompt = self._opening(rendered.conversation, index)
        text, sought = rendered.text, opening or header
        # a turn that shows other thoughts than the generation prompt begins behind the header alone
        cuts = [len(sought), sought.find("<think>"), *(a for a, _ in reversed(self._tokens_in(sought, 1, len(sought))))]
        for cut in cuts if is_prompt else cuts[:1]:
            at = text.rfind(sought[:cut], before, first.position) if cut > 0 else -1
            if at >= 0:
                return at + cut
        if opening:
            return None if is_prompt or first.kind[0] == _NAME else first.position
        # no prompt and no header: the turn goes on, as after a tool's result
        conversation = rendered.conversation
        asked = self._template.text_of(conversation, conversation.messages[:index], generation_prompt=True) or ""
        goes_on = text.startswith(asked) and before <= len(asked) <= first.position
        return len(asked) if goes_on else first.position

    def _opening(self, conversation: Conversation, index: int) -> tuple[str, str, bool]:
        """What stands before a turn, the header in it, and whether this is the generation prompt.

        A template without generation prompts leaves the header to whoever asks, so that what the text has before such a
        turn is taken. All depend on the roles up to there, so that they are rendered once for each.
        """
        before, question = conversation.messages[:index], [{"role": "user", "content": "a"}]
        roles = tuple(message["role"] for message in before)
        key = roles, bool(conversation.tools), repr(conversation.template_kwargs)
        if key not in self._openings:
            _make_room(self._openings)
            usual = self._prompt(conversation, question)
            if usual:
                prompt = self._prompt(conversation, before)  # which some templates refuse before there is a question
                self._openings[key] = usual if prompt is None else prompt, prompt or usual, True
            else:
                self._openings[key] = *self._header(conversation, before or question), False
        return self._openings[key]

    def _prompt(self, conversation: Conversation, before: list[Message]) -> str | None:
        asked = self._template.text_of(conversation, before, generation_prompt=True)
        plain = self._template.text_of(conversation, before)
        if asked is None or plain is None:
            return None
        cut = _common(asked, plain)
        across = [a for a, b in self._tokens_in(asked, max(0, cut - _HEADER_SIZE), len(asked)) if a < cut < b]
        cut = across[0] if across else cut
        return asked[cut:].removesuffix(plain[cut:])

    def _header(self, conversation: Conversation, before: list[Message]) -> tuple[str, str]:
        """What stands between the last message and an answer to it, and the part of it that comes with the answer."""
        mark = "\ue000\ue001"
        last = {**before[-1], "content": before[-1]["content"] + mark}
        asked = self._template.text_of(conversation, [*before[:-1], last]) or ""
        answer = {"role": "assistant", "content": mark * 2}
        answered = self._template.text_of(conversation, [*before[:-1], last, answer]) or ""
        between, end = answered.partition(mark)[2].partition(mark * 2)[0], asked.partition(mark)[2]
        header = between[_common(between, end) :]
        return (between, header) if header.strip() else (between.removesuffix(header), "")

    def _header_tokens(self, rendered: _Rendered, index: int, before: int, start: int) -> set[str]:
        """Special tokens that begin a turn of the assistant's, and so cannot end one."""
        header, text = self._opening(rendered.conversation, index)[1], rendered.text
        tokens = [header[a:b] for a, b in self._tokens_in(header, 0, len(header))[:1]]
        # one behind an earlier message may be its end, which ends this one too
        if not tokens:
            tokens = [text[a:b] for a, b in self._tokens_in(text, max(before, start - _HEADER_SIZE), start)[-1:]]
        return {*tokens, self._bos} - {self._eos}

    def _end_of_call(self, rendered: _Rendered, last: _Tag, barred: set[str]) -> tuple[int, bool] | None:
        """Where the last call of a turn ends, and whether the turn does, by the same conversation up to there.

        ``None`` if the text shows it in another way.
        """
        messages = _with_tags(rendered.conversation.messages[: last.message + 1], rendered.trims)
        alone, tags = _read_tags(self._template.text_of(rendered.conversation, messages) or "", False)
        behind = [tag for tag in tags if tag.message == last.message]
        while behind and behind[0].kind != last.kind:
            behind = behind[1:]
        if not behind:
            return None
        tail = alone[behind[0].position : behind[1].position if len(behind) > 1 else None]
        same, end = _common(tail, rendered.text[last.position :]), 0
        for a, b in self._tokens_in(tail, 0, len(tail)):
            if b > same or tail[a:b] in barred:
                break
            end = b
        if not end and same >= len(tail.rstrip()):  # without a special token of its own
            end = len(tail.rstrip())
        return (last.position + end, len(behind) == 1 and self._ends_turn(tail[:end])) if end else None

    def _ends_turn(self, behind: str) -> bool:
        """Whether a special token ends this text, and not one that only ends a call within it."""
        tokens = self._tokens_in(behind, 0, len(behind))[-1:]
        return any(not behind[b:].strip() and behind[a:b] in self._final for a, b in tokens)

    def _through_token(self, text: str, at: int, barred: set[str]) -> int:
        """Behind the special token that follows, and EOS behind that; ``at`` itself where no end of turn does."""
        start = next((i for i in range(at, len(text)) if not text[i].isspace()), at)
        token = self._token_at(text, start)
        if not token or token in barred:
            return at
        end = start + len(token)
        return end + len(self._eos) if token != self._eos and self._eos and text.startswith(self._eos, end) else end

    def _token_at(self, text: str, at: int) -> str | None:
        return next((text[at : at + size] for size in self._sizes if text[at : at + size] in self._tokens), None)

    def _tokens_in(self, text: str, start: int, end: int) -> list[Span]:
        """Where special tokens stand; a set of slices, as a tokenizer may have thousands of them."""
        found: list[Span] = []
        for match in self._first.finditer(text, start, end):
            token = self._token_at(text, match.start()) if not found or match.start() >= found[-1][1] else None
            if token:
                found.append((match.start(), match.start() + len(token)))
        return found


def supervised_turns(messages: Sequence[Message], supervise: str, location: str) -> list[int]:
    """Indices of the assistant turns that are supervised, by ``data.supervise`` and the messages' own ``train``."""
    for index, message in enumerate(messages):
        if message.get("train") and message["role"] != "assistant":
            raise DataError(
                f"{location}: message {index}: train: true on a message of the role {message['role']}\n"
                "  allowed: on those of the assistant\n"
                "  fix:     leave train out, or set data.train_on_prompt: true to supervise everything"
            )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if supervise == "flagged":
        return [i for i in turns if messages[i].get("train")]
    return [i for i in (turns if supervise == "all" else turns[-1:]) if messages[i].get("train") is not False]


def _with_tags(messages: Sequence[Message], trims: bool) -> list[Message]:
    """The messages with tags around what the assistant says and before what tools return, both inside of blanks."""
    return [
        _tagged_turn(message, index, trims)
        if message["role"] == "assistant"
        else {**message, "content": _in_front(message["content"], f"\ue000{index}{_RESULT}\ue001")}
        if message["role"] == "tool"
        else message
        for index, message in enumerate(messages)
    ]


def _tagged_turn(message: Message, index: int, trims: bool) -> Message:
    def tag(kind: str) -> str:
        return f"\ue000{index}{kind}\ue001"

    made = dict(message)
    for key in _REASONING:
        if isinstance(message.get(key), str):
            made[key] = _in_front(message[key], tag("r"))
    calls = message.get("tool_calls") or []
    if calls:
        made["tool_calls"] = [_with_name(call, tag(f"{_NAME}{number}")) for number, call in enumerate(calls)]
    thoughts, mark, said = message["content"].rpartition("</think>")
    if said.strip():
        end = len(said.rstrip()) if trims else len(said)
        said = said[:end] + tag(_SAID) + said[end:]
        said = _in_front(said, tag(_FIRST)) if trims or mark else tag(_FIRST) + said
    elif not calls:
        said = tag(_EMPTY) + said if trims else said + tag(_EMPTY)
    thoughts = thoughts and (_in_front(thoughts, tag("o")) if trims else tag("o") + thoughts)
    return {**made, "content": thoughts + mark + said}


def _in_front(text: str, tag: str) -> str:
    """The text with a tag before its first character that is no blank, or without one."""
    blanks = len(text) - len(text.lstrip())
    return text[:blanks] + tag + text[blanks:] if text.strip() else text


def _with_name(call: dict[str, Any], tag: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "name": tag + call["function"]["name"]}}
    return {**call, "name": tag + call["name"]}


def _read_tags(tagged: str, takes_blank: bool) -> tuple[str, list[_Tag]]:
    """The text without its tags, and where they were; of a name, which results may repeat, the first alone.

    ``takes_blank``: the blank before an empty turn is one that the template writes before a text only.
    """
    parts, tags, size, at = list[str](), list[_Tag](), 0, 0
    for match in _TAG.finditer(tagged):
        blank, message, kind = match.groups()
        parts.append(tagged[at : match.start() if takes_blank and kind == _EMPTY else match.start() + len(blank)])
        size, at = size + len(parts[-1]), match.end()
        tag = _Tag(size, int(message), kind)
        if kind[0] != _NAME or all((t.message, t.kind) != (tag.message, kind) for t in tags):
            tags.append(tag)
    return "".join([*parts, tagged[at:]]), tags


def _runs(tags: Sequence[_Tag], index: int) -> tuple[int, list[list[_Tag]]]:
    """Where what stands before a message ends, and the message's tags, apart where another message is between them."""
    runs = [list(group) for _, group in groupby(tags, lambda tag: tag.message)]
    own = [run for run in runs if run[0].message == index]
    before = runs[: runs.index(own[0])] if own else []
    return before[-1][-1].position if before else 0, own


def _is_said(tag: _Tag) -> bool:
    return tag.kind[0] in (_FIRST, _SAID, _EMPTY, _NAME)


def _is_whole(message: Message, tags: Sequence[_Tag]) -> bool:
    """Whether a turn shows its text, once, and the names of its calls; thoughts may be left out."""
    calls, kinds = message.get("tool_calls") or [], [tag.kind for tag in tags]
    said = _SAID if message["content"].rpartition("</think>")[2].strip() else None if calls else _EMPTY
    return (said is None or kinds.count(said) == 1) and all(f"{_NAME}{i}" in kinds for i in range(len(calls)))


def _shows_arguments(text: str, message: Message) -> bool:
    """Whether the names of the arguments of calls are there; their values may be written in many ways."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    names = [str(name) for function in functions for name in function.get("arguments") or ()]
    return all(name in text or json.dumps(name)[1:-1] in text for name in names)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _filled(shape: _Shape, contents: Sequence[str], text: str) -> list[Span] | None:
    """What is supervised in the text of a conversation with these contents; ``None`` if it is another text."""
    spans: list[Span] = []
    at = 0
    for piece, supervised in shape:
        said = contents[piece] if isinstance(piece, int) else piece
        if not text.startswith(said, at):
            return None
        at += len(said)
        spans += [(at - len(said), at)] * supervised
    return _joined(spans) if at == len(text) else None


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that touch as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def _make_room(kept: dict[Any, Any]) -> None:
    """Empty what is kept by the roles of a conversation when it is full."""
    if len(kept) >= _MAX_KEPT:
        kept.clear()


def _refusal(location: str, index: int) -> DataError:
    return DataError(
        f"{location}: the chat template does not show assistant turn {index} whole, so that it cannot be marked\n"
        "  fix:     give data.chat_template with {% generation %} … {% endgeneration %} around all that it says and "
        "its end of turn, outside any macro, set block or filter"
    )
