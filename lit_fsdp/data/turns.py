"""Locate the characters of assistant turns in a rendered conversation: exactly, or the row is rejected.

A second rendering has tags around the content of each assistant turn (text, reasoning, names of called tools) and in
tool results. Without the tags it must equal the first text, or the row is rejected; the tags locate the content. The
span of a turn then starts after the generation prompt and ends with the special token that stops the model, which
either ends this turn or, as in GLM-4, begins the next. Tool results are excluded where a template writes them inside
the turn, as Gemma 4 does.

With ``{% generation %}`` blocks, one or several per turn, the template itself marks what is supervised. The tags then
assign each block to a turn and verify that the blocks cover its content. Blocks around the content only are extended to
the following special token.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, chain, dropwhile, groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from lit_fsdp.data import formats
from lit_fsdp.data.chat_template import ChatTemplate
from lit_fsdp.data.formats import Conversation, Message, num_alike
from lit_fsdp.data.masks import Span
from lit_fsdp.errors import DataError

_TAG = re.compile("\ue000(\\d+)([a-z]\\d*)\ue001")
_BLANK_BEFORE_NOTHING = re.compile("\\s(\ue000\\d+s\ue001\ue000\\d+z\ue001)")
_CONTENT = re.compile("\ue002(\\d+)\ue003")
_END = re.compile(r"zq(\d+)x([az])", re.IGNORECASE)  # template filters change only its case
_WORD = re.compile("[\\w\ue002\ue003]+")
_FIRST, _LAST, _THOUGHT, _NAME, _RESULT = "s", "z", "r", "c", "t"
_QUESTION, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\ue004"}
_MAX_KEPT = 4096


Unwritten = tuple[str, str]
"""Description of a text that is not in the rendering, and its role, or ``tools`` or ``reasoning``."""
REASONING = "reasoning"
Found = tuple[str, list[Span], list[Unwritten]]


class _Tag(NamedTuple):
    """Start or end of a piece of message content in the text."""

    position: int
    message: int
    kind: str


class _Rendered(NamedTuple):
    """One conversation as text, and its messages with tags."""

    conversation: Conversation
    text: str
    tagged: list[Message]
    runs: list[list[_Tag]]
    """Tags in text order, grouped into runs of the same message."""


class _Turn(NamedTuple):
    """One assistant turn in the text."""

    runs: list[list[_Tag]]
    start: int
    """Where generation starts; -1 if the text does not show it."""
    openers: set[str]
    """Special tokens that begin an assistant turn, and so cannot end one."""


class AssistantTurns:
    """Find assistant turns in the output of a template; a special token of the tokenizer ends them."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        self._template = template
        tokens = sorted(filter(None, tokenizer.added_tokens_encoder), key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._final = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} | {tokenizer.eos_token}
        self._bos, self._eos = tokenizer.bos_token, tokenizer.eos_token
        self._kept: dict[Any, Any] = {}

    def find(self, conversation: Conversation, wanted: Sequence[int], location: str) -> Found:
        """Return the text, the spans of its ``wanted`` turns including their end tokens, and the omitted texts.

        Messages must not have ``train`` keys. The half-open spans are sorted and disjoint; see :meth:`unwritten`.
        Raises DataError if the template rejects the row, or if its turns cannot be located exactly.
        """
        messages = conversation.messages
        if all(len(message) == 2 for message in messages):  # reuses a tagged conversation of the same roles
            text, _ = self._template.render(conversation, location)
            roles = tuple((m["role"], None if m["content"].strip() else m["content"]) for m in messages)
            key = (roles, tuple(wanted), repr(conversation.tools), repr(conversation.template_kwargs))
            shape, lacks = self._remembered(key, lambda: self._shape(conversation, wanted, location))
            pieces = [_CONTENT.sub(lambda match: messages[int(match[1])]["content"], piece) for piece in shape]
            if "".join(pieces) == text:
                ends = list(accumulate(map(len, pieces)))
                return text, list(zip(ends[::2], ends[1::2], strict=False)), lacks
        text, spans, lost = self._by_tags(conversation, wanted, location)
        return text, spans, [*self.unwritten(conversation, text), *lost]

    def find_last(self, conversation: Conversation, location: str) -> Found:
        """Like :meth:`find` for the last turn, after the prompt that is used in generation.

        Some templates render earlier messages differently once they are answered: GPT-OSS omits the reasoning before
        a call, Mistral the system prompt.
        """
        *before, _ = conversation.messages
        text, spans, lacks = self.find(conversation, [len(before)], location)
        lost = [one for one in lacks if one[1] == REASONING]
        prompted, start = self._template.text_of(conversation, before, generation_prompt=True) or "", spans[0][0]
        last = before[-1]["content"].strip() if before else ""
        tails = [self._tail(text[:start]), f"{last}{text[:start].rpartition(last)[2]}" if last else ""]
        for is_cut in (False, True):
            prompt = self._without_thought(conversation, before, prompted) if is_cut else prompted
            if any(tail and prompt.endswith(tail) for tail in tails):
                if prompt != text[:start]:
                    of_prompt = replace(conversation, messages=before)
                    lacks = [*self.unwritten(of_prompt, prompted, generation_prompt=True), *lost]
                moved = len(prompt) - start
                return prompt + text[start:], [(a + moved, b + moved) for a, b in spans], lacks
        return text, spans, lacks

    def _without_thought(self, conversation: Conversation, before: list[Message], prompted: str) -> str:
        """Return a generation prompt up to its ``<think>``, because the turn may render the reasoning differently.

        Empty if the last such tag is not behind the last message: it is part of the conversation.
        """
        if before and "<think>" in prompted:
            marked = _with_ends(replace(conversation, messages=before), [len(before) - 1])
            shown = self._template.text_of(marked, marked.messages, generation_prompt=True) or ""
            if (str(len(before) - 1), "z") not in _END.findall(shown.rpartition("<think>")[0].lower()):
                return ""
        return prompted.rpartition("<think>")[0]

    def unwritten(self, conversation: Conversation, text: str, *, generation_prompt: bool = False) -> list[Unwritten]:
        """Return non-assistant texts, and tools, that the template omits in part or in full.

        Another rendering has marks at both ends of each text. If the marks change other parts of the rendering, as in a
        template that compares messages, texts are marked one at a time; as a last resort, their words are searched for.
        """
        messages, tools = conversation.messages, conversation.tools or []
        texts = {i: m["content"] for i, m in enumerate(messages) if m["role"] != "assistant" and m["content"].strip()}
        schemas = dict(enumerate((tool.get("function") or {} for tool in tools), len(messages)))
        texts |= {i: f"{one['name']} {one.get('description') or ''}" for i, one in schemas.items() if one.get("name")}

        def lost(numbers: Collection[int]) -> set[int] | None:
            marked = _with_ends(conversation, numbers)
            shown = self._template.text_of(marked, marked.messages, generation_prompt=generation_prompt) or ""
            ends = {(int(number), end.lower()) for number, end in _END.findall(shown)}
            return {i for i in numbers if not {(i, "a"), (i, "z")} <= ends} if _END.sub("", shown) == text else None

        found = lost(texts) if texts else set()
        if found is None:
            alone = {i: lost([i]) for i in texts}
            found = {i for i, one in alone.items() if (_is_missing(texts[i], text) if one is None else one)}
        named = [(i, messages[i]["role"] if i < len(messages) else "tools") for i in sorted(found)]
        names = {i: f"tool {one.get('name')}" for i, one in schemas.items()}
        return [(names.get(i, f"message {i + 1} ({kind})"), kind) for i, kind in named]

    @property
    def lacks_prompt(self) -> bool:
        """Whether the template has no generation prompt, although it writes a header before answers."""
        empty, both = Conversation([_QUESTION]), [_QUESTION, _ANSWER]
        plain = self._template.text_of(empty, [_QUESTION])
        prompted = self._template.text_of(empty, [_QUESTION], generation_prompt=True)
        before, found, _ = (self._template.text_of(empty, both) or "").partition(_ANSWER["content"])
        if not plain or prompted != plain or not found or not before.startswith(plain):
            return False
        return bool(before[len(plain) :].strip())

    def _tail(self, text: str) -> str:
        """Return the text from its last special token; empty without special tokens."""
        return text[max((match.start() for match in self._token.finditer(text)), default=len(text)) :]

    def _shape(self, conversation: Conversation, wanted: Sequence[int], location: str) -> tuple[list[str], Any]:
        """Return text with content placeholders as alternating unsupervised and supervised pieces, omitted texts."""
        numbered = enumerate(conversation.messages)
        messages = [{**m, "content": f"\ue002{i}\ue003" if m["content"].strip() else m["content"]} for i, m in numbered]
        placed = replace(conversation, messages=messages)
        try:
            text, spans, _ = self._by_tags(placed, wanted, location)
        except DataError:  # raised again for the row itself
            return [], []
        pieces = [text[a:b] for a, b in pairwise([0, *chain.from_iterable(spans), len(text)])]
        return pieces, self.unwritten(placed, text)

    def _remembered(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def _by_tags(self, conversation: Conversation, wanted: Sequence[int], location: str) -> Found:
        """Like :meth:`find`, with the reasoning of the last turn as the only omitted text."""
        text, marks = self._template.render(conversation, location)
        if not wanted:
            return text, [], []
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
            body = "".join(text[a:b] for a, b in spans)
            message = conversation.messages[index]
            if not _is_whole(message, turns[index], body) or min(chain(*spans), default=-1) < 0:
                called = [str(call.get("function", call).get("name")) for call in message.get("tool_calls") or ()]
                if called and not any(name in text for name in called):
                    given = f"the chat template does not write the tool calls of message {index + 1} (assistant)"
                    raise DataError(f"{location}: {given}\n  fix:     set data.chat_template: chatml")
                raise DataError(
                    f"{location}: the chat template does not write message {index + 1} (assistant) in full, so it "
                    "cannot be masked\n  fix:     set a data.chat_template with {% generation %} … {% endgeneration %} "
                    "around the whole turn and its end token, outside any macro, set block or filter"
                )
            found += spans
        inside = np.zeros(len(text) + 1, bool)
        for start, end in found:
            inside[start:end] = True
        borders = np.flatnonzero(np.diff(inside, prepend=False)).tolist()
        lost, last = list[Unwritten](), len(conversation.messages) - 1
        if last in wanted:  # templates omit earlier reasoning on purpose
            thoughts, written = _reasoning(conversation.messages[last]).strip(), text[max(0, turns[last].start) :]
            if thoughts not in written and _is_missing(thoughts, written):
                lost = [(f"the reasoning of message {last + 1} (assistant)", REASONING)]
        return text, list(zip(borders[::2], borders[1::2], strict=True)), lost

    def _tagged(self, conversation: Conversation, text: str, location: str) -> _Rendered:
        """Render with tags, outside or inside the whitespace around the content; the text must be the same."""
        for strips in (False, True):
            messages = [_with_tags(message, index, strips) for index, message in enumerate(conversation.messages)]
            tagged = self._template.text_of(conversation, messages) or ""
            for variant in (tagged, _BLANK_BEFORE_NOTHING.sub(r"\1", tagged)):  # some write it only before text
                clean, tags = _read_tags(variant)
                if clean == text:
                    runs = [list(run) for _, run in groupby(tags, lambda tag: tag.message)]
                    return _Rendered(conversation, text, messages, runs)
        raise DataError(
            f"{location}: the chat template renders this conversation differently once its texts are tagged, so "
            "assistant turns cannot be located\n  fix:     set another data.chat_template"
        )

    def _turn(self, rendered: _Rendered, index: int) -> _Turn:
        runs = [run for run in rendered.runs if run[0].message == index]
        if not runs:
            return _Turn([], -1, set())
        first, number = runs[0][0].position, rendered.runs.index(runs[0])
        before = rendered.runs[number - 1][-1].position if number else 0
        prompt, text = self._prompt(rendered.conversation, index), rendered.text
        start = -1 if text[before:first].strip() else before
        # a turn whose reasoning differs from the prompt starts after the header of the prompt only
        for header in (prompt.partition("<think>")[0], prompt):
            at = text.rfind(header, 0, first)
            if header and at >= 0 and at + len(header) >= before:
                start = at + len(header)
        usual = self._header(rendered.conversation, [_QUESTION])
        openers = self._token.findall(usual)[:1] or self._token.findall(text, before, first)[-1:]
        return _Turn(runs, start, {*openers, self._bos} - {self._eos})

    def _prompt(self, conversation: Conversation, index: int) -> str:
        """Return the text before a turn: its header, or, where it continues an earlier turn, the end of that text."""
        before = conversation.messages[:index]
        header = self._header(conversation, before)
        prompted = "" if header else self._template.text_of(conversation, before, generation_prompt=True) or ""
        return header or self._tail(prompted) or prompted

    def _header(self, conversation: Conversation, before: list[Message]) -> str:
        """Return the generation prompt after messages; without a generation prompt, the text before an answer."""
        key = (*(message["role"] for message in before), bool(conversation.tools), repr(conversation.template_kwargs))
        return str(self._remembered(key, lambda: self._new_header(conversation, before)))

    def _new_header(self, conversation: Conversation, before: list[Message]) -> str:
        for messages in (before, [_QUESTION]):  # the question is never rejected
            prompted = self._template.text_of(conversation, messages, generation_prompt=True)
            plain = self._template.text_of(conversation, messages)
            if prompted is None or plain is None:
                continue
            if prompted == plain:  # no generation prompt; a space belongs to the following word
                answered = self._template.text_of(conversation, [*messages, _ANSWER]) or ""
                prompted = answered.rpartition(_ANSWER["content"])[0].rstrip(" ")
            cut = num_alike(prompted, plain)
            across = (match.start() for match in self._token.finditer(prompted) if match.start() < cut < match.end())
            return prompted[next(across, cut) :]
        return ""

    def _marked(self, rendered: _Rendered, turns: dict[int, _Turn], index: int, marks: Sequence[Span]) -> list[Span]:
        """Return the marks of one turn up to the following special token; none if they do not cover its content."""
        spans = [mark for mark in marks if _owner(rendered, turns, mark) == index]
        tags = [tag for run in turns[index].runs for tag in run if tag.kind != _THOUGHT]
        holders = [[end for start, end in spans if start <= tag.position <= end] for tag in tags]
        if not tags or not all(holders):
            return []
        end, text = holders[-1][-1], rendered.text
        tokens = [match for match in self._token.finditer(text, tags[-1].position, end) if match[0] in self._final]
        if tokens and not text[tokens[-1].end() : end].strip():
            return spans
        return [*spans, (end, max(end, self._end(rendered, turns[index], tags[-1], end)))]

    def _end(self, rendered: _Rendered, turn: _Turn, last: _Tag, least: int = 0) -> int:
        """Return the end of a turn, including its special token, if any; -1 if a call is not fully rendered."""
        end, text = last.position, rendered.text
        if last.kind[0] == _NAME:  # the arguments end as in the same conversation truncated after this turn
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
    """Return supervised assistant turns by ``data.supervise`` and ``train``; with ``whole``, the unsupervised ones.

    Raises DataError if a message of another role has a ``train`` value that cannot be applied.
    """
    for index, message in enumerate(messages):
        train = message.get("train")
        if message["role"] != "assistant" and train is not None and train is not whole:
            given = f"train: {str(train).lower()} on a message of the role {message['role']}"
            raise DataError(f"{location}: message {index + 1}: {given}\n  allowed: on assistant messages")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if whole:
        return [i for i in turns if messages[i].get("train") is False]
    if supervise == "flagged":
        return [i for i in turns if messages[i].get("train")]
    return [i for i in (turns if supervise == "all" else turns[-1:]) if messages[i].get("train") is not False]


def _with_tags(message: Message, index: int, strips: bool) -> Message:
    """Return the message with tags around assistant content, or before a tool result."""

    def tag(kind: str) -> str:
        return f"\ue000{index}{kind}\ue001"

    if message["role"] == "tool":
        return {**message, "content": _in_front(tag(_RESULT), message["content"])}
    if message["role"] != "assistant":
        return message
    made = {**message}
    for key in formats.REASONING:
        if isinstance(message.get(key), str):
            made[key] = _in_front(tag(_THOUGHT), message[key])
    calls = message.get("tool_calls") or []
    names = [tag(f"{_NAME}{number}") + call["function"]["name"] for number, call in enumerate(calls)]
    if calls:
        pairs = zip(calls, names, strict=True)
        made["tool_calls"] = [{**call, "function": {**call["function"], "name": name}} for call, name in pairs]
    thoughts, mark, answer = message["content"].rpartition("</think>")
    if answer.strip() or not calls:
        end = len(answer.rstrip()) if strips else len(answer)
        start = min(end, len(answer) - len(answer.lstrip())) if strips or mark else 0
        answer = f"{answer[:start]}{tag(_FIRST)}{answer[start:end]}{tag(_LAST)}{answer[end:]}"
    return {**made, "content": (thoughts and _in_front(tag(_THOUGHT), thoughts)) + mark + answer}


def _with_ends(conversation: Conversation, numbers: Collection[int]) -> Conversation:
    """Return the conversation with marks at both ends of some texts; for tools, after name and description."""
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


def _is_missing(content: str, text: str) -> bool:
    """Whether most words are missing from the text, which may render them in another form."""
    words, folded = set(_WORD.findall(content.casefold())), text.casefold()
    return 2 * sum(word not in folded and json.dumps(word)[1:-1] not in text for word in words) > len(words)


def _reasoning(message: Message) -> str:
    """Return the reasoning text of a message, from a key of its own or before ``</think>``."""
    own = next((message[key] for key in formats.REASONING if isinstance(message.get(key), str)), "")
    return str(own or message["content"].rpartition("</think>")[0].rpartition("<think>")[2])


def _in_front(tag: str, text: str) -> str:
    """Insert a tag before the first non-whitespace character; blank text is unchanged."""
    at = len(text) - len(text.lstrip())
    return text[:at] + tag + text[at:] if text.strip() else text


def _read_tags(tagged: str) -> tuple[str, list[_Tag]]:
    """Return the text without tags, and the tags; for a name, which results may repeat, only the first."""
    texts, tags, at = _TAG.split(tagged), list[_Tag](), 0
    for text, message, kind in zip(texts[::3], texts[1::3], texts[2::3], strict=False):
        at += len(text)
        if kind[0] != _NAME or all((tag.message, tag.kind) != (int(message), kind) for tag in tags):
            tags.append(_Tag(at, int(message), kind))
    return "".join(texts[::3]), tags


def _owner(rendered: _Rendered, turns: dict[int, _Turn], mark: Span) -> int | None:
    """Return the message that a mark belongs to; ``None`` for several messages, or one of another role."""
    inside = {tag.message for run in rendered.runs for tag in run if mark[0] <= tag.position <= mark[1]}
    if inside:
        return inside.pop() if len(inside) == 1 else None
    begun = [index for index, turn in turns.items() if 0 <= turn.start <= mark[0]]
    if not begun:
        return None
    turn = turns[begun[-1]]
    last = max((tag.position for run in turn.runs for tag in run), default=turn.start)
    behind = rendered.text[last : mark[1]]  # where another turn may have begun
    return None if any(opener in behind for opener in turn.openers) else begun[-1]


def _is_whole(message: Message, turn: _Turn, body: str) -> bool:
    """Whether a turn has its text once, and the names of its calls and arguments; argument values vary in form."""
    calls, kinds = message.get("tool_calls") or [], [tag.kind for run in turn.runs for tag in run]
    has_text = bool(message["content"].rpartition("</think>")[2].strip()) or not calls
    names = [str(name) for call in calls for name in call["function"]["arguments"]]
    return (
        kinds.count(_LAST) == has_text
        and all(f"{_NAME}{number}" in kinds for number in range(len(calls)))
        and all(name in body or json.dumps(name)[1:-1] in body for name in names)
    )
