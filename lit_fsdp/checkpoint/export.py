"""A checkpoint as a Hugging Face folder, on one CPU process and with one tensor in memory at a time.

The checkpoint brings everything along: tensors under the module's names, and the config, tokenizer and chat
template in its ``hf/`` folder. Nothing is downloaded and, unless the result is to be verified, no model is built.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.export_plan import BASE, Delta, ExportPlan, OpenBase, plan_export
from lit_fsdp.checkpoint.manifest import Manifest, read_manifest
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, read_tensor
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import return_freed_memory

_EXTRAS = "hf/"
_OF_A_MODEL = ("config.json", "generation_config.json")
_KINDS = {"model": "Model", "adapter": "Adapter", "merge": "Model with its adapter merged"}
Check = Callable[[Path, Manifest, ExportPlan], list[str]]
"""Compares a written folder with its checkpoint and says in what they differ; see ``export_verify``."""


def export(
    ckpt: Path,
    out: Path,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    max_shard_gib: float = 5.0,
    lora: Literal["adapter", "merge"] | None = None,
    check: Check | None = None,
    open_base: OpenBase | None = None,
) -> ExportPlan:
    """Write the model of a checkpoint as a folder that plain transformers (an adapter: peft) loads.

    It needs memory for its largest weight, and for three times that while adapters are merged with their base.

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
    is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    require(is_free, "out", out, "a new or empty folder", f"name another one, or remove {out}")
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
        disk.publish(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return plan


def _texts(manifest: Manifest, plan: ExportPlan) -> dict[str, bytes]:
    """What is made here, by name: the configuration, the index of the weight files, the model card."""
    config = _model_config(manifest, plan.dtype)
    texts = {"README.md": _model_card(manifest, plan).encode()}
    if plan.form == "adapter":
        revision = (plan.entry.get("base") or {}).get("revision")
        return {**texts, "adapter_config.json": _json({**plan.entry["adapter"], "revision": revision})}
    texts["config.json"] = _json(config)
    if len(plan.files) > 1:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        content = {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = _json(content)
    return texts


def _model_config(manifest: Manifest, dtype: str) -> dict[str, Any]:
    """The config of the checkpoint with the dtype of the exported weights, which are plain numbers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    path = manifest.file(f"{_EXTRAS}config.json")
    try:
        config = {**json.loads(path.read_bytes()), "dtype": dtype}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not the config of a model: {error}") from error
    for outdated in ("torch_dtype", "quantization_config"):
        config.pop(outdated, None)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if not config.get("architectures") and isinstance(name, str):  # it was never part of a saved model
        config["architectures"] = [name]
    return config


def _model_card(manifest: Manifest, plan: ExportPlan) -> str:
    """What the checkpoint itself can vouch for; no path, no user, no host, no recipe."""
    base = plan.entry.get("hub_name")
    head: dict[str, Any] = {
        "library_name": "peft" if plan.form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": ["lit_fsdp", *(["lora"] if plan.form != "model" else [])],
    }
    metrics = "".join(f"- {name}: {value:.6g}\n" for name, value in manifest.metrics.items() if value == value)
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_KINDS[plan.form]} trained from "
        f"{base or 'a local model'}\n\nWritten by lit_fsdp from the checkpoint of step {manifest.global_step}. What it "
        "was trained for, on whose data, how it was evaluated and under which license it may be used is not known "
        f"here: add it.\n\n{metrics}"
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
    for file, names in plan.files.items():
        _write_file(draft / file, manifest, plan, names)
        return_freed_memory()


def _write_file(path: Path, manifest: Manifest, plan: ExportPlan, names: list[str]) -> None:
    def read(name: str) -> torch.Tensor:
        if not name.startswith(BASE):
            return read_tensor(manifest, name)
        assert plan.base is not None
        return plan.base.read(name.removeprefix(BASE))

    specs = {name: plan.specs[name] for name in names}
    of_base = {"base": json.dumps(plan.entry.get("base"))} if plan.form == "adapter" else {}
    with TensorFile(path, specs, {"format": "pt", **of_base}) as file:
        for name in file_order(specs):
            source, delta = plan.sources[name], plan.deltas.get(name)
            file.append(name, read(source) if delta is None else _merged(read, source, delta))


def _merged(read: Callable[[str], torch.Tensor], source: str, delta: Delta) -> torch.Tensor:
    """The weight ``source`` with its adapter, in fp32; peft's own operations in its order, so bit for bit.

    LoRA: ``W + B A scaling``. DoRA: each output's weights are scaled to the length learned for it.

    Source: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353, equation 5.
    """
    weight, a, b = (read(name).float() for name in (source, delta.a, delta.b))
    change = b @ a
    change = (change.T if delta.is_transposed else change) * delta.scaling
    if delta.magnitude is None:
        return weight.add_(change)
    summed = weight + change
    lengths = torch.linalg.norm(summed.T if delta.is_transposed else summed, dim=1)
    factor = read(delta.magnitude).float() / lengths
    return (factor.view(1, -1) if delta.is_transposed else factor.view(-1, 1)) * summed
