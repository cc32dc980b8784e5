"""Export a checkpoint as a Hugging Face folder, in one CPU process and with one tensor in memory at a time.

The checkpoint is self-contained: tensors under the module's names, and the config, tokenizer and chat template in its
``hf/`` folder. The export is planned from the manifest; models are built only on the meta device.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec, read_manifest
from lit_fsdp.checkpoint.run_folder import FOLDER, survey
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, num_bytes, read_tensor
from lit_fsdp.checkpoint.verify import refuse, verify
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import GIB, json_bytes, return_freed_memory
from lit_fsdp.models.adapter_names import ADAPTER, CONFIG_FILE, WEIGHTS_FILE, WHOLE_COPY, base_name, is_lora

if TYPE_CHECKING:
    from lit_fsdp.models.base import BaseWeights

_EXTRAS = "hf/"
_OF_A_MODEL = ("config.json", "generation_config.json")
_KINDS = {"model": "Model", "adapter": "Adapter", "merge": "Model with its adapter merged"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_BASE = "base/"  # name prefix of a tensor that is in the base model of the adapters, not in the checkpoint
_MODEL = "model/"
_OF_THE_MODEL = re.compile(r"^(val|test)|loss|accuracy|perplexity")  # other metrics are of the run: rates, times


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Which tensors go into which file."""

    form: Literal["model", "adapter", "merge"]
    """A full model, only an adapter, or a model with its adapter merged."""
    entry: Mapping[str, Any]
    """The ``model`` entry of the manifest."""
    sources: Mapping[str, str]
    """Name in the checkpoint, or in its base model with the prefix ``_BASE``, by name in the export."""
    layers: Mapping[str, tuple[str, nn.Module]] = field(default_factory=dict)
    """Names and peft layers (meta device) of adapters to merge, by name of the weight in the export."""
    specs: Mapping[str, TensorSpec]
    """Dtype and shape by name in the export; tied tensors appear once."""
    parts: Mapping[str, tuple[str, Any, Any]] = field(default_factory=dict)
    """Names in the files of the base: the tensor in ``sources``, and of a fused one an expert's index and its rows."""
    files: Mapping[str, list[str]]
    """Names by weight file, as transformers numbers them."""
    base: BaseWeights | None = None
    """Base model, opened only for merging or comparison."""
    trust_remote_code: bool = False
    """Whether a comparison may run Python code of the model."""

    @functools.cached_property
    def dtype(self) -> str:
        """The dtype of most floating-point bytes."""
        return _most_common_dtype(self.specs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes(spec) for spec in self.specs.values())


def export(
    ckpt: Path,
    out: Path,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    max_shard_gib: float = 5.0,
    lora: Literal["adapter", "merge"] | None = None,
    check: Callable[[Path, Manifest, ExportPlan], list[str]] | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    ema: bool = False,
) -> ExportPlan:
    """Write the model of a checkpoint as a folder that transformers (for an adapter: peft) loads.

    The export needs memory for the largest weight, or three times that when it merges adapters.

    Args:
        ckpt: A checkpoint in either layout, verified first.
        out: Output folder; missing or empty. It appears only when it is complete and has passed ``check``.
        dtype: Dtype of floating-point tensors; None: the trained dtype, or that of the base for a merged model.
        max_shard_gib: Maximum size of a weight file in GiB (a larger tensor gets its own file).
        lora: For a checkpoint with adapters: only the adapter (also if None), or a full model.
        check: Returns the differences of the written folder before it is published; see ``export_verify``.
        base: Current location of the base model of adapters; None: its location in training.
        trust_remote_code: Run Python code of that base model, and for ``check`` of the exported model.
        ema: Export the averages of :class:`lit_fsdp.EMAWeights` instead of the weights.

    Raises:
        CheckpointError: The folder ``ckpt`` is not an intact checkpoint of a transformers model, or ``check`` found
            differences.
        ConfigError: The folder ``out`` is not empty, ``lora`` does not fit the checkpoint, or its base model is
            unavailable.
    """
    ckpt, out = Path(ckpt), Path(out)
    is_free = not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))
    require(is_free, "--out", out, "a new or empty folder", f"choose another folder, or remove {out}")
    runs = [folder for folder in out.resolve().parents if folder.name == FOLDER and survey(folder)]
    given = f"{out}, inside the checkpoints of a run"
    require(not runs, "--out", given, "a folder elsewhere", f"choose another folder, such as {out.name}")
    manifest = read_manifest(ckpt)
    entry = manifest.extra.get("model")
    if entry is None:
        fix = "in Python, lit_fsdp.load_weights reads those of any module"
        raise CheckpointError(f"{ckpt}: only checkpoints of a CausalLMModule can be exported\n  fix:     {fix}")
    if ema:
        manifest = manifest.averaged("--ema")
    has_adapter, given = bool(entry.get("adapter")), "a checkpoint without adapters"
    require(has_adapter or lora is None, f"--{lora}", given, "one of a run with model.lora", f"drop --{lora}")
    is_read = has_adapter and (check or lora == "merge")
    refuse(ckpt, verify(ckpt))
    weights = None
    if is_read:
        from lit_fsdp.models.base import open_base  # imports transformers, which other exports do not need

        weights = open_base(entry["base"], ckpt, base, trust_remote_code)
    plan = _planned(manifest, (lora or "adapter") if has_adapter else "model", weights, dtype, max_shard_gib)
    plan = replace(plan, trust_remote_code=trust_remote_code)
    texts = _texts(manifest, plan)
    draft = out.with_name(f".{out.name}.draft")
    with disk.naming(draft):  # on a network file system, a lock does not show whether another client is alive
        try:
            draft.mkdir(parents=True)
        except FileExistsError:
            text = f"another export is writing {out}, or a killed export left this folder; if so, remove it"
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


def _planned(
    manifest: Manifest, form: Any, base: BaseWeights | None, dtype: str | None, max_shard_gib: float
) -> ExportPlan:
    entry = manifest.extra["model"]
    prefix = _MODEL + entry["prefix"]
    found = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)}
    available, kept = dict(manifest.tensors), _DTYPES.get(dtype or "")
    of_base = base.specs if base and form == "merge" else {}
    if of_base:
        specs_of_base = {_BASE + name: TensorSpec(*spec) for name, spec in of_base.items()}
        available |= specs_of_base
        kept = kept or _most_common_dtype(specs_of_base.values())
    if form == "adapter":
        sources = adapter_sources(found, entry["kept_with_adapter"])
    else:
        tied = {base_name(again): base_name(first) for again, first in entry["tied"].items()}
        sources = _model_sources(found, tied, of_base)
    specs = {}
    for name, source in sorted(sources.items()):
        spec = available[source]
        is_float = getattr(torch, spec.dtype).is_floating_point
        specs[name] = TensorSpec(kept if kept and is_float else spec.dtype, spec.shape)
    apart = entry.get("experts", {}) | (base.experts_apart if base else {})
    parts = {} if form == "adapter" else _parts(apart, specs)
    return ExportPlan(
        form=form,
        entry=entry,
        parts=parts,
        sources=sources,
        layers=_lora_layers(base.model, entry["adapter"]) if base and form == "merge" else {},
        specs=specs,
        files=_files(specs, form, int(max_shard_gib * GIB)),
        base=base,
    )


def _parts(apart: Mapping[str, Sequence[str]], specs: dict[str, TensorSpec]) -> dict[str, tuple[str, Any, Any]]:
    """Replace fused expert tensors in ``specs`` by one tensor per expert, named as in the files of the base model.

    Other tensors in ``apart`` are only renamed: they have neither number nor rows.
    """
    found: dict[str, tuple[str, Any, Any]] = {}
    for name, (owner, *words) in apart.items():
        if name not in specs:  # a tied name
            continue
        whole = specs.pop(name)
        if not words:
            specs[owner], found[owner] = whole, (name, None, None)
            continue
        size = whole.shape[1] // len(words)
        for number in range(whole.shape[0]):
            for i, word in enumerate(words):
                part = f"{owner}.{number}.{word}.weight"
                specs[part] = TensorSpec(whole.dtype, (size, *whole.shape[2:]))
                found[part] = name, number, slice(i * size, (i + 1) * size)
    return found


def _files(specs: dict[str, TensorSpec], form: str, max_bytes: int) -> dict[str, list[str]]:
    if form == "adapter":
        return {WEIGHTS_FILE: list(specs)}
    size_of: Any = num_bytes  # takes a TensorSpec instead of a tensor
    pattern = "model{suffix}.safetensors"
    found = split_state_dict_into_shards_factory(
        specs, get_storage_size=size_of, filename_pattern=pattern, max_shard_size=max_bytes
    )
    return found.filename_to_tensors


def _most_common_dtype(specs: Iterable[TensorSpec]) -> str:
    votes: Counter[str] = Counter()
    for spec in specs:
        votes[spec.dtype] += num_bytes(spec) * getattr(torch, spec.dtype).is_floating_point
    return votes.most_common(1)[0][0]


def _model_sources(found: Mapping[str, str], tied: Mapping[str, str], of_base: Iterable[str]) -> dict[str, str]:
    """Map every name of the plain model to its source: the trained copy of a fully trained module, else the base."""
    copies = {base_name(name) for name in found if WHOLE_COPY in name}
    plain = {name: _BASE + name for name in of_base} | {
        base_name(name): source
        for name, source in found.items()
        if not is_lora(name) and (WHOLE_COPY in name or base_name(name) not in copies)
    }
    sources = {name: source for name, source in plain.items() if name not in tied}
    for alias, name in tied.items():  # the saved copy may have either name
        if name not in sources and alias in plain:
            sources[name] = plain[alias]
    return sources


def adapter_sources(found: Mapping[str, str], beside: Collection[str]) -> dict[str, str]:
    """Map names in peft's ``adapter_model.safetensors`` to sources; embeddings as with ``save_embedding_layers``."""
    sources = {}
    for name, source in found.items():
        kept = name
        if is_lora(name):
            kept = name.removesuffix(f".{ADAPTER}").replace(f".{ADAPTER}.", ".")
            kept = kept.removesuffix(".weight") if ".lora_magnitude_vector." in name else kept
        elif WHOLE_COPY in name:
            kept = name.replace(WHOLE_COPY, ".")
        elif name not in beside:
            continue
        sources[f"base_model.model.{kept}"] = source
    return sources


def _lora_layers(base: nn.Module, adapter: Mapping[str, Any]) -> dict[str, tuple[str, nn.Module]]:
    from lit_fsdp.models.lora import apply_saved_lora

    model: Any = copy.deepcopy(base)
    apply_saved_lora(model, adapter)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return {base_name(f"{name}.{_adapted(module)}"): (name, module) for name, module in layers.items()}


def _adapted(layer: nn.Module) -> str:
    """Return the name of the adapted parameter; peft sets it where it wraps a parameter instead of a layer."""
    return str(getattr(layer, "parameter_name", "weight"))


def _texts(manifest: Manifest, plan: ExportPlan) -> dict[str, bytes]:
    """Generate the config, the weight index and the model card, by file name."""
    texts = {"README.md": _model_card(manifest, plan).encode()}
    if plan.form == "adapter":
        revision = (plan.entry.get("base") or {}).get("revision")
        return {**texts, CONFIG_FILE: json_bytes({**plan.entry["adapter"], "revision": revision})}
    texts["config.json"] = json_bytes(_model_config(manifest, plan.dtype))
    if len(plan.files) > 1:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        content = {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = json_bytes(content)
    return texts


def _model_config(manifest: Manifest, dtype: str) -> dict[str, Any]:
    """Return the config of the checkpoint with the dtype of the exported, unquantized weights."""
    path = manifest.file(f"{_EXTRAS}config.json")
    try:
        config = {**json.loads(path.read_bytes()), "dtype": dtype}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a model config: {error}") from error
    for outdated in ("torch_dtype", "quantization_config"):
        config.pop(outdated, None)
    if not config.get("architectures"):  # the model was never saved by transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
        config |= {"architectures": [name]} if isinstance(name, str) else {}
    return config


def _model_card(manifest: Manifest, plan: ExportPlan) -> str:
    """Return the model card, only from the checkpoint: no path, user, host or recipe."""
    base = plan.entry.get("hub_name")
    head: dict[str, Any] = {
        "library_name": "peft" if plan.form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": ["lit_fsdp", *(["lora"] if plan.form != "model" else [])],
    }
    needs = plan.form == "adapter" and (plan.entry.get("base") or {}).get("config_overrides")
    says = f"Set these values in the config of its base model, or use a merged model: `{json.dumps(needs)}`\n\n"
    shown = {n: value for n, value in manifest.metrics.items() if value == value and _OF_THE_MODEL.search(n)}
    metrics = "".join(f"- {name}: {value:.6g}\n" for name, value in shown.items())
    what = "the moving averages in the checkpoint" if manifest.averages else "the checkpoint"
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_KINDS[plan.form]} trained from "
        f"{base or 'a local model'}\n\nWritten by lit_fsdp from {what} of step {manifest.global_step}. Add its "
        "intended use, training data, evaluation and license, which are unknown to lit_fsdp.\n\n"
        f"{says if needs else ''}{metrics}"
    )


def _write(draft: Path, manifest: Manifest, plan: ExportPlan, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        disk.write_bytes(draft / name, text)
    for name in manifest.files:
        inner = name.removeprefix(_EXTRAS)
        if name.startswith(_EXTRAS) and inner not in texts and not (plan.form == "adapter" and inner in _OF_A_MODEL):
            disk.write_bytes(draft / inner, manifest.file(name).read_bytes())
    large: list[str] = []
    for file, names in plan.files.items():
        large += _write_file(draft / file, manifest, plan, names)
        return_freed_memory()
    given = f"fp16, in which {''.join(large[:1])} has infinite values (number of such tensors: {len(large)})"
    require(not large, "--dtype", given, "bf16 or fp32, as fp16 ends at 65,504", "set --dtype bf16")


def _write_file(path: Path, manifest: Manifest, plan: ExportPlan, names: list[str]) -> list[str]:
    """Write a file, and return the names of tensors that are finite only in their own dtype."""

    def read(name: str) -> torch.Tensor:
        if not name.startswith(_BASE):
            return read_tensor(manifest, name)
        assert plan.base is not None
        return plan.base.read(name.removeprefix(_BASE))

    @functools.lru_cache(2)  # for the two fused tensors of a layer, whose parts alternate
    def value(name: str) -> torch.Tensor:
        return _merged(plan, name, read) if name in plan.layers else read(plan.sources[name])

    large, specs = [], {name: plan.specs[name] for name in names}
    of_base = {"base": json.dumps(plan.entry.get("base"))} if plan.form == "adapter" else {}
    with TensorFile(path, specs, {"format": "pt", **of_base}) as file:
        for name in file_order(specs):
            whole, number, rows = plan.parts.get(name, (name, None, None))
            tensor = value(whole) if number is None else value(whole)[number, rows].contiguous()
            file.append(name, tensor)
            narrows = specs[name].dtype == "float16" != str(tensor.dtype).removeprefix("torch.")
            if narrows and tensor.numel() and torch.stack(tensor.aminmax()).half().isinf().any():
                large.append(name)
            if number is None:
                value.cache_clear()
    return large


@torch.no_grad()
def _merged(plan: ExportPlan, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Merge the parameter ``name`` with its adapter, in fp32, through peft's merge of this layer."""
    place, on_meta = plan.layers[name]
    layer: Any = copy.deepcopy(on_meta)  # freed with its values
    prefix = f"{_MODEL}{plan.entry['prefix']}{place}."
    adapters = [key for key in layer.state_dict() if not key.startswith("base_layer.")]
    values = {key: read(f"{prefix}{key}").float() for key in adapters}
    layer.load_state_dict(values, strict=False, assign=True)
    base, own = layer.get_base_layer(), _adapted(layer)
    setattr(base, own, nn.Parameter(read(plan.sources[name]).float(), requires_grad=False))
    layer.merge()
    return getattr(base, own).detach()
