"""Conversations to token ids with a mask that is exact to the token: what the assistant says, and its end of turn."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lit_fsdp.data.flags import learnt_turns, unlearnt_turns, without_flags
from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded, Marked, Span, SpanEncoder, sample
from lit_fsdp.data.named import FoundTemplate, find_template, no_template
from lit_fsdp.data.render import TODAY, Renderer
from lit_fsdp.data.text import added_tokens, num_blanks
from lit_fsdp.data.turn_texts import placeholder
from lit_fsdp.data.turns import TurnFinder
from lit_fsdp.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class ChatTemplate:
    """Renders conversations with one tokenizer and template, and marks what is learnt of them.

    The template writes BOS and EOS where they belong. Where it writes no BOS although the tokenizer puts one before
    every text, it is put in front, once; before the template's own may be blanks, and of two only one is left.

    Args:
        tokenizer: A fast tokenizer of transformers.
        template: What :func:`lit_fsdp.data.named.find_template` found, or Jinja text; ``None`` for the tokenizer's own.
        supervise: Loss on ``all`` assistant turns, on the ``last``, or on those ``flagged`` with ``train: true``.
        train_on_prompt: Loss on every token but the first, without turns whose message says ``train: false``.
        encoder: The same tokenizer as one that marks spans, if there is one already.

    Attributes:
        source: Jinja text, of the default where there are several.
        text: All the Jinja text that ids depend on.

    Raises:
        ConfigError: There is no template, or the tokenizer does not tell where its tokens lie in the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: FoundTemplate | str | None = None,
        supervise: Literal["all", "last", "flagged"] = "all",
        train_on_prompt: bool = False,
        encoder: SpanEncoder | None = None,
    ) -> None:
        self.supervise, self._everything = supervise, train_on_prompt
        found = FoundTemplate(template) if isinstance(template, str) else template or find_template(None, tokenizer)
        if found is None:
            raise no_template("conversations", tokenizer)
        self._found, self.tokenizer = found, tokenizer
        self.encoder = encoder or SpanEncoder(tokenizer)
        self.source = found.default
        self.text = json.dumps([found.default, found.tool_use]) if found.tool_use else found.default
        self._special = {str(token): int(number) for token, number in tokenizer.added_tokens_encoder.items() if token}
        self._plain = self._finder(found.default)
        self._with_tools = self._finder(found.tool_use) if found.tool_use else self._plain
        self._first = added_tokens(tokenizer)[0]
        self._said: set[str] = set()
        if "strftime_now" in self.text:
            self._say(
                "the chat template writes today's date, which is taken to be %s in every run", f"{TODAY:%d %B %Y}"
            )

    def encode(self, conversations: Sequence[Conversation], places: Sequence[str]) -> list[Encoded]:
        """Tokens and masks of many conversations; ``places`` name them in errors.

        Raises:
            DataError: The template fails on a row, or its text cannot be marked exactly.
            ConfigError: A row has tools, and the tokenizer lacks what the named template needs for them.
        """
        marked = [self._marked(talk, place) for talk, place in zip(conversations, places, strict=True)]
        found = self.encoder.encode([text for text, _ in marked], [spans for _, spans in marked], places)
        return [self._finished(row, place) for row, place in zip(found, places, strict=True)]

    def _finder(self, source: str) -> TurnFinder:
        return TurnFinder(Renderer(source, self.tokenizer.special_tokens_map), self._special)

    def _marked(self, talk: Conversation, place: str) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans in it that are learnt; with train_on_prompt those that are not."""
        if self._everything:
            wanted = unlearnt_turns(talk.messages)
            if any(m.get("train") is False and m["role"] != "assistant" for m in talk.messages):
                self._say(
                    "%s: a message of another role than the assistant's says train: false, and is learnt all the same, "
                    "as data.train_on_prompt is true",
                    place,
                )
        else:
            wanted = learnt_turns(talk.messages, self.supervise, place)
        if self._found.missing_for_tools and (talk.tools or any(len(m) > 2 for m in talk.messages)):
            self._check_tools(talk, place)
        clean = Conversation(without_flags(talk.messages), talk.tools)
        text, spans = (self._with_tools if talk.tools else self._plain).find(clean, wanted, place)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # in what formats does not look at, such as the arguments of a call
            raise DataError(f"{place}: half a character (\\u{ord(text[error.start]):04x}), which is no text") from None
        return text, spans

    def _finished(self, row: Marked, place: str) -> Encoded:
        """With BOS in front where it is missing, and with the mask that is asked for."""
        ids, mask = row
        if mask.any() and not self._everything:
            self._check_end(ids, int(mask.nonzero()[0][-1]), place)
        mask = ~mask if self._everything else mask
        return sample(*self._with_bos(ids, mask, place))

    def _with_bos(self, ids: list[int], mask: np.ndarray, place: str) -> Marked:
        """With BOS once, where blanks may stand before it."""
        bos = self._first or [number for number in [self.tokenizer.bos_token_id] if number is not None]
        size, start = len(bos), 0 if ids[: len(bos)] == bos else num_blanks(self.tokenizer, ids)
        if self._first and ids[start : start + size] != bos:
            self._say(
                "%s: the chat template writes no BOS, which the tokenizer puts first, so it is put there; with "
                "{{ bos_token }} at its beginning it will be there in inference too",
                place,
            )
            return [*bos, *ids], np.concatenate([np.zeros(size, bool), mask])
        if self._first:
            mask[: start + size] = False
        while bos and ids[start : start + 2 * size] == bos * 2 and self._begins_twice:
            self._say(
                "%s: the chat template begins with BOS twice; one is left out, which inference will not do",
                place,
            )
            ids, mask = ids[:start] + ids[start + size :], np.delete(mask, np.s_[start : start + size])
        return ids, mask

    @cached_property
    def _begins_twice(self) -> bool:
        """Whether BOS is there twice by the template, rather than as a mark of turns of which the first is empty."""
        talk = [{"role": role, "content": placeholder(i)} for i, role in enumerate(("user", "assistant"))]
        try:
            text, _ = Renderer(self.source, self.tokenizer.special_tokens_map).render(talk, None, "")
        except DataError:
            return False
        return text.lstrip().startswith(2 * str(self.tokenizer.bos_token))

    def _check_end(self, ids: Sequence[int], last: int, place: str) -> None:
        """Say so if the last token that is learnt is no special one."""
        special = self._special.values()
        if ids[last] in special:
            return
        after = last + 1 + num_blanks(self.tokenizer, ids[last + 1 :])
        if after < len(ids) and ids[after] in special:
            self._say(
                "%s: after an assistant turn no special token is learnt, so the model does not learn to stop; %s, which"
                " follows, may begin the next turn; if it ends this one, write the template's {%% generation %%} marks "
                "around the content and it",
                place,
                self.tokenizer.convert_ids_to_tokens(ids[after]),
            )
        else:
            self._say(
                "%s: after an assistant turn the chat template has no special token that is learnt, so the model does "
                "not learn to stop",
                place,
            )

    def _check_tools(self, talk: Conversation, place: str) -> None:
        if talk.tools or any(message.get("tool_calls") or message["role"] == "tool" for message in talk.messages):
            missing = self._found.missing_for_tools
            raise ConfigError(
                "data.chat_template",
                f"{self._found.name} for rows with tools ({place}), and the tokenizer lacks {', '.join(missing)}",
                "a template whose special tokens the tokenizer has",
                f"write model.add_tokens: {list(missing)}, or set another data.chat_template",
            )

    def _say(self, text: str, *values: str) -> None:
        """Once, whatever the row."""
        if text not in self._said:
            self._said.add(text)
            _log.warning(text, *values)
