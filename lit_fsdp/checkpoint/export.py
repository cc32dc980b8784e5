"""A checkpoint as a Hugging Face folder, on one CPU process and with one piece of a tensor in memory at a time.

The checkpoint brings everything along: tensors under the module's names, and the config, tokenizer and chat
template in its ``hf/`` folder. Nothing is downloaded and, unless the result is to be verified, no model is built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.export_plan import BASE, Delta, ExportPlan, OpenBase, plan_export
from lit_fsdp.checkpoint.files import MANIFEST
from lit_fsdp.checkpoint.manifest import Manifest, read_manifest
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, opened, read_tensor
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import GIB, return_freed_memory

if TYPE_CHECKING:
    from lit_fsdp.models.base import BaseWeights

_EXTRAS = "hf/"
_OF_A_MODEL = ("config.json", "generation_config.json")
_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
_KINDS = {"model": "Model", "adapter": "Adapter", "merge": "Model with its adapter merged"}
_PIECE_BYTES = 1 << 26
Pieces = Callable[[str], Iterator[torch.Tensor]]
"""Gives the rows of a tensor of the checkpoint in order, each piece in memory of its own, in the dtype saved."""
Check = Callable[[Path, Manifest, ExportPlan], list[str]]
"""Compares a written folder with its checkpoint and says in what they differ; see ``export_verify``."""


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    folder: Path
    plan: ExportPlan
    files: list[str]
    """Every file in the folder, by path."""
    is_verified: bool
    """Whether it was loaded again and compared before it was published."""

    def __str__(self) -> str:
        plan = self.plan
        base = (plan.entry.get("base") or {}).get("name")
        what = {"model": "", "adapter": ", adapter only", "merge": f", adapter merged into {base}"}[plan.form]
        shared = f", {len(plan.tied)} tied name(s) stored once" if plan.tied else ""
        num_params = sum(torch.Size(spec.shape).numel() for spec in plan.specs.values())
        size = f"{num_params / 1e6:.1f}M parameters, {plan.num_bytes / GIB:.2f} GiB"
        checked = "; verified: loaded again, keys, tensors and logits are equal" if self.is_verified else ""
        return f"{self.folder}: {len(plan.specs)} tensors in {plan.dtype}, {size}{what}{shared}{checked}"


def export(
    ckpt: Path,
    out: Path,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    max_shard_gib: float = 5.0,
    lora: Literal["adapter", "merge"] | None = None,
    check: Check | None = None,
    open_base: OpenBase | None = None,
) -> ExportReport:
    """Write the model of a checkpoint as a folder that plain transformers (an adapter: peft) loads.

    It needs memory for 64 MiB, and for three times the largest weight while adapters are merged with their base.

    Args:
        ckpt: A checkpoint in either layout, verified first.
        out: The folder to make; missing or empty. It appears only when it is complete, and checked if that is asked.
        dtype: Of the floating-point tensors; None keeps what was trained, and of a merged model that of its base.
        max_shard_gib: Largest weight file in GiB (one tensor larger than that gets its own).
        lora: Of a checkpoint with adapters: the adapter alone (also if None), or a whole model.
        check: Called before the folder is published; what it finds is refused.
        open_base: Needed to merge.

    Raises:
        CheckpointError: ``ckpt`` is no sound checkpoint of a transformers model, or the check found something.
        ConfigError: ``out`` is not empty, ``lora`` does not fit the checkpoint, or its base is not to be had.
    """
    ckpt, out = Path(ckpt), Path(out)
    _check_out(out)
    manifest = read_manifest(ckpt)
    plan = plan_export(manifest, dtype, max_shard_gib, lora, open_base)
    texts = _texts(manifest, plan)
    verify_files(ckpt)
    draft = out.with_name(f".{out.name}.draft")
    try:
        draft.mkdir(parents=True)
    except OSError as error:  # of another client of a network file system no lock would tell whether it lives
        text = f"{error.strerror}; if it is there another export is writing {out}, or a killed one left it: remove it"
        raise CheckpointError(f"{draft}: {text}") from None
    try:
        _write(draft, manifest, plan, texts)
        differences = check(draft, manifest, plan) if check else []
        if differences:
            lines = "\n".join(f"  {line}" for line in differences[:20])
            raise CheckpointError(f"{out}: not published, it differs from {ckpt}:\n{lines}")
        files = sorted(path.relative_to(draft).as_posix() for path in draft.rglob("*") if path.is_file())
        disk.publish(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return ExportReport(folder=out, plan=plan, files=files, is_verified=check is not None)


def _check_out(out: Path) -> None:
    is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    is_apart = not any((parent / MANIFEST).is_file() for parent in out.absolute().parents)
    fix = "name another one" if is_free else f"name another one, or remove {out}"
    require(is_free and is_apart, "out", out, "a new or empty folder outside of checkpoints", fix)


def _model_config(manifest: Manifest, dtype: str) -> bytes:
    """Return config.json of the checkpoint with the dtype of the exported weights."""
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
    """What is made here, by name: the configuration, the index of the weight files, the model card."""
    config = _model_config(manifest, plan.dtype)
    texts = {"README.md": _model_card(manifest, plan).encode()}
    if plan.form == "adapter":
        revision = (plan.entry.get("base") or {}).get("revision")
        return {**texts, "adapter_config.json": _json({**plan.entry["adapter"], "revision": revision})}
    texts["config.json"] = config
    if len(plan.files) > 1:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        content = {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = _json(content)
    return texts


def _model_card(manifest: Manifest, plan: ExportPlan) -> str:
    """What the checkpoint itself can vouch for; no path, no user, no host, no recipe."""
    base = str(plan.entry.get("hub_name") or "")
    is_known = _HUB_NAME.fullmatch(base) is not None  # a local model has a path
    head: dict[str, Any] = {
        "library_name": "peft" if plan.form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if is_known else {}),
        "tags": ["lit_fsdp", *(["lora"] if plan.form != "model" else [])],
    }
    metrics = {name: f"{value:.6g}" for name, value in manifest.metrics.items() if value == value}
    rows = "".join(f"| {name} | {value} |\n" for name, value in {**metrics, **manifest.versions}.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_KINDS[plan.form]} trained from "
        f"{base if is_known else 'a local model'}\n\nWritten by lit_fsdp from the checkpoint of step "
        f"{manifest.global_step}. What it was trained for, on whose data, how it was evaluated and under which license "
        f"it may be used is not known here: add it.\n\n| | |\n|---|---|\n{rows}"
    )


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def _write(draft: Path, manifest: Manifest, plan: ExportPlan, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        disk.write_bytes(draft / name, text)
    for name in manifest.files:
        inner = name.removeprefix(_EXTRAS)
        if name.startswith(_EXTRAS) and inner not in texts and not (plan.form == "adapter" and inner in _OF_A_MODEL):
            disk.write_bytes(draft / inner, manifest.file(name).read_bytes())
    pieces = open_pieces(manifest, plan.base)
    for file, names in plan.files.items():
        _write_file(draft / file, plan, names, pieces)
        return_freed_memory()


def open_pieces(manifest: Manifest, base: BaseWeights | None = None) -> Pieces:
    """A reader of a checkpoint of either layout, in pieces of about 64 MiB, and of its base, in whole tensors.

    No mapping of a file stays open, since it would count as this process's memory.
    """

    def pieces(name: str) -> Iterator[torch.Tensor]:
        if name.startswith(BASE):
            assert base is not None
            yield base.read(name.removeprefix(BASE))
            return
        shape, chunks = manifest.tensors[name].shape, sorted(manifest.chunks[name], key=lambda chunk: chunk.offsets)
        if not all(shape) or not shape or any(chunk.sizes[1:] != shape[1:] for chunk in chunks):
            # without rows, a number, or cut by columns
            yield read_tensor(manifest, name)
            return
        row_bytes = torch.Size(shape[1:]).numel() * getattr(torch, manifest.tensors[name].dtype).itemsize
        step = max(1, _PIECE_BYTES // row_bytes)
        for chunk in chunks:
            for start in range(0, chunk.sizes[0], step):  # a piece is held by nobody here
                yield _some_rows(manifest.file(chunk.file), name, slice(start, start + step))

    return pieces


def _some_rows(path: Path, name: str, rows: slice) -> torch.Tensor:
    with opened(path) as file:
        return file.get_slice(name)[rows].clone()


def _write_file(path: Path, plan: ExportPlan, names: list[str], pieces: Pieces) -> None:
    specs = {name: plan.specs[name] for name in names}
    of_base = {"base": json.dumps(plan.entry.get("base"))} if plan.form == "adapter" else {}
    with TensorFile(path, specs, {"format": "pt", **of_base}) as file:
        for name in file_order(specs):
            source, delta = plan.sources[name], plan.deltas.get(name)
            file.append(name, pieces(source) if delta is None else [_merged(pieces, source, delta)])


def _merged(pieces: Pieces, source: str, delta: Delta) -> torch.Tensor:
    """Return the weight ``source`` with its adapter, in fp32; peft's own operations in its order, so bit for bit.

    LoRA: ``W + B A scaling``. DoRA: each output's weights are scaled to the length learned for it.

    Source: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353, equation 5.
    """
    weight, a, b = (torch.cat(list(pieces(name))).float() for name in (source, delta.a, delta.b))
    change = b @ a
    change = (change.T if delta.is_transposed else change) * delta.scaling
    if delta.magnitude is None:
        return weight.add_(change)
    summed = weight + change
    lengths = torch.linalg.norm(summed.T if delta.is_transposed else summed, dim=1)
    factor = torch.cat(list(pieces(delta.magnitude))).float() / lengths
    return (factor.view(1, -1) if delta.is_transposed else factor.view(-1, 1)) * summed
