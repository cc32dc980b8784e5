"""What is trained on: sources of rows, template, mask, batches."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lit_fsdp.errors import require

GENERATED = "generated:"
RowFormat = Literal["auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens", "preference"]
NEEDED_COLUMNS: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}
"""Columns that each row format needs; ``auto`` is the first format whose columns a row has."""
COLUMNS = (
    *(column for needed in NEEDED_COLUMNS.values() for column in needed),
    *("system", "tools", "functions", "input", "history", "chat_template_kwargs"),
    *("labels", "completion_mask", "attention_mask"),
)
"""Our columns, of all row formats."""
ROLES = ("system", "developer", "user", "assistant", "tool")
CALL = "function_call"
"""Role of a message that holds the assistant's calls as JSON."""


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """``data.turns``: how a source names the keys and roles of its turns, for one that is not read by itself."""

    role: str | None = None
    """Key of the role, e.g. speaker."""
    content: str | None = None
    """Key of the text, e.g. utterance."""
    reasoning_content: str | None = None
    """Key of the thoughts."""
    tool_calls: str | None = None
    """Key of the calls."""
    train: str | None = None
    """Key that says whether the turn is supervised, by true and false or 1 and 0."""
    roles: dict[str, str] | None = None
    """The source's role: our role, or function_call, e.g. {bot: assistant}; further ones are read as without it."""

    def __post_init__(self) -> None:
        for theirs, ours in (self.roles or {}).items():
            fix = f"write {{{ours}: {theirs}}}" if theirs in ROLES else ""
            require(ours in (*ROLES, CALL), f"roles.{theirs}", ours, f"one of {', '.join((*ROLES, CALL))}", fix)

    @property
    def keys(self) -> dict[str, str]:
        """Our key: the source's key."""
        return {name: value for name, value in vars(self).items() if name != "roles" and value is not None}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One entry of ``data.train`` (or val, test, predict) with its own share, format and columns."""

    source: str
    """File, glob, folder, datasets name (name:split) or generated:N."""
    revision: str | None = None
    """Commit, branch or tag of a datasets name; default: its main branch as it is now."""
    weight: float | None = None
    """Share of the samples that come from here, relative to the other weights; either all sources have one or none."""
    format: RowFormat | None = None
    """Row format of this source; default: data.format."""
    columns: dict[str, str] | None = None
    """Our column: the source's column, e.g. {messages: chat}; default: data.columns."""
    turns: TurnsConfig | None = None
    """Keys and roles of this source's turns; default: data.turns."""
    name: str | None = None
    """Set of validation or test rows with metrics of its own beside those of all; all sources have one or none."""

    def __post_init__(self) -> None:
        fits = self.weight is None or 0 < self.weight < float("inf")
        require(fits, "weight", self.weight, "a finite number > 0")
        for ours, theirs in (self.columns or {}).items():
            fix = f"write {{{theirs}: {ours}}}" if theirs in COLUMNS else ""
            require(ours in COLUMNS, f"columns.{ours}", theirs, f"one of our columns: {', '.join(COLUMNS)}", fix)


Sources = str | list[str | SourceConfig]
"""What ``data.train`` may hold."""
Sets = dict[str, str | SourceConfig | list[str | SourceConfig]]
"""What ``data.val`` and ``data.test`` may hold beside that: sources by the name of their set."""


def check_sources(split: str, sources: Sources | Sets | None) -> list[SourceConfig]:
    """Check and return the entries of one split, names alone as entries of their own."""
    if isinstance(sources, dict):
        wrong = next((key for key in sources if key in {field.name for field in fields(SourceConfig)}), None)
        fix = f"write {split}: [{{source: FILE, ...}}] for one source, or other names"
        require(wrong is None, f"{split}.{wrong}", sources, "names of sets, and none that is a key of a source", fix)
        parts = {name: part if isinstance(part, list) else [part] for name, part in sources.items()}
        empty = next((name for name, part in parts.items() if not part), None)
        require(empty is None, f"{split}.{empty}", "[]", "at least one source", "drop the set")
        sets = {name: check_sources(split, [_entry(one) for one in part]) for name, part in parts.items()}
        return [replace(entry, name=name) for name, part in sets.items() for entry in part]
    entries = [sources] if isinstance(sources, str) else sources or []
    found = [_entry(entry) for entry in entries]
    fits = len({entry.name is None for entry in found}) <= 1
    require(fits, split, "names for some of its sources", "a name for every source, or for none")
    weighted = sum(entry.weight is not None for entry in found)
    given = f"weights for {weighted} of {len(found)} sources"
    require(weighted in (0, len(found)), split, given, "a weight for every source of the mix, or for none")
    return found


def _entry(given: str | SourceConfig | dict[str, Any]) -> SourceConfig:
    if isinstance(given, SourceConfig):
        return given
    if isinstance(given, str):
        return SourceConfig(source=given)
    turns = given.get("turns")  # which jsonargparse leaves a mapping, as it does the entries of a set
    return SourceConfig(**{**given, "turns": TurnsConfig(**turns) if isinstance(turns, dict) else turns})


DEFAULT_BATCH = 16
"""Samples per optimizer step of a recipe that says nothing."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section: arguments of :class:`lit_fsdp.CausalLMDataModule`.

    A source is a JSONL, JSON, text, CSV, TSV, Parquet or Arrow file (also as .gz), a glob, a folder of such files
    (``folder:split``, split by file name) or one that ``datasets`` saved, a ``datasets`` name (``name:split``,
    ``name:configuration:split``), or ``generated:N`` for N generated chat rows. A mix is a list of sources; an entry
    may be a mapping ``{source, weight, format, columns, turns, revision}``. Sets of val and test that have names
    (``{easy: a.jsonl, hard: b.jsonl}``) get metrics of their own too: ``val_loss/easy`` beside ``val_loss``.
    """

    train: Sources | None = None
    """Source or sources of the training rows."""
    val: Sources | Sets | None = None
    """Source or sources of the validation rows, or a mapping of them by name, for metrics of each."""
    test: Sources | Sets | None = None
    """Source or sources of the test rows, or a mapping of them by name, for metrics of each."""
    predict: Sources | None = None
    """Source or sources of the rows that predict scores."""
    val_split: int | float | None = None
    """Validation rows taken from data.train, copies too: a share below 1 or a number of rows; the same in each run;
    of few rows a share takes at least one and leaves one; 0 or null: none."""
    format: RowFormat = "auto"
    """Row format; auto finds it from the columns."""
    columns: dict[str, str] | None = None
    """Our column: the source's column, e.g. {messages: chat}."""
    turns: TurnsConfig | None = None
    """Keys and roles of the source's turns, e.g. {role: speaker, content: utterance, roles: {bot: assistant}}."""
    chat_template: str | None = None
    """chatml, llama3, mistral, gemma, zephyr, plain, or a file with a Jinja template; default: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, e.g. {enable_thinking: false}; a row's own column goes before."""
    supervise: Literal["all", "last", "flagged"] = "all"
    """Loss on all assistant turns, on the last, or on those whose message says train: true; train: false never is."""
    split_turns: bool = False
    """A sample for each of these turns, with the conversation up to it as at inference, and loss on that turn alone."""
    train_on_prompt: bool = False
    """Loss on every token of a conversation, the prompt too."""
    max_seq_length: int = 2048
    """Longest sample in tokens; with packing the length of every pack."""
    truncation: Literal["end", "start", "drop", "error"] = "end"
    """What is cut off a longer conversation: its end or its start, the whole row (drop), or nothing (error)."""
    packing: bool = False
    """Several samples to a sequence of max_seq_length; none sees another. Batch sizes count packs; predict has none."""
    on_bad_row: Literal["error", "drop"] = "error"
    """A row that cannot be read or marked exactly stops the run, or is dropped, counted and named."""
    unwritten_text: Literal["error", "allow"] = "error"
    """A row is bad if its template leaves out a text that is not the assistant's, or a tool; allow counts such rows."""
    streaming: bool = False
    """Tokenize while training and keep nothing on disk, for sources larger than it."""
    shuffle_window: int = 10_000
    """Rows that are shuffled among each other while streaming."""
    global_batch_size: int | None = None
    """Samples (packs) per optimizer step over all ranks; default: 16, or what trainer.accumulate_grad_batches makes."""
    micro_batch_size: int = 1
    """Samples (packs) per rank per forward; accumulation follows: global / (micro * ranks)."""
    shuffle: bool = True
    """A new order of the training rows each epoch; false keeps file order."""
    seed: int | None = None
    """Seed of the order; default: seed_everything."""
    num_workers: int = 0
    """Loader processes per rank; a stream has one at most."""
    num_tokenizers: int | None = None
    """Processes that tokenize, once per content; default: one per core of this node."""
    cache_dir: str | None = None
    """Folder for tokenized rows; default: $LIT_FSDP_CACHE, else ~/.cache/lit_fsdp."""

    def __post_init__(self) -> None:
        counts = ("global_batch_size", "micro_batch_size", "num_tokenizers", "shuffle_window")
        for field, least in (*((count, 1) for count in counts), ("max_seq_length", 2), ("num_workers", 0)):
            value = getattr(self, field)
            require(value is None or value >= least, field, value, f">= {least}")
        fits = not (self.split_turns and self.train_on_prompt)
        require(fits, "split_turns", "true with train_on_prompt: true", "one of the two: loss on a turn, or on all")
        given = f"true with supervise: {self.supervise}"
        fits = not self.train_on_prompt or self.supervise == "all"
        require(fits, "train_on_prompt", given, "supervise: all, as every token is supervised")
        for split in ("train", "val", "test", "predict"):
            entries = check_sources(split, getattr(self, split))
            fits = split == "train" or not any(entry.weight for entry in entries)
            require(fits, split, "a source with a weight", "none: every row counts once")
            named = split not in ("val", "test") and any(entry.name for entry in entries)
            require(not named, split, "a source with a name", "none: sets of data.val and data.test have one")
        SourceConfig(source="any", columns=self.columns)  # where columns are checked
        object.__setattr__(self, "val_split", self.val_split or None)
        share = self.val_split
        if share is not None:
            fits = 0 < share < 1 or (share >= 1 and float(share).is_integer())
            require(fits, "val_split", share, "a share between 0 and 1, or a number of rows >= 1")
            require(self.val is None, "val_split", f"{share} beside data.val", "one of the two")
            require(not self.streaming, "val_split", f"{share} with streaming: true", "data.val, for a stream")

    def has(self, split: str) -> bool:
        """Whether there are rows for ``train``, ``val``, ``test`` or ``predict``; val_split makes those for val."""
        return bool(getattr(self, split)) or (split == "val" and self.val_split is not None and self.has("train"))


def accumulation_steps(config: DataConfig, world_size: int, accumulate: int | None = None) -> int:
    """Forward passes per optimizer step on each of ``world_size`` ranks: ``global / (micro * ranks)``.

    ``accumulate``, which is ``trainer.accumulate_grad_batches``, may stand in place of ``global_batch_size``.

    Raises:
        ConfigError: The global batch is not a multiple of ``micro_batch_size * world_size``, or the two do not agree.
    """
    if config.global_batch_size is None and accumulate is not None:
        return accumulate
    per_forward, total = config.micro_batch_size * world_size, config.global_batch_size or DEFAULT_BATCH
    given = f"{total} with micro_batch_size {config.micro_batch_size} on {world_size} ranks"
    allowed = f"a multiple of micro_batch_size * ranks == {per_forward}"
    fix = f"set global_batch_size: {max(1, round(total / per_forward)) * per_forward}, or another micro_batch_size"
    require(total % per_forward == 0, "data.global_batch_size", given, allowed, fix)
    steps = total // per_forward
    given, allowed = f"{accumulate} with global_batch_size {given}", f"{steps}, which follows from them"
    require(accumulate in (None, steps), "trainer.accumulate_grad_batches", given, allowed)
    return steps
