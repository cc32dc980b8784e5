"""Training data: sources of rows, template, mask and batches."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lit_fsdp.errors import require

GENERATED = "generated:"
RowFormat = Literal["auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens", "preference"]
NEEDED_COLUMNS: dict[RowFormat, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
"""Required columns by row format; the value ``auto`` selects the first format whose columns are all present."""
_OF_CHATS = ("system", "tools", "functions", "chat_template_kwargs", "label")
OPTIONAL_COLUMNS: dict[RowFormat, tuple[str, ...]] = {
    "preference": ("prompt", *_OF_CHATS[:-1]),
    "messages": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    "instruction": ("input", "history", *_OF_CHATS),
    "prompt_completion": _OF_CHATS,
    "tokens": ("labels", "completion_mask", "attention_mask"),
    "text": (),
}
"""Further columns by row format."""
COLUMNS = tuple(dict.fromkeys(one for by in (NEEDED_COLUMNS, OPTIONAL_COLUMNS) for part in by.values() for one in part))
"""The column names of all row formats."""
ROLES = ("system", "developer", "user", "assistant", "tool")
CALL = "function_call"
"""Role of a message with the assistant's tool calls as JSON."""


@dataclass(frozen=True, kw_only=True)
class TurnsConfig:
    """``data.turns``: keys and roles in the turns of a source, for sources that are not detected automatically."""

    role: str | None = None
    """Key of the role, e.g. speaker."""
    content: str | None = None
    """Key of the text, e.g. utterance."""
    reasoning_content: str | None = None
    """Key of the reasoning text."""
    tool_calls: str | None = None
    """Key of the tool calls."""
    train: str | None = None
    """Key of the flag (true or false, 1 or 0) that marks a turn as supervised."""
    roles: dict[str, str] | None = None
    """Maps the source's roles to standard ones or function_call, e.g. {bot: assistant}; others keep the default."""

    def __post_init__(self) -> None:
        for theirs, ours in (self.roles or {}).items():
            fix = f"write {{{ours}: {theirs}}}" if theirs in ROLES else ""
            require(ours in (*ROLES, CALL), f"roles.{theirs}", ours, f"one of {', '.join((*ROLES, CALL))}", fix)

    @property
    def keys(self) -> dict[str, str]:
        """Map from the standard key to the source's key."""
        return {name: value for name, value in vars(self).items() if name != "roles" and value is not None}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One entry of ``data.train`` (or val, test, predict) with its own share, format and columns."""

    source: str
    """File, glob, folder, Hub dataset (name:split) or generated:N."""
    revision: str | None = None
    """Commit, branch or tag of a Hub dataset; default: the current main branch."""
    weight: float | None = None
    """Sampling weight of this source relative to the other weights; set it for all sources or for none."""
    format: RowFormat | None = None
    """Row format of this source; default: data.format."""
    columns: dict[str, str] | None = None
    """Maps standard column names to the source's, e.g. {messages: chat}; default: data.columns."""
    turns: TurnsConfig | None = None
    """Keys and roles of this source's turns; default: data.turns."""
    name: str | None = None
    """Name of a validation or test set with separate metrics besides the total; set it for all sources or for none."""

    def __post_init__(self) -> None:
        fits = self.weight is None or 0 < self.weight < float("inf")
        require(fits, "weight", self.weight, "a finite number > 0")
        for ours, theirs in (self.columns or {}).items():
            fix = f"write {{{theirs}: {ours}}}" if theirs in COLUMNS else ""
            require(ours in COLUMNS, f"columns.{ours}", theirs, f"one of our columns: {', '.join(COLUMNS)}", fix)


Sources = str | list[str | SourceConfig]
"""Allowed values of ``data.train``."""
Sets = dict[str, str | SourceConfig | list[str | SourceConfig]]
"""Further allowed values of ``data.val`` and ``data.test``: sources by set name."""


def check_sources(split: str, sources: Sources | Sets | None) -> list[SourceConfig]:
    """Check and return the entries of one split; a plain name becomes an entry."""
    if isinstance(sources, dict):
        wrong = next((key for key in sources if key in {field.name for field in fields(SourceConfig)}), None)
        fix = f"write {split}: [{{source: FILE, ...}}] for one source, or rename the set"
        require(wrong is None, f"{split}.{wrong}", sources, "set names that are not keys of a source", fix)
        parts = {name: part if isinstance(part, list) else [part] for name, part in sources.items()}
        empty = next((name for name, part in parts.items() if not part), None)
        require(empty is None, f"{split}.{empty}", "[]", "at least one source", "drop the set")
        sets = {name: check_sources(split, [_entry(one) for one in part]) for name, part in parts.items()}
        return [replace(entry, name=name) for name, part in sets.items() for entry in part]
    is_name = not (isinstance(sources, str) and sources.lstrip("[ ").startswith("{"))
    require(is_name, split, sources, "a source, or a list of sources", f"write {split}: [{{source: FILE, ...}}]")
    entries = [sources] if isinstance(sources, str) else sources or []
    found = [_entry(entry) for entry in entries]
    fits = len({entry.name is None for entry in found}) <= 1
    require(fits, split, "names for some of its sources", "a name for every source, or for none")
    weighted = sum(entry.weight is not None for entry in found)
    given = f"weights for {weighted} of {len(found)} sources"
    allowed, fix = "a weight for every source of the mix, or for none", "add weight: 1 to the others"
    require(weighted in (0, len(found)), split, given, allowed, fix)
    return found


def _entry(given: str | SourceConfig | dict[str, Any]) -> SourceConfig:
    if isinstance(given, SourceConfig):
        return given
    if isinstance(given, str):
        return SourceConfig(source=given)
    turns = given.get("turns")  # jsonargparse leaves it as a mapping, like the entries of a set
    return SourceConfig(**{**given, "turns": TurnsConfig(**turns) if isinstance(turns, dict) else turns})


DEFAULT_BATCH = 16
"""Default number of samples per optimizer step."""
STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""Splits that each verb of the Trainer reads."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section: arguments of :class:`lit_fsdp.CausalLMDataModule`.

    A source is a JSONL, JSON, text, CSV, TSV, Parquet or Arrow file (also as .gz), a glob, a folder of such files
    (``folder:split``, split by file name) or a folder saved by ``datasets``, a Hub dataset (``name:split``,
    ``name:configuration:split``), or ``generated:N`` for N generated chat rows. A mix is a list of sources; an entry
    may be a mapping ``{source, weight, format, columns, turns, revision}``. Named validation and test sets
    (``{easy: a.jsonl, hard: b.jsonl}``) also get separate metrics: ``val_loss/easy`` besides ``val_loss``.
    """

    train: Sources | None = None
    """Source or sources of the training rows."""
    val: Sources | Sets | None = None
    """Source or sources of the validation rows, or a mapping from set names to sources for metrics per set."""
    test: Sources | Sets | None = None
    """Source or sources of the test rows, or a mapping from set names to sources for metrics per set."""
    predict: Sources | None = None
    """Source or sources of the rows to score with predict."""
    val_split: int | float | None = None
    """Validation rows held out from data.train, including duplicates: a share below 1 or a number of rows; the same
    rows in each run; a share holds out at least one row and keeps at least one; 0 or null: none."""
    format: RowFormat = "auto"
    """Row format; auto detects it from the columns."""
    columns: dict[str, str] | None = None
    """Maps standard column names to the source's, e.g. {messages: chat}."""
    turns: TurnsConfig | None = None
    """Keys and roles of the source's turns, e.g. {role: speaker, content: utterance, roles: {bot: assistant}}."""
    chat_template: str | None = None
    """chatml, llama3, mistral, gemma, zephyr, plain, or a file with a Jinja template; default: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the chat template, e.g. {enable_thinking: false}; a row's own column takes precedence."""
    supervise: Literal["all", "last", "flagged"] = "all"
    """Loss on all assistant turns, on the last one, or on those with train: true; train: false excludes a turn."""
    split_turns: bool = False
    """Make one sample per supervised turn: the conversation up to it as at inference, with loss on that turn only."""
    train_on_prompt: bool = False
    """Compute the loss on every token of a conversation, including the prompt."""
    max_seq_length: int = 2048
    """Maximum sample length in tokens; with packing, the length of every pack."""
    truncation: Literal["end", "start", "drop", "error"] = "end"
    """What to remove from a longer conversation: its end or start, the whole row (drop), or nothing (error)."""
    packing: bool = False
    """Pack isolated samples into sequences of max_seq_length; batch sizes count packs; predict does not pack."""
    on_bad_row: Literal["error", "drop"] = "error"
    """Whether a row that cannot be read or masked exactly stops the run (error), or is dropped, counted and logged."""
    unwritten_text: Literal["error", "allow"] = "error"
    """Whether a row is bad if the template omits a non-assistant text or a tool; allow keeps and counts such rows."""
    streaming: bool = False
    """Tokenize during training and store nothing on disk, for sources larger than the disk."""
    shuffle_window: int = 10_000
    """Number of rows shuffled together while streaming."""
    global_batch_size: int | None = None
    """Samples (packs) per optimizer step over all ranks; default: 16, or set by trainer.accumulate_grad_batches."""
    micro_batch_size: int = 1
    """Samples (packs) per rank and forward pass; gradient accumulation is global / (micro * ranks)."""
    shuffle: bool = True
    """Shuffle the training rows in each epoch; false keeps file order."""
    seed: int | None = None
    """Seed of the shuffle; default: seed_everything."""
    num_workers: int = 0
    """DataLoader workers per rank; at most one with streaming."""
    num_tokenizers: int | None = None
    """Processes for tokenization, which runs once per content; default: one per core of this node."""
    cache_dir: str | None = None
    """Folder for tokenized rows; default: $LIT_FSDP_CACHE, else ~/.cache/lit_fsdp."""

    def __post_init__(self) -> None:
        counts = ("global_batch_size", "micro_batch_size", "num_tokenizers", "shuffle_window")
        for field, least in (*((count, 1) for count in counts), ("max_seq_length", 2), ("num_workers", 0)):
            value = getattr(self, field)
            require(value is None or value >= least, field, value, f">= {least}")
        fits = not (self.split_turns and self.train_on_prompt)
        require(fits, "split_turns", "true with train_on_prompt: true", "only one of them: loss on one turn, or on all")
        given = f"true with supervise: {self.supervise}"
        fits = not self.train_on_prompt or self.supervise == "all"
        require(fits, "train_on_prompt", given, "supervise: all, because every token is supervised")
        for split in ("train", "val", "test", "predict"):
            entries = check_sources(split, getattr(self, split))
            fits = split == "train" or not any(entry.weight for entry in entries)
            require(fits, split, "a source with a weight", "no weight: every row counts once")
            named = split not in ("val", "test") and any(entry.name for entry in entries)
            require(not named, split, "a source with a name", "no name: only sets of data.val and data.test have names")
        SourceConfig(source="any", columns=self.columns)  # checks the columns
        object.__setattr__(self, "val_split", self.val_split or None)
        share = self.val_split
        if share is not None:
            fits = 0 < share < 1 or (share >= 1 and float(share).is_integer())
            require(fits, "val_split", share, "a share between 0 and 1, or a number of rows >= 1")
            require(self.val is None, "val_split", f"{share} with data.val", "only one of them")
            fix = "set val_split: null, and val to a source of its own"
            require(not self.streaming, "val_split", f"{share} with streaming: true", "data.val with streaming", fix)

    def has(self, split: str) -> bool:
        """Whether ``train``, ``val``, ``test`` or ``predict`` has rows; val_split provides the rows for val."""
        return bool(getattr(self, split)) or (split == "val" and self.val_split is not None and self.has("train"))


def accumulation_steps(config: DataConfig, world_size: int, accumulate: int | None = None) -> int:
    """Forward passes per optimizer step on each of ``world_size`` ranks: ``global / (micro * ranks)``.

    The argument ``accumulate`` is ``trainer.accumulate_grad_batches`` and may replace ``global_batch_size``.

    Raises:
        ConfigError: The global batch is not a multiple of ``micro_batch_size * world_size``, or the two conflict.
    """
    if config.global_batch_size is None and accumulate is not None:
        return accumulate
    per_forward, total = config.micro_batch_size * world_size, config.global_batch_size or DEFAULT_BATCH
    given = f"{total} with micro_batch_size {config.micro_batch_size} on {world_size} ranks"
    allowed = f"a multiple of micro_batch_size * ranks == {per_forward}"
    fix = f"set global_batch_size: {max(1, round(total / per_forward)) * per_forward}"
    fix += ", or another micro_batch_size" if total % world_size == 0 else ""
    require(total % per_forward == 0, "data.global_batch_size", given, allowed, fix)
    steps = total // per_forward
    given, allowed = f"{accumulate} with global_batch_size {given}", f"{steps}, computed from these values"
    require(accumulate in (None, steps), "trainer.accumulate_grad_batches", given, allowed)
    return steps
