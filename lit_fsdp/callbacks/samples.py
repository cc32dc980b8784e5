"""Samples during training: greedy answers of the live, sharded model to a few prompts."""

import csv
import io
import sys
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_fsdp.callbacks.isolation import run_aside, untouched
from lit_fsdp.callbacks.records import gathered
from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.config.run import SamplesConfig
from lit_fsdp.config.sections import build
from lit_fsdp.data.prompts import Prompt
from lit_fsdp.report.data import visible

_COLUMNS = ["step", "prompt", "expected", "generated"]
_AT_ONCE = 8  # prompts per batch and rank
_SHOWN_CHARACTERS = 300


class Samples(Callback):
    """Generates answers after each validation, on all ranks, and shows prompt, reference and generated answer.

    The table goes to ``samples.csv`` in the run folder, TensorBoard and W&B; its step is the number of optimizer steps
    taken, as in the names of checkpoints. The metric ``val_exact_match`` is the share of exactly matched reference
    answers, ``val_answer_token_accuracy`` the share of their tokens matched at the same position. Training and random
    generators do not change. It needs the module, data module and strategy of this package.

    Args:
        **options: The fields of :class:`lit_fsdp.config.run.SamplesConfig`.
    """

    def __init__(self, **options: Any) -> None:
        self.config = build(SamplesConfig, options, "samples")
        self._prompts: list[Prompt] = []

    def read(self, datamodule: Any) -> None:
        """Read the prompts, once."""
        if self.config.prompts is not None and not self._prompts:
            self._prompts = datamodule.prompts(self.config.prompts)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the prompts, unless the command line has already."""
        if stage == "fit":
            self.read(trainer.datamodule)  # type: ignore[attr-defined]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and show answers, and log their accuracy."""
        if self.config.every_validation and not trainer.sanity_checking:
            for name, value in self._ask(trainer, pl_module).items():
                pl_module.log(name, value, sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same once, if configured; Lightning does not log here."""
        if not self.config.every_validation:
            metrics = self._ask(trainer, pl_module)
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, trainer.global_step)

    def _ask(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Answer the prompts, write the table, and return the accuracy; collective."""
        if not self._prompts:
            return {}
        ranks, rank = trainer.world_size, trainer.global_rank
        each = -(-len(self._prompts) // ranks)
        own = [prompt.input_ids for prompt in self._prompts[rank::ranks]]
        own += [self._prompts[0].input_ids] * (each - len(own))  # all ranks must call the model equally often
        found: list[list[int]] = []
        with untouched(trainer.strategy, module):
            for start in range(0, each, _AT_ONCE):
                batch = own[start : start + _AT_ONCE]
                found += run_aside(trainer.strategy, module, "answers", batch, self.config.max_new_tokens)
        by_rank = gathered(found)
        rows: list[list[Any]] = []
        exact: list[float] = []
        tokens: list[float] = []
        for i, prompt in enumerate(self._prompts):
            expected, generated = prompt.wanted or [], by_rank[i % ranks][i // ranks]
            three = (prompt.input_ids, expected, generated)
            texts = [str(module.tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in three]
            rows.append([trainer.global_step, *texts])
            if expected:
                exact.append(float(texts[1] == texts[2]))
                tokens += [float(a == b) for a, b in zip_longest(expected, generated[: len(expected)])]
        if trainer.is_global_zero:
            _write(Path(trainer.default_root_dir) / "samples.csv", rows)
            for done, question, expected, generated in rows:
                shown = f"step {done}: {question[-_SHOWN_CHARACTERS:]}\nexpected: {expected}\ngenerated: {generated}"
                print(visible(shown), file=sys.stderr)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # at which Lightning logs this validation
            for logger in trainer.loggers:
                if hasattr(logger, "log_table"):  # W&B
                    logger.log_table("samples", columns=_COLUMNS, data=rows, step=step)
                elif isinstance(logger, TensorBoardLogger):
                    table = (_COLUMNS, ["---"] * len(_COLUMNS), *rows)
                    lines = [f"| {' | '.join(map(_cell, row))} |" for row in table]
                    logger.experiment.add_text("samples", "\n".join(lines), step)
        return {"val_exact_match": fmean(exact), "val_answer_token_accuracy": fmean(tokens)} if exact else {}


def _cell(value: Any) -> str:
    """Format a cell of a Markdown table."""
    return str(value).replace("|", r"\|").replace("\n", "<br>")


def _write(path: Path, rows: list[list[Any]]) -> None:
    """Write the rows of one step, replacing rows of this and later steps from an earlier start."""
    kept: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row and row[0].isdecimal() and int(row[0]) < rows[0][0]]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_COLUMNS, *kept, *rows])
    replace_bytes(path, text.getvalue().encode())
