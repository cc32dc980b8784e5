"""What the model says while it trains: greedy answers to a few prompts, from the live and sharded model."""

from __future__ import annotations

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

_COLUMNS = ["step", "prompt", "wanted", "got"]
_AT_ONCE = 8  # prompts of one batch on each rank
_SHOWN_CHARACTERS = 300


class Samples(Callback):
    """Asks the model after each validation, on all ranks in step, and shows prompt, wanted answer and what it said.

    ``samples.csv`` in the run folder, TensorBoard and W&B get the table; its step is the number of optimizer steps
    taken, as in the names of checkpoints. ``val_exact_match`` is the share of wanted answers that were given to the
    letter, ``val_answer_token_accuracy`` that of their tokens which stood in their place. Training is not changed,
    random generators neither. Module, data module and strategy are those of this package.

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
        """Read the prompts, unless the command line has."""
        if stage == "fit":
            self.read(trainer.datamodule)  # type: ignore[attr-defined]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask and show, and log how many answers are right."""
        if self.config.every_validation and not trainer.sanity_checking:
            for name, value in self._ask(trainer, pl_module).items():
                pl_module.log(name, value, sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same once, where that is asked for; Lightning logs nothing here."""
        if not self.config.every_validation:
            metrics = self._ask(trainer, pl_module)
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, trainer.global_step)

    def _ask(self, trainer: Trainer, module: Any) -> dict[str, float]:
        """Have the prompts answered, write the table, and say how many answers are right; collective."""
        if not self._prompts:
            return {}
        ranks, rank = trainer.world_size, trainer.global_rank
        each = -(-len(self._prompts) // ranks)
        own = [prompt.input_ids for prompt in self._prompts[rank::ranks]]
        own += [self._prompts[0].input_ids] * (each - len(own))  # all ranks call the model as often
        found: list[list[int]] = []
        with untouched(trainer.strategy, module):
            for start in range(0, each, _AT_ONCE):
                batch = own[start : start + _AT_ONCE]
                found += run_aside(trainer.strategy, module, "answers", batch, self.config.max_new_tokens)
        by_rank = gathered(trainer, found)
        rows: list[list[Any]] = []
        exact: list[float] = []
        tokens: list[float] = []
        for i, prompt in enumerate(self._prompts):
            wanted, got = prompt.wanted or [], by_rank[i % ranks][i // ranks]
            three = (prompt.input_ids, wanted, got)
            texts = [str(module.tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in three]
            rows.append([trainer.global_step, *texts])
            if wanted:
                exact.append(float(texts[1] == texts[2]))
                tokens += [float(a == b) for a, b in zip_longest(wanted, got[: len(wanted)])]
        if trainer.is_global_zero:
            _write(Path(trainer.default_root_dir) / "samples.csv", rows)
            for step, asked, wanted, got in rows:
                shown = f"step {step}: {asked[-_SHOWN_CHARACTERS:]}\nwanted: {wanted}\ngot: {got}"
                print(visible(shown), file=sys.stderr)
            for logger in trainer.loggers:
                if hasattr(logger, "log_table"):  # W&B
                    logger.log_table("samples", columns=_COLUMNS, data=rows, step=trainer.global_step)
                elif isinstance(logger, TensorBoardLogger):
                    table = (_COLUMNS, ["---"] * len(_COLUMNS), *rows)
                    lines = [f"| {' | '.join(map(_cell, row))} |" for row in table]
                    logger.experiment.add_text("samples", "\n".join(lines), trainer.global_step)
        return {"val_exact_match": fmean(exact), "val_answer_token_accuracy": fmean(tokens)} if exact else {}


def _cell(value: Any) -> str:
    """A value in a table of Markdown."""
    return str(value).replace("|", r"\|").replace("\n", "<br>")


def _write(path: Path, rows: list[list[Any]]) -> None:
    """Add the rows of one step, in place of what an earlier start has written of this step and later ones."""
    kept: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row and row[0].isdecimal() and int(row[0]) < rows[0][0]]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([_COLUMNS, *kept, *rows])
    replace_bytes(path, text.getvalue().encode())
