"""Convert rows to prompts for generation, with the expected answer if the row has one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat, Sources
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.formats import find_format, is_plain, preference_sides, text_of, to_conversation
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import DataError

_NOTHING = {"role": "assistant", "content": ""}


@dataclass(frozen=True)
class Prompt:
    """Prompt token ids including the generation prompt, and the expected answer with its end token, if any."""

    input_ids: list[int]
    wanted: list[int] | None = None


def read_prompts(
    sources: Sources,
    config: DataConfig,
    tokenizer: Any,
    numbers: Collection[int] | None,
    num_embeddings: int | None,
) -> list[Prompt]:
    """Read rows as prompts, with the template and masks of training.

    The answer is the last assistant turn, or the completion. A conversation without an answer gets the generation
    prompt; plain text, or a plain prompt without completion, is not rendered. The argument ``numbers`` selects rows by
    their index over all sources, from 0; the value None selects all rows, of any format.

    Raises:
        DataError: A source or row is invalid, or a prompt leaves no room for its answer.
        ConfigError: The rows are conversations, but no chat template is set.
    """
    asking = replace(config, supervise="last", split_turns=False, train_on_prompt=False)
    encoder = RowEncoder(tokenizer, asking, num_embeddings)
    found = find_sources(sources, replace(config, format="auto") if numbers is None else config)
    rows = ((row, one) for one in found for row in one.rows())
    prompts = []
    for number, ((location, row), source) in enumerate(islice(rows, None if numbers is None else max(numbers) + 1)):
        if numbers is None or number in numbers:
            if isinstance(row, DataError):
                raise row
            # a missing answer does not change the row format
            answers = set() if row.keys() >= {"chosen", "rejected"} else {"completion", "output"}
            form = source.format if source.format != "auto" else find_format({*row, *answers}, location)
            prompts.append(_prompt(row, form, location, encoder))
    if not prompts:
        raise DataError(f"{sources}: no rows\n  fix:     add at least one prompt")
    return prompts


def _prompt(row: Mapping[str, Any], form: RowFormat, location: str, encoder: RowEncoder) -> Prompt:
    if form == "preference":  # the chosen completion is the expected answer
        row, form = preference_sides(row, location)[0], "prompt_completion"
    if form == "text" or (form == "prompt_completion" and is_plain(row) and not row.get("completion")):
        return Prompt(encoder.open_text(text_of(row, "text" if form == "text" else "prompt", location), location))
    if form not in ("tokens", "prompt_completion") or not is_plain(row):
        given = {name: value for name, value in row.items() if value is not None}
        conversation = to_conversation({"output": "", "completion": [_NOTHING], **given}, form, location)
        *before, last = conversation.messages
        if last["role"] != "assistant":
            return Prompt(encoder.open_conversation(conversation, location))
        if last == _NOTHING:
            return Prompt(encoder.open_conversation(replace(conversation, messages=before), location))
    (encoded,) = encoder.encode([row], form, [location])
    if not encoded.samples:
        raise DataError(
            f"{location}: no usable prompt ({encoded.dropped[0]})\n  fix:     remove this row from the prompts"
        )
    ids, mask = encoded.samples[0].input_ids.tolist(), encoded.samples[0].supervised
    start = int(np.flatnonzero(~mask[: np.flatnonzero(mask)[-1]])[-1]) + 1
    return Prompt(ids[:start], ids[start:])
