"""What is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.config.sources import RowFormat, Sources, check_columns, check_sources
from lit_fsdp.errors import ConfigError

Truncation = Literal["end", "start", "drop", "error"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section: arguments of :class:`lit_fsdp.CausalLMDataModule`.

    A source is a JSONL, JSON, Parquet, CSV, TSV or Arrow file (text also as .gz), a glob, a folder of such files
    (``folder:split``, split by file name) or one that ``datasets`` saved, a ``datasets`` name (``name:split``,
    ``name:configuration:split``), or ``generated:N`` for N generated chat rows. A mix is a list of sources; an entry
    may be a mapping ``{source, weight, format, columns}``.
    """

    train: Sources | None = None
    """Source or sources of the training rows."""
    val: Sources | None = None
    """Source or sources of the validation rows."""
    test: Sources | None = None
    """Source or sources of the test rows."""
    predict: Sources | None = None
    """Source or sources of the rows that predict scores."""
    val_split: int | float | None = None
    """Validation rows taken from data.train, copies too: a share below 1 or a number of rows; the same in each run."""
    format: RowFormat = "auto"
    """Row format; auto finds it from the columns."""
    columns: dict[str, str] | None = None
    """Our column: the source's column, e.g. {messages: chat}."""
    chat_template: str | None = None
    """chatml, llama3, mistral, gemma, zephyr, plain, or a file with a Jinja template; default: the tokenizer's own."""
    supervise: Literal["all", "last", "flagged"] = "all"
    """Loss on all assistant turns, on the last, or on those whose message says train: true; train: false never is."""
    train_on_prompt: bool = False
    """Loss on every token of a conversation, the prompt too."""
    max_seq_length: int = 2048
    """Longest sample in tokens; with packing the length of every pack."""
    truncation: Truncation = "end"
    """What is cut off a longer conversation: its end or its start, the whole row (drop), or nothing (error)."""
    packing: bool = False
    """Several samples to a sequence of max_seq_length; none sees another. Batch sizes count packs; predict has none."""
    max_dropped_share: float = 0.5
    """Largest share of rows cut so far that nothing is left to learn; more of them stop the run."""
    streaming: bool = False
    """Tokenise while training and keep nothing on disk, for sources larger than it."""
    shuffle_window: int = 10_000
    """Rows that are shuffled among each other while streaming."""
    global_batch_size: int = 16
    """Samples (packs) per optimizer step over all ranks."""
    micro_batch_size: int = 1
    """Samples (packs) per rank per forward; accumulation follows: global / (micro * ranks)."""
    val_micro_batch_size: int | None = None
    """Samples (packs) per rank per validation, test or predict forward; default: micro_batch_size."""
    shuffle: bool = True
    """A new order of the training rows each epoch; false keeps file order."""
    seed: int | None = None
    """Seed of the order; default: seed_everything."""
    num_workers: int = 0
    """Loader processes per rank."""
    num_tokenizers: int | None = None
    """Processes that tokenise, once per content; default: one per core of this node."""
    cache_dir: str | None = None
    """Folder for tokenised rows; default: $LIT_FSDP_CACHE, else ~/.cache/lit_fsdp."""

    def __post_init__(self) -> None:
        for field in (
            "max_seq_length",
            "global_batch_size",
            "micro_batch_size",
            "val_micro_batch_size",
            "num_tokenizers",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(field, value, ">= 1", f"write {field}: 1 or more")
        if self.max_seq_length < 2:
            raise ConfigError("max_seq_length", self.max_seq_length, ">= 2", "leave room for a prompt and an answer")
        if self.num_workers < 0:
            raise ConfigError("num_workers", self.num_workers, ">= 0", "write num_workers: 0")
        if self.shuffle_window < 1:
            raise ConfigError("shuffle_window", self.shuffle_window, ">= 1", "write shuffle_window: 10000")
        if not 0 <= self.max_dropped_share <= 1:
            raise ConfigError("max_dropped_share", self.max_dropped_share, "0 to 1", "write max_dropped_share: 0.5")
        if self.train_on_prompt and self.supervise != "all":
            given = f"true with supervise: {self.supervise}"
            raise ConfigError(
                "train_on_prompt", given, "supervise: all, as every token is learnt", "drop one of the two"
            )
        for split in ("train", "val", "test", "predict"):
            entries = check_sources(split, getattr(self, split))
            if split != "train" and any(entry.weight is not None for entry in entries):
                raise ConfigError(split, "a source with a weight", "none: every row counts once", "drop the weights")
        check_columns("columns", self.columns)
        self._check_val_split()

    def has(self, split: str) -> bool:
        """Whether there are rows for ``train``, ``val``, ``test`` or ``predict``; val_split makes those for val."""
        return bool(getattr(self, split)) or (split == "val" and self.val_split is not None and self.has("train"))

    def _check_val_split(self) -> None:
        split = self.val_split
        if split is None:
            return
        if not (0 < split < 1 or (split >= 1 and float(split).is_integer())):
            raise ConfigError(
                "val_split", split, "a share between 0 and 1, or a number of rows >= 1", "write val_split: 0.01"
            )
        if self.val is not None:
            raise ConfigError("val_split", f"{split} beside data.val", "one of the two", "drop val_split, or val")
        if self.streaming:
            raise ConfigError(
                "val_split", f"{split} with streaming: true", "null: a stream has no number of rows", "name data.val"
            )


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Forward passes per optimizer step on each rank: ``global / (micro * ranks)``.

    Raises:
        ConfigError: The global batch is not a multiple of ``micro_batch_size * world_size``.
    """
    per_forward = micro_batch_size * world_size
    if global_batch_size % per_forward:
        nearest = max(1, round(global_batch_size / per_forward)) * per_forward
        raise ConfigError(
            "data.global_batch_size",
            f"{global_batch_size} with micro_batch_size {micro_batch_size} on {world_size} ranks",
            f"a multiple of micro_batch_size * ranks == {per_forward}",
            f"set global_batch_size: {nearest}, or another micro_batch_size",
        )
    return global_batch_size // per_forward
