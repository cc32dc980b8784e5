"""Reload an export with transformers (an adapter with peft) and compare it to a model rebuilt from the checkpoint."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lit_fsdp.checkpoint.export import ExportPlan
from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.safetensors_file import read_tensor
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.adapter_names import WEIGHTS_FILE, base_name
from lit_fsdp.models.experts import choose_eager
from lit_fsdp.models.lora import apply_saved_lora, load_adapter_folder

_BAD_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def find_export_differences(folder: Path, manifest: Manifest, plan: ExportPlan) -> list[str]:
    """Compare the exported ``folder`` with its checkpoint: keys, tensors (bitwise), and logits of a fixed input.

    Memory: twice the full model, in the dtype of the export (in fp32 when merging adapters).
    """
    try:
        if plan.form == "adapter":
            found, lines = _reloaded_adapter(folder, manifest, plan)
        else:
            found, lines = _reloaded_model(folder, plan)
        return lines or _compare(_rebuilt(manifest, plan), found)
    except CheckpointError:
        raise
    except Exception as error:  # anything that prevents loading the folder
        if "trust_remote_code" in str(error):
            return ["the model has Python code: read it, and add --trust_remote_code to run it"]
        return [f"cannot load the export: {' '.join(str(error).split())[:300]}"]


def _rebuilt(manifest: Manifest, plan: ExportPlan) -> Any:
    """Build the model of the checkpoint from its config and tensors, with adapters applied or merged."""
    model = _bare(manifest, plan)
    merge = None if plan.form == "model" else apply_saved_lora(model, plan.entry["adapter"])
    _fill(model, manifest, plan)
    if merge is not None and plan.form == "merge":
        model = merge()
        for param in model.parameters():
            param.data = param.data.to(getattr(torch, plan.dtype))
    return model.eval()


def _bare(manifest: Manifest, plan: ExportPlan) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": plan.trust_remote_code}
    folder = manifest.file("hf/config.json").parent
    config = AutoConfig.from_pretrained(folder, local_files_only=True, quantization_config=None, **options)
    dtype = torch.float32 if plan.form != "model" else getattr(torch, plan.dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def _fill(model: Any, manifest: Manifest, plan: ExportPlan, of_base: bool = False) -> Any:
    """Set every parameter and buffer from the checkpoint, or else (``of_base``: always) from the base model."""
    prefix = f"model/{plan.entry['prefix']}"
    ties = dict(plan.entry["tied"])
    ties |= {first: again for again, first in ties.items()}
    exported = set(plan.sources.values())
    for name, target in model.state_dict(keep_vars=True).items():
        saved = next((one for one in (prefix + name, prefix + ties.get(name, name)) if one in manifest.tensors), None)
        if saved is not None and not of_base:
            value = read_tensor(manifest, saved)
            if plan.form == "adapter" and saved in exported:
                value = value.to(getattr(torch, plan.dtype))
        elif plan.base is not None:
            value = plan.base.read(base_name(name))
            if value.shape != target.shape:  # only a trained copy of the module has rows of added tokens
                value = nn.functional.pad(value, (0, 0) * (value.dim() - 1) + (0, len(target) - len(value)))
        else:
            raise CheckpointError(f"{manifest.folder}: no tensor {prefix}{name}, which the model has")
        if target.is_meta:
            owner, _, attribute = name.rpartition(".")
            param = nn.Parameter(value.to(target.dtype), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, param)
        else:
            with torch.no_grad():
                target.copy_(value)
    return model


def _reloaded_model(folder: Path, plan: ExportPlan) -> tuple[Any, list[str]]:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"output_loading_info": True, "local_files_only": True}
    options["trust_remote_code"] = plan.trust_remote_code
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    model, info = loaded
    lines = [f"{key.replace('_', ' ')}: {', '.join(map(str, sorted(info[key])[:8]))}" for key in _BAD_KEYS if info[key]]
    if str(model.dtype) != f"torch.{plan.dtype}":
        lines.append(f"dtype: {model.dtype}, not torch.{plan.dtype}")
    choose_eager(model)
    return model.eval(), lines


def _reloaded_adapter(folder: Path, manifest: Manifest, plan: ExportPlan) -> tuple[Any, list[str]]:
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        other = sorted(set(file.keys()) ^ set(plan.specs))
    if other:
        return None, [f"adapter: missing or unexpected tensors: {', '.join(other[:8])}"]
    return load_adapter_folder(_fill(_bare(manifest, plan), manifest, plan, of_base=True), folder).eval(), []


def _compare(expected: Any, found: Any) -> list[str]:
    """List tensors and logits that are not bitwise equal."""
    ours = dict(expected.state_dict())
    theirs = {name.removeprefix("base_model.model."): tensor for name, tensor in found.state_dict().items()}
    lines = []
    if ours.keys() != theirs.keys():
        lines.append(f"missing or unexpected names: {', '.join(sorted(ours.keys() ^ theirs.keys())[:8])}")
    unequal = [n for n in ours if n in theirs and not torch.equal(_bits(ours[n]), _bits(theirs[n]))]
    lines += [f"tensor {name} differs from the checkpoint" for name in unequal]
    for model in (expected, found):  # for one row, kernels sum otherwise in unaligned memory, such as a mapped file's
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    vocabulary = expected.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(32) * 7919 % vocabulary).reshape(2, 16)
    with torch.no_grad():
        one, other = (model(input_ids=ids, use_cache=False).logits for model in (expected, found))
    if not torch.equal(_bits(one), _bits(other)):
        lines.append("logits of a fixed input differ")
    return lines


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, so that NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
