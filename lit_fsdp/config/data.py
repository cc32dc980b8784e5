"""What is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError

RowFormat = Literal["auto", "messages", "sharegpt", "instruction", "prompt_completion"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section: arguments of :class:`lit_fsdp.CausalLMDataModule`.

    A source is a JSONL, JSON, Parquet or CSV file, a ``datasets`` name (``name:split``), or ``generated:N`` for N
    generated chat rows.
    """

    train: str | list[str] | None = None
    """Source or sources of the training rows."""
    val: str | list[str] | None = None
    """Source or sources of the validation rows."""
    test: str | list[str] | None = None
    """Source or sources of the test rows."""
    predict: str | list[str] | None = None
    """Source or sources of the rows that predict scores."""
    format: RowFormat = "auto"
    """Row format; auto finds it from the columns."""
    chat_template: str | None = None
    """File with a Jinja chat template; default: the tokenizer's own."""
    supervise: Literal["all", "last"] = "all"
    """Loss on all assistant turns, or on the last one only."""
    max_seq_length: int = 2048
    """Longest sample in tokens; longer ones are cut at the end."""
    global_batch_size: int = 16
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int = 1
    """Samples per rank per forward; accumulation follows: global / (micro * ranks)."""
    val_micro_batch_size: int | None = None
    """Samples per rank per validation, test or predict forward; default: micro_batch_size."""
    shuffle: bool = True
    """A new order of the training rows each epoch; false keeps file order."""
    seed: int | None = None
    """Seed of the order; default: seed_everything."""
    num_workers: int = 0
    """Loader processes per rank."""
    cache_dir: str | None = None
    """Folder for tokenised rows; default: $LIT_FSDP_CACHE, else ~/.cache/lit_fsdp."""

    def __post_init__(self) -> None:
        for field in ("max_seq_length", "global_batch_size", "micro_batch_size", "val_micro_batch_size"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(field, value, ">= 1", f"write {field}: 1 or more")
        if self.max_seq_length < 2:
            raise ConfigError("max_seq_length", self.max_seq_length, ">= 2", "leave room for a prompt and an answer")
        if self.num_workers < 0:
            raise ConfigError("num_workers", self.num_workers, ">= 0", "write num_workers: 0")


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
