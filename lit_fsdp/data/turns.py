"""Which characters of a rendered conversation the assistant says: exactly, or the row is refused.

A second rendering has tags around what each assistant turn says (text, thoughts, names of called tools) and in what
tools return. Without its tags it must be the same text, or the row is refused; with them it says where all stands. What
the assistant says then goes from where the model takes over, behind the generation prompt, to the special token that
makes it stop, whether that ends this turn or, as in GLM-4, begins the next. Results of tools are cut out where a
template shows them inside of the turn, as Gemma 4 does.

With ``{% generation %}`` marks, one or several per turn, the template says itself what is supervised; the tags then say
whose a mark is and whether the marks hold all that the turn says. Marks around the content alone are extended to the
special token behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, chain, dropwhile, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from lit_fsdp.data.chat_template import ChatTemplate
from lit_fsdp.data.formats import REASONING, Conversation, Message, num_alike
from lit_fsdp.data.masks import Span
from lit_fsdp.errors import DataError

_TAG = re.compile("\ue000(\\d+)([a-z]\\d*)\ue001")
_BLANK_BEFORE_NOTHING = re.compile("\\s(\ue000\\d+s\ue001\ue000\\d+z\ue001)")
_CONTENT = re.compile("\ue002(\\d+)\ue003")
_END = re.compile(r"zq(\d+)x([az])", re.IGNORECASE)  # which no filter of a template changes but for its case
_WORD = re.compile("[\\w\ue002\ue003]+")
_FIRST, _LAST, _THOUGHT, _NAME, _RESULT = "s", "z", "r", "c", "t"
_QUESTION, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\ue004"}
_MAX_KEPT = 4096


Unwritten = tuple[str, str]
"""A text that is not in the rendering, in words, and its role, or ``tools``."""
Found = tuple[str, list[Span], list[Unwritten]]


class _Tag(NamedTuple):
    """Where something that a message says begins or ends in the text."""

    position: int
    message: int
    kind: str


class _Rendered(NamedTuple):
    """One conversation as text, and its messages with tags."""

    conversation: Conversation
    text: str
    tagged: list[Message]
    runs: list[list[_Tag]]
    """What stands where: tags in order, a run of them for each message in turn."""


class _Turn(NamedTuple):
    """One assistant turn in the text."""

    runs: list[list[_Tag]]
    start: int
    """Where the model takes over; -1 if the text does not show it."""
    openers: set[str]
    """Special tokens that begin a turn of the assistant's, and so cannot end one."""


class AssistantTurns:
    """Finds assistant turns in what one template renders; a special token of the tokenizer ends them."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        self._template = template
        tokens = sorted(filter(None, tokenizer.added_tokens_encoder), key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._final = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {tokenizer.eos_token}
        self._bos, self._eos = tokenizer.bos_token, tokenizer.eos_token
        self._kept: dict[Any, Any] = {}

    def find(self, conversation: Conversation, wanted: Sequence[int], location: str) -> Found:
        """The text of a conversation, the characters of its ``wanted`` turns, ends of turn included, and what it lacks.

        Messages have no keys of ours; the half-open ranges are in order and apart; see :meth:`unwritten`. A DataError
        says that the template refuses the row, or that its turns cannot be told exactly.
        """
        messages = conversation.messages
        if all(len(message) == 2 for message in messages):  # by a tagged conversation of the same roles
            text, _ = self._template.render(conversation, location)
            roles = tuple((m["role"], None if m["content"].strip() else m["content"]) for m in messages)
            key = (roles, tuple(wanted), repr(conversation.tools), repr(conversation.template_kwargs))
            shape, lacks = self._remembered(key, lambda: self._shape(conversation, wanted, location))
            pieces = [_CONTENT.sub(lambda match: messages[int(match[1])]["content"], piece) for piece in shape]
            if "".join(pieces) == text:
                ends = list(accumulate(map(len, pieces)))
                return text, list(zip(ends[::2], ends[1::2], strict=False)), lacks
        text, spans = self._by_tags(conversation, wanted, location)
        return text, spans, self.unwritten(conversation, text)

    def find_last(self, conversation: Conversation, location: str) -> Found:
        """As :meth:`find` for the last turn, behind the prompt that the model is asked with.

        Some templates write earlier messages otherwise once they are answered: GPT-OSS leaves out what was thought
        before a call, Mistral the system's words.
        """
        *before, _ = conversation.messages
        text, spans, lacks = self.find(conversation, [len(before)], location)
        asked, start = self._template.text_of(conversation, before, generation_prompt=True) or "", spans[0][0]
        last = before[-1]["content"].strip() if before else ""
        tails = [self._tail(text[:start]), f"{last}{text[:start].rpartition(last)[2]}" if last else ""]
        for prompt in (asked, asked.rpartition("<think>")[0]):  # whose thoughts the turn may show otherwise
            if any(tail and prompt.endswith(tail) for tail in tails):
                if prompt != text[:start]:
                    lacks = self.unwritten(replace(conversation, messages=before), asked, generation_prompt=True)
                moved = len(prompt) - start
                return prompt + text[start:], [(a + moved, b + moved) for a, b in spans], lacks
        return text, spans, lacks

    def unwritten(self, conversation: Conversation, text: str, *, generation_prompt: bool = False) -> list[Unwritten]:
        """Texts of others than the assistant, and tools, that do not stand whole in what the template has written.

        Another rendering has marks at both ends of each. Where marks change more than themselves, as in a template that
        compares messages, one text at a time is marked, and if need be its words are looked for.
        """
        messages, tools = conversation.messages, conversation.tools or []
        said = {i: m["content"] for i, m in enumerate(messages) if m["role"] != "assistant" and m["content"].strip()}
        schemas = dict(enumerate((tool.get("function") or {} for tool in tools), len(messages)))
        said |= {i: f"{one['name']} {one.get('description') or ''}" for i, one in schemas.items() if one.get("name")}

        def lost(numbers: Collection[int]) -> set[int] | None:
            marked = _with_ends(conversation, numbers)
            shown = self._template.text_of(marked, marked.messages, generation_prompt=generation_prompt) or ""
            ends = {(int(number), end.lower()) for number, end in _END.findall(shown)}
            return {i for i in numbers if not {(i, "a"), (i, "z")} <= ends} if _END.sub("", shown) == text else None

        found = lost(said) if said else set()
        if found is None:
            alone = {i: lost([i]) for i in said}
            found = {i for i, one in alone.items() if (_is_missing(said[i], text) if one is None else one)}
        named = [(i, messages[i]["role"] if i < len(messages) else "tools") for i in sorted(found)]
        names = {i: f"tool {one.get('name')}" for i, one in schemas.items()}
        return [(names.get(i, f"message {i} ({kind})"), kind) for i, kind in named]

    def _tail(self, text: str) -> str:
        """A text from its last special token on; nothing without one."""
        return text[max((match.start() for match in self._token.finditer(text)), default=len(text)) :]

    def _shape(self, conversation: Conversation, wanted: Sequence[int], location: str) -> tuple[list[str], Any]:
        """The text with a place for each content, in pieces, not supervised and supervised in turn; what it lacks."""
        said = enumerate(conversation.messages)
        messages = [{**m, "content": f"\ue002{i}\ue003" if m["content"].strip() else m["content"]} for i, m in said]
        placed = replace(conversation, messages=messages)
        try:
            text, spans = self._by_tags(placed, wanted, location)
        except DataError:  # which is said of the row itself
            return [], []
        pieces = [text[a:b] for a, b in pairwise([0, *chain.from_iterable(spans), len(text)])]
        return pieces, self.unwritten(placed, text)

    def _remembered(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def _by_tags(self, conversation: Conversation, wanted: Sequence[int], location: str) -> tuple[str, list[Span]]:
        text, marks = self._template.render(conversation, location)
        if not wanted:
            return text, []
        rendered = self._tagged(conversation, text, location)
        turns = {i: self._turn(rendered, i) for i, m in enumerate(conversation.messages) if m["role"] == "assistant"}
        found: list[Span] = []
        for index in wanted:
            if marks is None:
                starts = [turns[index].start, *(run[0].position for run in turns[index].runs[1:])]
                ends = [self._end(rendered, turns[index], run[-1]) for run in turns[index].runs]
                spans = list(zip(starts, ends, strict=False))
            else:
                spans = self._marked(rendered, turns, index, marks)
            said = "".join(text[a:b] for a, b in spans)
            if not _is_whole(conversation.messages[index], turns[index], said) or min(chain(*spans), default=-1) < 0:
                raise DataError(
                    f"{location}: the chat template does not show assistant turn {index} whole, so that it cannot be "
                    "marked\n  fix:     give data.chat_template with {% generation %} … {% endgeneration %} around all "
                    "that it says and its end of turn, outside any macro, set block or filter"
                )
            found += spans
        inside = np.zeros(len(text) + 1, bool)
        for start, end in found:
            inside[start:end] = True
        borders = np.flatnonzero(np.diff(inside, prepend=False)).tolist()
        return text, list(zip(borders[::2], borders[1::2], strict=True))

    def _tagged(self, conversation: Conversation, text: str, location: str) -> _Rendered:
        """Render with tags, outside or inside of the blanks around what is said; the text must be the same."""
        for strips in (False, True):
            messages = [_with_tags(message, index, strips) for index, message in enumerate(conversation.messages)]
            tagged = self._template.text_of(conversation, messages) or ""
            for variant in (tagged, _BLANK_BEFORE_NOTHING.sub(r"\1", tagged)):  # which some write before a text only
                clean, tags = _read_tags(variant)
                if clean == text:
                    runs = [list(run) for _, run in groupby(tags, lambda tag: tag.message)]
                    return _Rendered(conversation, text, messages, runs)
        raise DataError(
            f"{location}: the chat template does something else with this conversation once its texts are tagged, so "
            "that assistant turns cannot be told from the rest\n  fix:     set another data.chat_template"
        )

    def _turn(self, rendered: _Rendered, index: int) -> _Turn:
        runs = [run for run in rendered.runs if run[0].message == index]
        if not runs:
            return _Turn([], -1, set())
        first, number = runs[0][0].position, rendered.runs.index(runs[0])
        before = rendered.runs[number - 1][-1].position if number else 0
        prompt, text = self._prompt(rendered.conversation, index), rendered.text
        start = -1 if text[before:first].strip() else before
        # a turn that shows other thoughts than the prompt begins behind the prompt's header alone
        for header in (prompt.partition("<think>")[0], prompt):
            at = text.rfind(header, 0, first)
            if header and at >= 0 and at + len(header) >= before:
                start = at + len(header)
        usual = self._header(rendered.conversation, [_QUESTION])
        openers = self._token.findall(usual)[:1] or self._token.findall(text, before, first)[-1:]
        return _Turn(runs, start, {*openers, self._bos} - {self._eos})

    def _prompt(self, conversation: Conversation, index: int) -> str:
        """What stands before a turn: its header, or the end of what is before it where an earlier turn goes on."""
        before = conversation.messages[:index]
        header = self._header(conversation, before)
        asked = "" if header else self._template.text_of(conversation, before, generation_prompt=True) or ""
        return header or self._tail(asked) or asked

    def _header(self, conversation: Conversation, before: list[Message]) -> str:
        """The generation prompt behind some messages; of a template without one, what it writes before an answer."""
        key = (*(message["role"] for message in before), bool(conversation.tools), repr(conversation.template_kwargs))
        return str(self._remembered(key, lambda: self._new_header(conversation, before)))

    def _new_header(self, conversation: Conversation, before: list[Message]) -> str:
        for messages in (before, [_QUESTION]):  # which is never refused
            asked = self._template.text_of(conversation, messages, generation_prompt=True)
            plain = self._template.text_of(conversation, messages)
            if asked is None or plain is None:
                continue
            if asked == plain:  # the header is left to whoever asks; a blank goes with the word behind it
                answered = self._template.text_of(conversation, [*messages, _ANSWER]) or ""
                asked = answered.rpartition(_ANSWER["content"])[0].rstrip(" ")
            cut = num_alike(asked, plain)
            across = (match.start() for match in self._token.finditer(asked) if match.start() < cut < match.end())
            return asked[next(across, cut) :]
        return ""

    def _marked(self, rendered: _Rendered, turns: dict[int, _Turn], index: int, marks: Sequence[Span]) -> list[Span]:
        """The marks of one turn, to the special token behind; none if they do not hold what the turn says."""
        spans = [mark for mark in marks if _owner(rendered.runs, turns, mark) == index]
        said = [tag for run in turns[index].runs for tag in run if tag.kind != _THOUGHT]
        holders = [[end for start, end in spans if start <= tag.position <= end] for tag in said]
        if not said or not all(holders):
            return []
        end, text = holders[-1][-1], rendered.text
        tokens = [match for match in self._token.finditer(text, said[-1].position, end) if match[0] in self._final]
        if tokens and not text[tokens[-1].end() : end].strip():
            return spans
        return [*spans, (end, max(end, self._end(rendered, turns[index], said[-1], end)))]

    def _end(self, rendered: _Rendered, turn: _Turn, last: _Tag, least: int = 0) -> int:
        """Behind the special token that ends what a turn says, if one does; -1 if a call is not shown whole."""
        end, text = last.position, rendered.text
        if last.kind[0] == _NAME:  # the arguments end where they do in the same conversation up to this turn
            before = rendered.tagged[: last.message + 1]
            alone, tags = _read_tags(self._template.text_of(rendered.conversation, before) or "")
            behind = [tag.position for tag in dropwhile(lambda tag: tag[1:] != last[1:], tags)]
            tail = alone[behind[0] : behind[1] if behind[1:] else None] if behind else ""
            same = tail[: num_alike(tail, text[end:])]
            tokens = list(takewhile(lambda match: match[0] not in turn.openers, self._token.finditer(same)))
            if not tokens and (not same.strip() or same.rstrip() != tail.rstrip()):
                return -1
            end += tokens[-1].end() if tokens else len(same.rstrip())
            if tokens and tokens[-1][0] in self._final and not behind[1:]:
                return max(end, least)
        end = max(end, least)
        token = self._token.match(text, len(text) - len(text[end:].lstrip()))
        if not token or token[0] in turn.openers:
            return end
        ends_twice = self._eos and token[0] != self._eos and text.startswith(self._eos, token.end())
        return token.end() + len(self._eos) if ends_twice else token.end()


def supervised_turns(messages: Sequence[Message], supervise: str, whole: bool, location: str) -> list[int]:
    """Assistant turns that are supervised, by ``data.supervise`` and ``train`` of messages; of the ``whole`` those not.

    DataError if ``train`` of a message of another role asks for what it cannot have.
    """
    for index, message in enumerate(messages):
        train = message.get("train")
        if message["role"] != "assistant" and train is not None and train is not whole:
            said = f"train: {str(train).lower()} on a message of the role {message['role']}"
            raise DataError(f"{location}: message {index}: {said}\n  allowed: on those of the assistant")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if whole:
        return [i for i in turns if messages[i].get("train") is False]
    if supervise == "flagged":
        return [i for i in turns if messages[i].get("train")]
    return [i for i in (turns if supervise == "all" else turns[-1:]) if messages[i].get("train") is not False]


def _with_tags(message: Message, index: int, strips: bool) -> Message:
    """The message with tags around what the assistant says, or before what a tool returns."""

    def tag(kind: str) -> str:
        return f"\ue000{index}{kind}\ue001"

    if message["role"] == "tool":
        return {**message, "content": _in_front(tag(_RESULT), message["content"])}
    if message["role"] != "assistant":
        return message
    made = {**message}
    for key in REASONING:
        if isinstance(message.get(key), str):
            made[key] = _in_front(tag(_THOUGHT), message[key])
    calls = message.get("tool_calls") or []
    names = [tag(f"{_NAME}{number}") + call["function"]["name"] for number, call in enumerate(calls)]
    if calls:
        pairs = zip(calls, names, strict=True)
        made["tool_calls"] = [{**call, "function": {**call["function"], "name": name}} for call, name in pairs]
    thoughts, mark, said = message["content"].rpartition("</think>")
    if said.strip() or not calls:
        end = len(said.rstrip()) if strips else len(said)
        start = min(end, len(said) - len(said.lstrip())) if strips or mark else 0
        said = f"{said[:start]}{tag(_FIRST)}{said[start:end]}{tag(_LAST)}{said[end:]}"
    return {**made, "content": (thoughts and _in_front(tag(_THOUGHT), thoughts)) + mark + said}


def _with_ends(conversation: Conversation, numbers: Collection[int]) -> Conversation:
    """The conversation with marks at both ends of some texts; of tools, numbered on, behind name and description."""
    messages, tools = list(conversation.messages), list(conversation.tools or [])
    for i in numbers:
        first, last = f"zq{i}xa", f"zq{i}xz"
        if i < len(messages):
            text = messages[i]["content"].rstrip()
            behind = messages[i]["content"][len(text) :]
            messages[i] = {**messages[i], "content": _in_front(first, text) + last + behind}
        else:
            tool = tools[i - len(messages)]
            marked = {**tool["function"], "name": f"{tool['function']['name']}{first}"}
            end = "description" if marked.get("description") else "name"
            marked[end] = f"{marked[end]}{last}"
            tools[i - len(messages)] = {**tool, "function": marked}
    return replace(conversation, messages=messages, tools=conversation.tools and tools)


def _is_missing(said: str, text: str) -> bool:
    """Whether most words are nowhere in the text, which may write them in another form."""
    words = set(_WORD.findall(said.casefold()))
    return 2 * sum(word not in text.casefold() and json.dumps(word)[1:-1] not in text for word in words) > len(words)


def _in_front(tag: str, text: str) -> str:
    """The text with a tag before its first character that is no blank; one of blanks, or none, as it is."""
    at = len(text) - len(text.lstrip())
    return text[:at] + tag + text[at:] if text.strip() else text


def _read_tags(tagged: str) -> tuple[str, list[_Tag]]:
    """The text without its tags, and where they were; of a name, which results may repeat, the first alone."""
    texts, tags, at = _TAG.split(tagged), list[_Tag](), 0
    for text, message, kind in zip(texts[::3], texts[1::3], texts[2::3], strict=False):
        at += len(text)
        if kind[0] != _NAME or all((tag.message, tag.kind) != (int(message), kind) for tag in tags):
            tags.append(_Tag(at, int(message), kind))
    return "".join(texts[::3]), tags


def _owner(runs: Sequence[list[_Tag]], turns: dict[int, _Turn], mark: Span) -> int | None:
    """The message that a mark belongs to; ``None`` if it holds something of several."""
    inside = {tag.message for run in runs for tag in run if mark[0] <= tag.position <= mark[1]}
    begun = [index for index, turn in turns.items() if 0 <= turn.start <= mark[0]]
    return (inside.pop() if len(inside) == 1 else None) if inside else begun[-1] if begun else None


def _is_whole(message: Message, turn: _Turn, said: str) -> bool:
    """Whether a turn shows its text, once, and its calls: names, and names of arguments, whose values vary in form."""
    calls, kinds = message.get("tool_calls") or [], [tag.kind for run in turn.runs for tag in run]
    has_text = bool(message["content"].rpartition("</think>")[2].strip()) or not calls
    names = [str(name) for call in calls for name in call["function"]["arguments"]]
    return (
        kinds.count(_LAST) == has_text
        and all(f"{_NAME}{number}" in kinds for number in range(len(calls)))
        and all(name in said or json.dumps(name)[1:-1] in said for name in names)
    )
