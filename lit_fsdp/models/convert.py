"""Model files that cannot be read shard by shard, rewritten once as a safetensors folder in the cache."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.names import has_safetensors, stored_tensors, tied_groups
from lit_fsdp.models.quiet import reading
from lit_fsdp.models.tokenizers import read_tokenizer

_VERSION = 1
_MIB = 2**20
GgufConfig: Any = getattr(transformers, "GgufConfig", None)  # without one, transformers unpacks everything
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def convert_gguf(file: Path) -> Path:
    """The safetensors model folder of a GGUF file: weights in fp32, config, generation config, tokenizer, template.

    fp32, as dequantized values (fp16 scale times integer plus fp16 offset) need up to 15 significant bits and bf16
    has 8. Converted at the first call; later calls find it by name, size, time and the first and last MiB.

    Raises:
        ConfigError: The ``gguf`` package is missing, or the file is of a kind that transformers cannot read.
    """
    stat = file.stat()
    key = hashlib.blake2b(repr((_VERSION, file.name, stat.st_size, stat.st_mtime_ns)).encode(), digest_size=6)
    with open(file, "rb") as handle:
        key.update(handle.read(_MIB))
        handle.seek(max(0, stat.st_size - _MIB))
        key.update(handle.read(_MIB))

    def make(folder: Path) -> None:
        read_tokenizer(str(file), trust_remote_code=False).save_pretrained(folder)
        # else weights of qwen3.5 and lfm2 stay in the blocks of the file, which nothing can train
        unpacked = {"quantization_config": GgufConfig(dequantize=True)} if GgufConfig else {}
        with reading(file):
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, **unpacked
            )
        save_folder(model, folder)

    return _converted(file, key.hexdigest(), make)


def convert_checkpoint(source: Path, trust_remote_code: bool) -> Path:
    """The same model as in folder ``source``, under the names of its modules, in the dtype of its files.

    For folders with ``.bin`` files only, and for names or shapes that only ``from_pretrained`` can translate (such
    as one file entry per expert). Needs memory for one whole model, in one process.

    Raises:
        CheckpointError: ``from_pretrained`` does not find every tensor either.
    """
    key = hashlib.blake2b(repr(_VERSION).encode(), digest_size=6)
    for file in sorted([*source.glob("*.bin"), *source.glob("*.safetensors"), *source.glob("*.json")]):
        stat = file.resolve().stat()
        key.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())

    def make(folder: Path) -> None:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        options["ignore_mismatched_sizes"] = True  # they are listed, and refused below
        with reading(source):
            options["dtype"] = _stored_dtype(source)  # "auto" would believe config.json
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
        model, info = loaded
        lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        if lacking:
            some = "; ".join(lacking[:8])
            raise CheckpointError(f"{source}: {len(lacking)} tensors are missing or misshapen: {some}")
        save_folder(model, folder)

    return _converted(source, key.hexdigest(), make)


def save_folder(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and weights under the module's own names, each tied tensor once.

    Not ``save_pretrained``: it refuses models that were dequantized, and writes older names back.
    """
    config = json.loads(model.config.to_json_string())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    state = model.state_dict()
    try:
        save_torch_state_dict({names[0]: state[names[0]].contiguous() for names in tied_groups(model)}, folder)
    except SafetensorError as error:  # a full disk comes wrapped in it
        raise OSError(str(error)) from error


def _converted(source: Path, key: str, make: Callable[[Path], None]) -> Path:
    stem = source.stem if source.is_file() else source.resolve().name
    folder = cache_root() / "models" / f"{stem}-{key}"
    return make_once(folder, make, f"converting {source.name} to safetensors")


def _stored_dtype(source: Path) -> torch.dtype:
    """The widest floating-point dtype in the files of a folder."""
    dtypes: set[torch.dtype] = set()
    if has_safetensors(source):
        dtypes = {_FLOATS[t.dtype] for t in stored_tensors(source).values() if t.dtype in _FLOATS}
    for file in source.glob("pytorch_model*.bin") if not dtypes else ():
        tensors = torch.load(file, map_location="meta", weights_only=True)
        dtypes |= {tensor.dtype for tensor in tensors.values()}
    return functools.reduce(torch.promote_types, (dtype for dtype in dtypes if dtype.is_floating_point))
