"""An export loaded again, before it is published, and compared with a model rebuilt from the checkpoint.

The folder is read by transformers (an adapter by peft), and the model of the checkpoint is built by them too. Both are
in memory at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lit_fsdp.checkpoint.export_plan import ExportPlan, OpenBase, base_name
from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.safetensors_file import read_tensor
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.base import BaseWeights
from lit_fsdp.models.lora import apply_saved_lora, load_adapter_folder

_ROWS, _LENGTH = 2, 16
_BAD_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def find_export_differences(folder: Path, manifest: Manifest, plan: ExportPlan, open_base: OpenBase) -> list[str]:
    """In what the exported ``folder`` differs from its checkpoint: keys, any tensor, the logits of a fixed input.

    Memory: the whole model twice, in the dtype of the export (in fp32 while adapters are merged).

    Returns:
        One line per difference; none if keys are the same and all tensors and logits equal bit for bit.
    """
    base = plan.base or (None if plan.form == "model" else open_base(manifest))
    try:
        if plan.form == "adapter":
            found, lines = _reloaded_adapter(folder, manifest, plan, base)
        else:
            found, lines = _reloaded_model(folder, plan)
        return lines or _compare(_rebuilt(manifest, plan, base), found)
    except CheckpointError:
        raise
    except Exception as error:  # whatever keeps a user from loading the folder
        return [f"it cannot be loaded: {' '.join(str(error).split())[:300]}"]


def _rebuilt(manifest: Manifest, plan: ExportPlan, base: BaseWeights | None) -> Any:
    """The model of the checkpoint: built from its config and filled, adapters in place or merged."""
    model, merge = _bare(manifest, plan), None
    if plan.form != "model":
        merge = apply_saved_lora(model, plan.entry["adapter"])
    _fill(model, manifest, plan, base, {})
    if plan.form == "merge":
        assert merge is not None
        model = merge()
        for param in model.parameters():
            param.data = param.data.to(getattr(torch, plan.dtype))
    return model.eval()


def _bare(manifest: Manifest, plan: ExportPlan) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "quantization_config": None}
    config = AutoConfig.from_pretrained(manifest.file("hf/config.json").parent, **options)
    dtype = torch.float32 if plan.form != "model" else getattr(torch, plan.dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _fill(
    model: nn.Module, manifest: Manifest, plan: ExportPlan, base: BaseWeights | None, names: Mapping[str, str]
) -> None:
    """Give every parameter and buffer its value in the checkpoint or else in the base, one at a time.

    ``names`` has the name in the checkpoint by that in ``model``, where they differ.
    """
    prefix = f"model/{plan.entry['prefix']}"
    ties = {str(alias): str(name) for alias, name in (plan.entry.get("tied") or {}).items()}
    ties |= {name: alias for alias, name in ties.items()}
    rounded = set(plan.sources.values()) if plan.form == "adapter" else set()
    for name, target in model.state_dict(keep_vars=True).items():
        possible = [prefix + names.get(one, one) for one in (name, ties.get(name, name))]
        saved = next((one for one in possible if one in manifest.tensors), None)
        if saved is not None:
            value = read_tensor(manifest, saved)
        elif base is not None and base_name(name) in base.specs:
            value = base.read(base_name(name))
            if value.shape != target.shape:  # rows of added tokens, which a copy of the module has
                value = nn.functional.pad(value, (0, 0) * (value.dim() - 1) + (0, len(target) - len(value)))
        else:
            raise CheckpointError(f"{manifest.folder}: no tensor {prefix}{name}, which the model has")
        value = value.to(getattr(torch, plan.dtype)) if saved in rounded else value
        if target.is_meta:
            owner, _, attribute = name.rpartition(".")
            param = nn.Parameter(value.to(target.dtype), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, param)
        else:
            with torch.no_grad():
                target.copy_(value)


def _reloaded_model(folder: Path, plan: ExportPlan) -> tuple[Any, list[str]]:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"output_loading_info": True, "local_files_only": True, "trust_remote_code": False}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    model, info = loaded
    lines = [f"{key.replace('_', ' ')}: {', '.join(map(str, sorted(info[key])[:8]))}" for key in _BAD_KEYS if info[key]]
    if str(model.dtype) != f"torch.{plan.dtype}":
        lines.append(f"dtype: {model.dtype}, not torch.{plan.dtype}")
    return model.eval(), lines


def _reloaded_adapter(
    folder: Path, manifest: Manifest, plan: ExportPlan, base: BaseWeights | None
) -> tuple[nn.Module, list[str]]:
    """The base of the checkpoint with the folder's adapter; what peft warns of (keys that are missing) counts."""
    bare = _bare(manifest, plan)
    prefix = f"model/{plan.entry['prefix']}"
    names = {}
    for saved in manifest.tensors:
        name = saved.removeprefix(prefix)
        names[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = name
    _fill(bare, manifest, plan, base, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_adapter_folder(bare, folder)
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        stored = set(file.keys())
    lines = [f"adapter: {' '.join(str(w.message).split())[:300]}" for w in caught if "keys" in str(w.message)]
    if stored != set(plan.specs):
        lines.append(f"adapter: other tensors than planned: {', '.join(sorted(stored ^ set(plan.specs))[:8])}")
    return model.eval(), lines


def _compare(expected: Any, found: Any) -> list[str]:
    """Tensors and logits that are not equal bit for bit."""
    ours = dict(expected.state_dict())
    theirs = {name.removeprefix("base_model.model."): tensor for name, tensor in found.state_dict().items()}
    lines = []
    if ours.keys() != theirs.keys():
        lines.append(f"other names: {', '.join(sorted(ours.keys() ^ theirs.keys())[:8])}")
    unequal = [n for n in ours if n in theirs and not torch.equal(_bits(ours[n]), _bits(theirs[n]))]
    lines += [f"tensor {name} is not the checkpoint's" for name in unequal]
    vocabulary = expected.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_ROWS * _LENGTH) * 7919 % vocabulary).reshape(_ROWS, _LENGTH)
    with torch.no_grad():
        one, other = (model(input_ids=ids, use_cache=False).logits for model in (expected, found))
    if one.shape != other.shape or not torch.equal(_bits(one), _bits(other)):
        gap = (one.float() - other.float()).abs().max().item() if one.shape == other.shape else float("nan")
        lines.append(f"logits of a fixed input differ by up to {gap:.3g}")
    return lines


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that a not-a-number equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
