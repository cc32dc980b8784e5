"""Convert model files that cannot be read shard by shard to a safetensors folder in the cache, once."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import cache_root, json_bytes, make_once
from lit_fsdp.models.export_files import GENERATION, generation_values
from lit_fsdp.models.hub import reading
from lit_fsdp.models.tokenizers import read_tokenizer
from lit_fsdp.models.weights import files_key, refuse_quantized, tied_groups

GgufConfig: Any = getattr(transformers, "GgufConfig", None)  # without one, transformers unpacks everything


def convert(source: Path, trust_remote_code: bool) -> Path:
    """Convert a GGUF file or model folder to a safetensors folder in fp32, which represents every value exactly.

    For GGUF files, folders with ``.bin`` files only, and names or shapes that only ``from_pretrained`` can translate.
    One process needs memory for the whole model, once. For a GGUF file, tokenizer and chat template are saved too.
    """
    name = source
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    files = sorted(file for extension in ("bin", "safetensors", "json") for file in source.glob(f"*.{extension}"))
    if source.is_file():
        name, files, options = source.parent, [source], {"gguf_file": source.name}
        if GgufConfig is not None:  # else weights of qwen3.5 and lfm2 stay quantized and cannot be trained
            options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["generation_config"] = GenerationConfig()  # else transformers validates the folder's
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # refused below

    def make(folder: Path) -> None:
        if source.is_file():
            read_tokenizer(str(source), trust_remote_code).save_pretrained(folder)
        with reading(source):
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
        model, info = loaded
        refuse_quantized(source, info["unexpected_keys"])
        if lacking := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
            some = "; ".join(lacking[:8])
            raise CheckpointError(f"{source}: {len(lacking)} tensors are missing or misshapen: {some}")
        generation = generation_values(source if source.is_dir() else None, model.generation_config)
        _save_folder(model, folder, generation)

    target = cache_root() / "models" / f"{source.resolve().name}-{files_key(files)}"
    return make_once(target, make, f"converting {source.name} to safetensors")


def _save_folder(model: PreTrainedModel, folder: Path, generation: dict[str, Any] | None) -> None:
    """Write config, generation config and weights under the module's own names, each tied tensor once.

    Not ``save_pretrained``: it refuses dequantized models and restores older names.
    """
    config = json.loads(model.config.to_json_string())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_bytes(json_bytes(config))
    if generation is not None:
        (folder / GENERATION).write_bytes(json_bytes(generation))
    held = model.state_dict()
    state = {names[0]: held[names[0]].contiguous() for names in tied_groups(model)}
    for name, tensor in state.items():  # fused tensors that transformers split are views
        state[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    try:
        save_torch_state_dict(state, folder)
    except SafetensorError as error:  # a full disk comes wrapped in it
        raise OSError(str(error)) from error
