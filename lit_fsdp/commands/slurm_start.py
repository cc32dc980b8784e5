"""What ``fit`` refuses in the first seconds of a job, asked before one is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.errors import ConfigError

if TYPE_CHECKING:
    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.config.run import RunConfig


def check_keys(values: dict[str, Any]) -> None:
    """Let Lightning's parser and Trainer judge a checked recipe as in the job; this machine's devices do not count.

    Raises:
        ConfigError: A key, class or value that only Lightning knows to be wrong.
    """
    from lit_fsdp.cli_parse import check_parses
    from lit_fsdp.trainer_keys import check_trainer_values

    check_trainer_values(check_parses(values, []))


def tokenizer_is_there(run: RunConfig) -> Iterator[ConfigError]:
    """Refuse a model without a tokenizer, or with one that does not fit, as far as both are on this disk."""
    model = run.model
    if run.slurm.container or run.slurm.command or model.miniature or not _is_here(model):  # other packages there
        return
    from lit_fsdp.models.resolve import ModelSource, resolve_architecture
    from lit_fsdp.models.tokenizers import load_tokenizer

    beside = None if _is_config(model.name) else str(model.name)
    try:
        architecture = resolve_architecture(model)
        load_tokenizer(ModelSource(architecture, None, model.tokenizer or beside, str(model.name)), model)
    except ConfigError as error:
        yield error


def _is_here(model: ModelConfig) -> bool:
    """Whether nothing has to be fetched, and whatever is named exists: lint speaks of what does not."""
    name, tokenizer = model.name, model.tokenizer
    there = isinstance(name, Mapping) or Path(str(name)).expanduser().exists()
    if there and not _is_config(name) and not Path(str(name)).expanduser().is_dir():
        return False  # a GGUF file brings its tokenizer, which is converted first
    return there and (tokenizer is None or Path(tokenizer).expanduser().is_dir())


def _is_config(name: str | Mapping[str, Any] | None) -> bool:
    return isinstance(name, Mapping) or str(name).endswith(".json")
