"""LightningDataModule that tokenizes before ranks synchronize; batches do not depend on the number of ranks."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from transformers import PreTrainedTokenizerBase

from lit_fsdp.config.data import DEFAULT_BATCH, STAGES, DataConfig, accumulation_steps
from lit_fsdp.config.run import check_whole_batches
from lit_fsdp.config.sections import build, refuse_positional, takes_fields
from lit_fsdp.data.batches import BatchLoader, SampleBatches
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import GlobalOrder, Start, micro_batches, num_micro_batches
from lit_fsdp.data.packing import Samples, describe_data
from lit_fsdp.data.prompts import Prompt, read_prompts
from lit_fsdp.data.sources import pinned
from lit_fsdp.data.stream import SampleStream, StreamLoader, prepare_samples
from lit_fsdp.data.workers import load
from lit_fsdp.errors import ConfigError, DataError, require
from lit_fsdp.host import is_first_process
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.tokenizers import pad_id
from lit_fsdp.parallel.mesh import data_ranks

_log = logging.getLogger(__name__)


class CausalLMDataModule(LightningDataModule):
    """Padded or packed batches of rows; its arguments are the fields of :class:`lit_fsdp.config.data.DataConfig`.

    With your own Trainer ``prepare_data`` tokenizes; the command line calls :meth:`prepare` before. All ranks read a
    data set on the hub at the commit that the first rank resolved.
    """

    num_embeddings: int | None = None  # larger token ids raise DataError; None: the module's value, if any

    @takes_fields(DataConfig)
    def __init__(self, *sources: Any, **kwargs: Any) -> None:
        self._init_bases()
        refuse_positional("CausalLMDataModule", DataConfig, sources)
        kwargs = vars(build(DataConfig, kwargs, "data"))
        self.config = DataConfig(**kwargs)  # jsonargparse finds the recipe's arguments here
        self.prepare_data_per_node = True
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._seed: int | None = None
        self._is_preference: bool | None = None
        self._samples: dict[str, Samples] = {}
        self._refused: Exception | None = None
        self._stream: StreamLoader | None = None
        self._streams_train = False
        self._position: dict[str, Any] | None = None
        self._before: tuple[GlobalOrder, Start] | None = None
        self._start = Start()

    def _init_bases(self) -> None:
        # Not in __init__: save_hyperparameters() of a base class after this one would look up every argument of the
        # signature in that frame.
        super().__init__()

    def attach(self, tokenizer: PreTrainedTokenizerBase, seed: int, is_preference: bool | None = None) -> None:
        """Set the model's tokenizer, the run's seed, and whether rows should be pairs of completions (None: any)."""
        self._tokenizer, self._seed, self._is_preference = tokenizer, seed, is_preference

    def prepare(self, splits: Sequence[str]) -> dict[str, Samples]:
        """Tokenize and pack the requested splits of the recipe; see :func:`prepare_samples`."""
        if self._is_preference is None:
            module = getattr(self.trainer, "lightning_module", None)
            self._is_preference = getattr(module, "is_preference", None)
        if self._is_preference and self.config.format == "auto":
            self.config = dataclasses.replace(self.config, format="preference")
        held_out = self.config.val_split is not None
        for split in ("train" if split == "val" and held_out else split for split in splits):
            entries: dict[str, Any] = {split: pinned(getattr(self.config, split)) or None}
            self.config = dataclasses.replace(self.config, **entries)
        self._streams_train |= self.config.streaming and "train" in splits and self.config.has("train")
        done = {*self._samples, *(["train"] if self._streams_train else [])}
        wanted = [split for split in splits if split not in done]
        self._samples |= prepare_samples(self.config, wanted, self._encoder()) if wanted else {}
        found: dict[str, Any] = {split: self._samples[split] for split in wanted if split in self._samples}
        if self._streams_train and self._stream is None:
            found["train"] = SampleStream(self.config, self._encoder(), 0)
        kinds = "rows with one completion, for CausalLMModule", "pairs, for lit_fsdp.PreferenceModule"
        for split, has in found.items():
            fits = self._is_preference in (None, has.pairs)
            fix = "set model.class_path: lit_fsdp.PreferenceModule, or data.format: messages to train on that column"
            require(fits, f"data.{split}", kinds[has.pairs], kinds[not has.pairs], fix if has.pairs else "")
        return self._samples

    def describe(self) -> dict[str, Any]:
        """Summarize the prepared splits; see :func:`describe_data`."""
        encoder = self._encoder()
        first = prepare_samples(self.config, ("train",), encoder) if self._streams_train else {}
        return describe_data({**first, **self._samples}, self.config, encoder)

    def prompts(self, of: int | str) -> list[Prompt]:
        """Return prompts of the first ``of`` kept validation rows, or of all rows of a source."""
        tokenizer, config = self._tokenizer_or_the_models(), self.config
        if isinstance(of, str):
            return read_prompts(of, config, tokenizer, None, self._num_embeddings)
        self.prepare(("val",))
        samples = self._split("val")
        numbers = np.unique(samples.rows.numbers[samples.row_ids])[:of].tolist()
        sources: Any = config.train if config.val_split is not None else config.val
        return read_prompts(sources, config, tokenizer, set(numbers), self._num_embeddings)

    def prepare_data(self) -> None:
        """Run :meth:`prepare` in one process per node; :meth:`setup` raises errors, as others wait at a barrier."""
        trainer = self._trainer()
        try:
            self.prepare(STAGES[str(trainer.state.fn.value)] if trainer.state.fn else ())
        except Exception as error:
            self._refused = error

    def setup(self, stage: str) -> None:
        """Memory-map the tokenized rows at the commits of the first rank; for training, set the accumulation steps.

        An error of one rank in :meth:`prepare_data` is raised on all ranks.
        """
        if self.trainer is not None:
            strategy, refused, self._refused = self.trainer.strategy, self._refused, None
            is_good = strategy.reduce_boolean_decision(refused is None)
            reason, config = strategy.broadcast((str(refused) if refused else None, self.config))
            if not is_good:
                raise refused or DataError(reason or "another node could not prepare the data; see its log")
            config = dataclasses.replace(config, cache_dir=self.config.cache_dir)  # specific to a node
            if config != self.config:  # for example after a push to the hub in the meantime
                self.config, self._samples = config, {}
        self.prepare(STAGES[stage])
        if stage != "fit" or self.trainer is None:
            return
        self._stream = self._position = self._before = None
        self._start = Start()
        trainer: Any = self.trainer
        callbacks: Any = getattr(trainer, "callbacks", ())
        is_proved = any(getattr(callback, "proves_isolation", False) for callback in callbacks)
        if self.config.packing and not is_proved and is_first_process():
            give = "pass callbacks=[lit_fsdp.IsolationProof()] to the Trainer"
            _log.warning("data.packing: %s to verify that packed samples do not attend to each other", give)
        scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        allowed = "one data.global_batch_size for the whole run: the order of samples is a function of the step"
        require(not scheduled, "trainer.callbacks", "GradientAccumulationScheduler", allowed, "drop it")
        may_be_cut = self.config.streaming or trainer.fast_dev_run
        check_whole_batches(trainer.overfit_batches, None if may_be_cut else trainer.limit_train_batches)
        given = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.fix_batches(data_ranks(trainer)[0], given if given > 1 else None)
        if not self.config.has("val"):
            trainer.limit_val_batches = 0  # or Lightning warns of a loader without batches

    def fix_batches(self, world_size: int, accumulate: int | None) -> int:
        """Set the global batch size, and return the forward passes per step; see :func:`accumulation_steps`."""
        steps = accumulation_steps(self.config, world_size, accumulate)
        total = steps * self.config.micro_batch_size * world_size
        self.config = dataclasses.replace(self.config, global_batch_size=total)
        return steps

    def train_dataloader(self) -> BatchLoader | StreamLoader:
        """Return the micro-batches of this rank, starting at the Trainer's step."""
        trainer, config = self._trainer(), self.config
        if config.streaming:
            return self._streamed()
        order = self._order()
        (ranks, rank), micro = data_ranks(trainer), config.micro_batch_size

        def indices() -> Iterator[list[int]]:
            step, before = int(trainer.global_step), self._before
            if before is not None and before[0] != order and is_first_process():  # nobody called resume_at
                text = "without the callback lit_fsdp.Checkpoint, this resume can end epochs early or late"
                _log.warning(text)
            epoch, items = order.position(step, self._started(step))
            while True:
                permutation = order.permutation(epoch)
                while items < order.num_rows:
                    batch = order.global_batch(permutation, items)
                    yield from micro_batches(batch, micro, ranks, rank)
                    items += len(batch)
                epoch, items = epoch + 1, 0

        return self._loader("train", indices, num_micro_batches(order, micro, ranks))

    def rows_of_step(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return token ids and mask of every row, including rows in packs, of optimizer step ``step`` (from 0)."""
        order, samples = self._order(), self._split("train")
        epoch, items = order.position(step, self._start)
        batch = order.global_batch(order.permutation(epoch), items)
        return [samples.rows.row(int(row)) for item in batch for row in samples.members(int(item))]

    def position_at(self, step: int) -> tuple[int, int, int]:
        """Return where step ``step`` (>= 1) ends: epoch (from 0), and its finished and total micro-batches."""
        accumulate = self._trainer().accumulate_grad_batches
        if self.config.streaming:
            return 0, step * accumulate, (step + 1) * accumulate
        order = self._order()
        epoch, index = divmod(step - 1, order.batches_per_epoch)
        length = num_micro_batches(order, self.config.micro_batch_size, data_ranks(self._trainer())[0])
        return epoch, min((index + 1) * accumulate, length), length

    def state_dict(self) -> dict[str, Any]:
        """Return what the global order depends on; the position is the Trainer's step, or that of a stream."""
        if self._stream is not None:
            return self._stream.record(int(self._trainer().global_step))
        return {**self._order().record(), "start": dataclasses.asdict(self._start)} if "train" in self._samples else {}

    def checkpoint_manifest(self, step: int) -> dict[str, Any]:
        """Return the data position after optimizer step ``step``, which with the order determines all later batches."""
        if self._stream is not None:
            return {"data": self._stream.record(step)}
        order = self._order()
        epoch, items = order.position(step, self._start)
        done = items // order.global_batch_size
        return {"data": {**order.record(), "epoch": epoch, "global_batches_done_in_epoch": done}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note the order of the checkpoint and log changes; DataError for a stream whose position becomes invalid."""
        self._position = state_dict.get("position")
        if not self._streams_train and "train" not in self._samples:  # an evaluation
            return
        now = self._streamed().stream.record() if self._streams_train else self._order().record()
        then = {name: state_dict.get(name, now[name]) for name in now}
        other = ", ".join(f"{name} {then[name]} → {now[name]}" for name in now if then[name] != now[name])
        if self._streams_train and self._position and then["fingerprint"] != now["fingerprint"]:
            fix = "resume with the same files, or the same revision of each source"
            raise DataError(f"data.train: the stream differs from that of the checkpoint: {other}\n  fix:     {fix}")
        if not self._streams_train:
            order: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in then.items()
            }
            self._before = GlobalOrder(**order), Start(**state_dict.get("start", {}))
        if other and is_first_process():
            _log.warning("global batches differ from those of the checkpoint: %s", other)

    def resume_at(self, step: int) -> tuple[int, int] | None:
        """Return the consumed and the total micro-batches of the epoch, if a resume changes the global batches."""
        before, start = self._before, self._started(step)
        if before is None or before[0] == (now := self._order()):
            return None
        ranks = data_ranks(self._trainer())[0]
        total, rest = (num_micro_batches(now, self.config.micro_batch_size, ranks, n) for n in (0, start.items))
        return total if start.epoch > before[0].position(step, before[1])[0] else total - rest, total

    @property
    def extra_steps(self) -> int:
        """Steps of the run in addition to those of whole epochs, after a resume with other global batches."""
        start = self._start
        if start == Start():
            return 0
        order = self._order()
        return start.step - start.epoch * order.batches_per_epoch - start.items // order.global_batch_size

    def _started(self, step: int) -> Start:
        """Return the start of the order in this run, which begins at ``step``."""
        before, self._before = self._before, None
        if before is not None:
            now = self._order()
            self._start = before[1] if before[0] == now else now.continued(*before, step)
        return self._start

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Return every validation row once, in file order; empty if the recipe has no validation rows."""
        return self._evaluation("val") if self.config.has("val") else []

    def test_dataloader(self) -> BatchLoader:
        """Return every test row once, in file order."""
        return self._evaluation("test")

    def predict_dataloader(self) -> BatchLoader:
        """Return every row to score once, in file order."""
        return self._evaluation("predict")

    def sets_of(self, split: str) -> list[tuple[str, int]]:
        """Return the named sets of a split in item order, each with its exclusive end index."""
        samples = self._samples.get(split)
        return [] if samples is None else list(zip(samples.sets, np.cumsum(samples.groups).tolist(), strict=False))

    def in_order(self, split: str) -> tuple[BatchLoader, int, str] | None:
        """Return all items of a split in file order, their number, and an identity; None if the split is missing."""
        if split not in self._samples:
            return None
        samples = self._samples[split]
        identity = f"{samples.rows.meta['fingerprint']}/{samples.order_fingerprint}"
        return self._evaluation(split), len(samples), identity

    def _streamed(self) -> StreamLoader:
        if self._stream is None:
            trainer, config, pad = self._trainer(), self.config, self._pad_id()
            stream = SampleStream(config, self._encoder(), self._order_seed())
            pin, (ranks, rank) = is_accelerator(trainer.strategy.root_device), data_ranks(trainer)
            self._stream = StreamLoader(stream, rank, ranks, pad, config, pin)
            self._stream.begin = lambda: (int(trainer.global_step), self._position)
        return self._stream

    def _evaluation(self, split: str) -> BatchLoader:
        trainer, samples = self._trainer(), self._split(split)
        parts = np.split(np.arange(len(samples)), np.cumsum(samples.groups)[:-1] if samples.sets else [])
        cut = partial(micro_batches, micro_batch_size=self.config.micro_batch_size)
        # each batch has items of one set; sets alternate, so that trainer.limit_val_batches keeps some of each
        ranks, rank = data_ranks(trainer)
        turns = zip_longest(*(cut(part, ranks=ranks, rank=rank) for part in parts))
        batches = [one for turn in turns for one in turn if one is not None]
        return self._loader(split, lambda: iter(batches), len(batches))

    def _loader(self, split: str, indices: Callable[[], Iterator[list[int]]], length: int) -> BatchLoader:
        batches = SampleBatches(self._split(split), self._pad_id())
        pin_memory = is_accelerator(self._trainer().strategy.root_device)
        return BatchLoader(lambda: load(batches, self.config.num_workers, pin_memory, indices()), length)

    def _split(self, name: str) -> Samples:
        if name not in self._samples:
            raise ConfigError(f"data.{name}", "null", "a source of rows", f"set data.{name}: rows.jsonl")
        return self._samples[name]

    def _order(self) -> GlobalOrder:
        samples, config = self._split("train"), self.config
        size, parts = config.global_batch_size or DEFAULT_BATCH, (samples.groups, samples.weights)
        return GlobalOrder(len(samples), size, samples.order_fingerprint, self._order_seed(), config.shuffle, *parts)

    def _order_seed(self) -> int:
        seeds = (self.config.seed, self._seed, os.environ.get("PL_GLOBAL_SEED"), 0)  # seed_everything sets the third
        return int(next(seed for seed in seeds if seed is not None))

    def _trainer(self) -> Any:
        allowed = "a Trainer, which knows the ranks and their batches"
        fix = "call trainer.fit(module, datamodule); to see rows and their tokens: lit-fsdp data inspect"
        require(self.trainer is not None, type(self).__name__, "no Trainer", allowed, fix)
        return self.trainer

    def _encoder(self) -> RowEncoder:
        """Build the encoder; the tokenizer gets the template of ``data.chat_template``, so that exports include it."""
        tokenizer = self._tokenizer_or_the_models()
        encoder = RowEncoder(tokenizer, self.config, self._num_embeddings)
        if self.config.chat_template is not None:
            tokenizer.chat_template = encoder.chat_template
        return encoder

    def _pad_id(self) -> int:
        return pad_id(self._tokenizer_or_the_models(), self._num_embeddings)

    @property
    def _num_embeddings(self) -> int | None:
        module = getattr(self.trainer, "lightning_module", None)
        return self.num_embeddings or getattr(module, "num_embeddings", None)

    def _tokenizer_or_the_models(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            module = self.trainer.lightning_module if self.trainer is not None else None
            tokenizer = getattr(module, "tokenizer", None)
            if tokenizer is None:
                allowed = "a CausalLMModule in the same Trainer, or an attached tokenizer"
                raise ConfigError("data", "no tokenizer", allowed, "call datamodule.attach(tokenizer, seed)")
            self._tokenizer = tokenizer
        return self._tokenizer
