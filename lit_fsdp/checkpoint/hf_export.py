"""A checkpoint as a Hugging Face folder, on one CPU process and with one piece of a tensor in memory at a time.

The checkpoint brings everything along: tensors under the module's names, and the config, tokenizer and chat
template in its ``hf/`` folder. Nothing is downloaded and, unless the result is to be verified, no model is built.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.export_card import model_card
from lit_fsdp.checkpoint.export_plan import DTYPES, GIB, ExportPlan, Form, plan_export
from lit_fsdp.checkpoint.lora_merge import merged
from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.checkpoint.pieces import Pieces, open_pieces
from lit_fsdp.checkpoint.run_folder import FOLDER, STEP_NAME
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, num_bytes
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import return_freed_memory

_EXTRAS = "hf/"
_OF_A_MODEL = ("config.json", "generation_config.json")
Check = Callable[[Path, Manifest, ExportPlan], list[str]]
"""Compares a written folder with its checkpoint and says in what they differ; see ``export_verify``."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to write, and how."""

    dtype: str | None = None
    """``bf16``, ``fp16`` or ``fp32`` for the floating-point tensors; None keeps what was trained."""
    max_shard_gib: float = 5.0
    """Largest weight file in GiB (one tensor larger than that gets its own)."""
    lora: Literal["adapter", "merge"] | None = None
    """Of a checkpoint with adapters: the adapter alone, or a whole model; None is the adapter."""
    check: Check | None = None
    """Called before the folder is published; what it finds is refused."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, " | ".join(DTYPES), "leave it out to keep the dtype trained")
        if not self.max_shard_gib > 0:
            raise ConfigError("max_shard_gib", self.max_shard_gib, "> 0", "write max_shard_gib: 5")


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    folder: Path
    """Where the model is."""
    form: Form
    """A whole model, an adapter, or a model with its adapter merged."""
    dtype: str
    """Dtype of its floating-point tensors, as in config.json."""
    num_tensors: int
    """Tensors written; a tied one once."""
    num_params: int
    """Elements in them."""
    num_bytes: int
    """Bytes of the weight files."""
    files: list[str]
    """Every file in the folder."""
    tied: dict[str, str]
    """Names that are not stored because the model shares them, and the name each is shared with."""
    left_out: list[str]
    """Tensors of the training module that are not part of the transformers model."""
    is_verified: bool
    """Whether it was loaded again and compared before it was published."""

    def __str__(self) -> str:
        what = {"model": "", "adapter": ", adapter only", "merge": ", adapter merged"}[self.form]
        shared = f", {len(self.tied)} tied name(s) stored once" if self.tied else ""
        size = f"{self.num_params / 1e6:.1f}M parameters, {self.num_bytes / GIB:.2f} GiB"
        checked = "; verified: loaded again, keys, tensors and logits are equal" if self.is_verified else ""
        return f"{self.folder}: {self.num_tensors} tensors in {self.dtype}, {size}{what}{shared}{checked}"


def export(ckpt: Path, out: Path, options: ExportOptions | None = None) -> ExportReport:
    """Write the model of a checkpoint as a folder that plain transformers (an adapter: peft) loads.

    The process needs, beyond its imports, what one rank saved of the largest tensor or 64 MiB, and three times the
    largest weight while adapters are merged; ``options.check`` needs as much as it says.

    Args:
        ckpt: A checkpoint in either layout, verified first.
        out: The folder to make; missing or empty. It appears only when it is complete, and checked if that is asked.
        options: Dtype, file sizes, adapters, check.

    Raises:
        CheckpointError: ``ckpt`` is no sound checkpoint, its module left no description of a transformers model, or
            the check found something; nothing is published then.
        ConfigError: ``out`` is not empty, or an option does not fit the checkpoint.
    """
    ckpt, out, options = Path(ckpt), Path(out), options or ExportOptions()
    _check_place(out)
    manifest = read_manifest(ckpt)
    plan = plan_export(manifest, options.dtype, options.max_shard_gib, options.lora)
    texts = _texts(manifest, plan)
    verify_files(ckpt)
    if out.is_dir():
        out.rmdir()
    place = staging.stage(out)
    try:
        _write(place, manifest, plan, texts)
        differences = options.check(place, manifest, plan) if options.check else []
        if differences:
            lines = "\n".join(f"  {line}" for line in differences[:20])
            raise CheckpointError(f"{out}: not published, it differs from {ckpt}:\n{lines}")
        files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        staging.publish(place, out)
    except BaseException:
        staging.discard(place)
        raise
    return ExportReport(
        folder=out,
        form=plan.form,
        dtype=plan.dtype,
        num_tensors=len(plan.specs),
        num_params=sum(torch.Size(spec.shape).numel() for spec in plan.specs.values()),
        num_bytes=sum(num_bytes(spec) for spec in plan.specs.values()),
        files=files,
        tied=plan.tied,
        left_out=plan.left_out,
        is_verified=options.check is not None,
    )


def _check_place(out: Path) -> None:
    for parent in out.absolute().parents:
        if (parent / MANIFEST).is_file():
            raise ConfigError(
                "out", f"{out}, inside the checkpoint {parent}", "a folder of its own", "name another one"
            )
    if STEP_NAME.fullmatch(out.name) and out.absolute().parent.name == FOLDER:
        raise ConfigError("out", f"{out}, the place of a checkpoint", "a folder of its own", "name another one")
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        kind = "a folder that is not empty" if out.is_dir() else "something that is no folder"
        raise ConfigError("out", f"{out}, {kind}", "a new or empty folder", f"name another one, or remove {out}")


def model_config(manifest: Manifest, dtype: str) -> bytes:
    """config.json of the checkpoint with the dtype of the exported weights.

    Raises:
        CheckpointError: It is missing, or no config.
    """
    path = manifest.file(f"{_EXTRAS}config.json")
    try:
        config = json.loads(path.read_bytes())
        config.pop("torch_dtype", None)  # its name before transformers 5
        config.pop("quantization_config", None)  # the weights are written as plain numbers
        config["dtype"] = dtype
        config["architectures"] = config.get("architectures") or _architectures(str(config.get("model_type")))
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not the config of a model: {error}") from error
    return _json(config)


def _architectures(model_type: str) -> list[str]:
    """The causal LM class of a model type, which a config that was never part of a saved model does not name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else list(name or ())


def _texts(manifest: Manifest, plan: ExportPlan) -> dict[str, bytes]:
    """The files that are made here, by name: the configuration, the index of the weight files, the model card."""
    config = model_config(manifest, plan.dtype)
    texts = {"README.md": model_card(manifest, plan).encode()}
    if plan.form == "adapter":
        return {**texts, "adapter_config.json": _json(plan.entry["adapter"])}
    texts["config.json"] = config
    if len(plan.shards) > 1:
        weight_map = {name: file for file, names in plan.files().items() for name in names}
        total = {"total_size": sum(num_bytes(spec) for spec in plan.specs.values())}
        texts["model.safetensors.index.json"] = _json({"metadata": total, "weight_map": weight_map})
    return texts


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def _write(place: Path, manifest: Manifest, plan: ExportPlan, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        disk.write_bytes(place / name, text)
    for name in manifest.files:
        inner = name.removeprefix(_EXTRAS)
        if name.startswith(_EXTRAS) and inner not in texts and not (plan.form == "adapter" and inner in _OF_A_MODEL):
            disk.copy_file(manifest.file(name), place / inner)
    pieces = open_pieces(manifest)
    for file, names in plan.files().items():
        _write_file(place / file, plan, names, pieces)
        return_freed_memory()


def _write_file(path: Path, plan: ExportPlan, names: list[str], pieces: Pieces) -> None:
    specs = {name: plan.specs[name] for name in names}
    file = TensorFile(path, specs)
    try:
        for name in file_order(specs):
            source, delta = plan.sources[name], plan.deltas.get(name)
            if delta is None:
                file.append_pieces(name, pieces(source))
            else:
                file.append_pieces(name, [merged(pieces, source, delta)])
        file.close()
    except BaseException:
        file.abandon()
        raise
