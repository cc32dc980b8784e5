"""Which turns of the assistant are learnt, by ``data.supervise`` and what each message says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from lit_fsdp.data.formats import Message
from lit_fsdp.errors import DataError


def unlearnt_turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant turns that ``data.train_on_prompt`` leaves out: those with ``train: false``."""
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is False]


def learnt_turns(messages: Sequence[Message], supervise: str, place: str) -> list[int]:
    """Indices of the assistant turns that are learnt, by ``data.supervise`` and the messages' own ``train``.

    ``train: false`` is never learnt; ``flagged`` learns what says ``train: true``.

    Raises:
        DataError: ``train: true`` on a message of another role.
    """
    for index, message in enumerate(messages):
        if message.get("train") and message["role"] != "assistant":
            raise DataError(
                f"{place}: message {index}: train: true on a message of the role {message['role']}\n"
                "  allowed: on those of the assistant\n"
                "  fix:     leave train out, or set data.train_on_prompt: true to learn everything"
            )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if supervise == "flagged":
        return [i for i in turns if messages[i].get("train")]
    return [i for i in (turns if supervise == "all" else turns[-1:]) if messages[i].get("train") is not False]


def without_flags(messages: Sequence[Message]) -> list[Message]:
    """The messages without the key that says whether they are learnt, which no template is to see."""
    return [{k: v for k, v in m.items() if k != "train"} if "train" in m else m for m in messages]
