"""The LightningDataModule: rows are tokenised before processes meet, and batches do not depend on their number."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.typed import accepts, build
from lit_fsdp.data.cache import TokenisedRows, prepare_rows
from lit_fsdp.data.collate import collate
from lit_fsdp.data.order import FILLER, GlobalOrder, micro_batches, num_micro_batches
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.data.workers import obey_parent_only, signals_held
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import is_first_process

Batch = dict[str, torch.Tensor]
_log = logging.getLogger(__name__)
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class CausalLMDataModule(LightningDataModule):
    """Chat rows as padded batches; its arguments are the ``data`` section of a recipe.

    In somebody's own Trainer ``prepare_data`` tokenises; the command line calls :meth:`prepare` before.

    Args:
        **options: The fields of :class:`lit_fsdp.config.data.DataConfig`.

    Raises:
        ConfigError: An unknown option or a wrong value.
    """

    @accepts(DataConfig)
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = build(DataConfig, options, "data")
        self.prepare_data_per_node = True
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._seed: int | None = None
        self._rows: dict[str, TokenisedRows] = {}

    def attach(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        """Set the tokenizer, and the seed of the order if ``data.seed`` leaves it open."""
        self._tokenizer, self._seed = tokenizer, seed

    def prepare(self, splits: Sequence[str]) -> dict[str, TokenisedRows]:
        """Tokenise the named splits (``train``, ``val``, ``test``, ``predict``) that the recipe has, or map the cache.

        Any number of processes may call it at the same time; one works.

        Raises:
            DataError: A source or row is bad, or a split has nothing to learn.
            ConfigError: The chat template is missing.
        """
        wanted = [split for split in splits if getattr(self.config, split) and split not in self._rows]
        if wanted:
            template = ChatTemplate(self._tokenizer_or_the_models(), self._template_text(), self.config.supervise)  # type: ignore[arg-type]
            for split in wanted:
                rows = prepare_rows(getattr(self.config, split), self.config, template)
                self._warn_of_long_rows(split, rows)
                self._rows[split] = rows
        return self._rows

    def prepare_data(self) -> None:
        """Lightning's hook, on one process per node: the same as :meth:`prepare`."""
        assert self.trainer is not None
        self.prepare(_STAGES[str(self.trainer.state.fn.value)] if self.trainer.state.fn else ())

    def setup(self, stage: str) -> None:
        """Map the tokenised rows; in training derive the accumulation from the batch sizes and the ranks.

        Raises:
            ConfigError: The batch sizes do not fit the ranks, or another ``accumulate_grad_batches`` was given.
        """
        self.prepare(_STAGES[stage])
        if stage != "fit" or self.trainer is None:
            return
        trainer = self.trainer
        steps = accumulation_steps(self.config.global_batch_size, self.config.micro_batch_size, trainer.world_size)
        if trainer.accumulate_grad_batches not in (1, steps):
            raise ConfigError(
                "trainer.accumulate_grad_batches",
                trainer.accumulate_grad_batches,
                f"{steps}, which follows from data.global_batch_size, data.micro_batch_size and the ranks",
                "drop accumulate_grad_batches",
            )
        trainer.accumulate_grad_batches = steps
        if not self.config.val:
            trainer.limit_val_batches = 0  # or Lightning warns of a loader without batches

    def train_dataloader(self) -> BatchLoader:
        """Micro-batches of this rank from the Trainer's step on."""
        trainer, config = self._trainer(), self.config
        rows = self._split("train")
        order = self._order()
        ranks, rank, micro = trainer.world_size, trainer.global_rank, config.micro_batch_size

        def indices() -> Iterator[list[int]]:
            epoch, first = divmod(int(trainer.global_step), order.batches_per_epoch)
            while True:
                permutation = order.permutation(epoch)
                for index in range(first, order.batches_per_epoch):
                    yield from micro_batches(order.global_batch(permutation, index), micro, ranks, rank)
                epoch, first = epoch + 1, 0

        return self._loader(rows, indices, num_micro_batches(order, micro, ranks))

    def position_at(self, step: int) -> tuple[int, int, int]:
        """Where optimizer step ``step`` (>= 1) ends: epoch (from 0), micro-batches done in it, micro-batches it has."""
        trainer, order = self._trainer(), self._order()
        epoch, index = divmod(step - 1, order.batches_per_epoch)
        length = num_micro_batches(order, self.config.micro_batch_size, trainer.world_size)
        return epoch, min((index + 1) * trainer.accumulate_grad_batches, length), length

    def state_dict(self) -> dict[str, Any]:
        """What the global order depends on, for the checkpoint; the position in it is the Trainer's step."""
        return asdict(self._order()) if "train" in self._rows else {}

    def checkpoint_manifest(self, step: int) -> dict[str, Any]:
        """The data position after optimizer step ``step``: with the order, it is all that decides what comes next."""
        order = self._order()
        epoch, done = divmod(step, order.batches_per_epoch)
        return {"data": {**asdict(order), "epoch": epoch, "global_batches_done_in_epoch": done}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Say so if a run is resumed on other global batches than the checkpoint was trained on."""
        now = self.state_dict()
        other = [
            f"{name} {state_dict[name]} → {now[name]}" for name in now if state_dict.get(name, now[name]) != now[name]
        ]
        if other and is_first_process():
            _log.warning(
                "the checkpoint comes from other global batches, which are not continued: %s", ", ".join(other)
            )

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Every validation row once, in file order; nothing if the recipe has no validation rows."""
        return self._evaluation("val") if self.config.val else []

    def test_dataloader(self) -> BatchLoader:
        """Every test row once, in file order."""
        return self._evaluation("test")

    def predict_dataloader(self) -> BatchLoader:
        """Every row to be scored once, in file order."""
        return self._evaluation("predict")

    def _evaluation(self, split: str) -> BatchLoader:
        trainer, rows = self._trainer(), self._split(split)
        micro = self.config.val_micro_batch_size or self.config.micro_batch_size
        everything = GlobalOrder(len(rows), len(rows), rows.order_fingerprint, 0, shuffle=False)
        batches = micro_batches(everything.permutation(0), micro, trainer.world_size, trainer.global_rank)
        return self._loader(rows, lambda: iter(batches), len(batches))

    def _loader(self, rows: TokenisedRows, indices: Callable[[], Iterator[list[int]]], length: int) -> BatchLoader:
        tokenizer = self._tokenizer_or_the_models()
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return BatchLoader(_Batches(rows, int(pad)), indices, length, self.config.num_workers, self._pin())

    def _warn_of_long_rows(self, split: str, rows: TokenisedRows) -> None:
        limit, longest = self._tokenizer_or_the_models().model_max_length, rows.meta["longest"]
        if longest > limit and is_first_process():
            _log.warning("data.%s: a row of %d tokens, but the model is made for %d", split, longest, limit)

    def _pin(self) -> bool:
        return self._trainer().strategy.root_device.type == "cuda"

    def _split(self, name: str) -> TokenisedRows:
        if name not in self._rows:
            raise ConfigError(f"data.{name}", "null", "a source of rows", f"set data.{name}: rows.jsonl")
        return self._rows[name]

    def _order(self) -> GlobalOrder:
        rows, config = self._split("train"), self.config
        seed = self._order_seed()
        return GlobalOrder(len(rows), config.global_batch_size, rows.order_fingerprint, seed, config.shuffle)

    def _order_seed(self) -> int:
        seeds = (self.config.seed, self._seed, os.environ.get("PL_GLOBAL_SEED"), 0)  # the third by seed_everything
        return int(next(seed for seed in seeds if seed is not None))

    def _trainer(self) -> Any:
        assert self.trainer is not None, "the loaders belong to a Trainer"
        return self.trainer

    def _tokenizer_or_the_models(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            module = self.trainer.lightning_module if self.trainer is not None else None
            tokenizer = getattr(module, "tokenizer", None)
            if tokenizer is None:
                raise ConfigError(
                    "data",
                    "no tokenizer",
                    "a CausalLMModule in the same Trainer, or one attached",
                    "call datamodule.attach(tokenizer, seed)",
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    def _template_text(self) -> str | None:
        if self.config.chat_template is None:
            return None
        path = Path(self.config.chat_template).expanduser()
        if not path.is_file():
            raise ConfigError(
                "data.chat_template", str(path), "an existing file with a Jinja template", "check the path"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "data.chat_template", f"{path} ({error})", "a readable file in UTF-8", "save the file as UTF-8"
            ) from error
        if not text.strip():
            raise ConfigError("data.chat_template", f"{path}, which is empty", "a Jinja template", "check the path")
        return text


class BatchLoader:
    """An iterable of batches; not a torch DataLoader, so that Lightning leaves its order alone.

    Args:
        batches: Row ids to batch.
        indices: Called when the first batch is asked for, and not before: a resumed Trainer knows its step by then.
        length: Batches per epoch; the iterator may go on beyond it.
        num_workers: Loader processes.
        pin_memory: Copy batches into page-locked memory.
    """

    def __init__(
        self,
        batches: _Batches,
        indices: Callable[[], Iterator[list[int]]],
        length: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.batches, self.indices, self.length = batches, indices, length
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the Trainer's step. Having it tells Lightning that the loader can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, see :meth:`state_dict`."""

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            self.batches,
            batch_size=None,
            sampler=_Lazy(self.indices),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # the global one stays as it is, which resuming relies on
            worker_init_fn=obey_parent_only,
        )
        with signals_held():
            batches = iter(loader)
        yield from batches


class _Lazy:
    """A sampler of row ids per batch."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices()


class _Batches(Dataset[Batch]):
    """Maps row ids to a padded batch."""

    def __init__(self, rows: TokenisedRows, pad_id: int) -> None:
        self._rows, self._pad_id = rows, pad_id

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        assert all(FILLER <= index < len(self._rows) for index in indices)
        return collate(self._rows, indices, self._pad_id)
