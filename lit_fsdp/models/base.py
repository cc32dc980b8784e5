"""The frozen base of adapters. Checkpoints do not store it; they record its location, revision and hash."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.adapter_names import WEIGHTS_FILE, read_adapter_config
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.experts import fused_experts
from lit_fsdp.models.hub import fetch
from lit_fsdp.models.quantize import linear_layers, rounded
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import ModelSource, files_key, open_weights, stored_tensors

_QUANTIZED = ("quantize", "double_quantization")
_DRAWN_FROM = ("tokenizer", "add_tokens", "miniature")  # these determine the shapes of a random initialization


def describe_base(source: ModelSource, config: ModelConfig, seed: int) -> dict[str, Any]:
    """Describe location, identity and quantization of a base as plain JSON for the manifest of a checkpoint.

    The entry ``xxh3`` is a hash of all bytes of its safetensors files, independent of their folder; random init has
    ``seed``.
    """
    name, folder = config.name, source.weights_folder
    if isinstance(name, str) and Path(name).expanduser().exists():
        name = str(Path(name).expanduser().absolute())
    described = {"name": name, **{field: getattr(config.lora, field, None) for field in _QUANTIZED}}
    described |= {"config_overrides": config.config_overrides} if config.config_overrides else {}
    if folder is None:
        return {**described, "seed": seed, **{field: getattr(config, field) for field in _DRAWN_FROM}}
    is_snapshot = source.hub_name is not None and folder.parent.name == "snapshots"
    return {**described, "revision": folder.name if is_snapshot else None, "xxh3": weights_hash(folder)}


def check_base(saved: Mapping[str, Any], here: Mapping[str, Any], field: str, checkpoint: Path) -> None:
    """Raise ConfigError unless ``here`` is the base that the adapters of a checkpoint, or a folder, were trained on."""
    given = f"{_words(here)}, which is not the base of the adapters in {checkpoint}"
    same = saved == here or saved.get("xxh3", "") == here.get("xxh3")
    require(same, field, given, _words(saved), "name that model: adapters are valid only for their own base")


def weights_hash(folder: Path) -> str:
    """XXH3-128 of the weights in a model folder, in hex, cached until a file's size or modification time changes.

    Hashing reads all files once, as loading does; loading then reads them from the page cache.
    """
    files = sorted({stored.file.resolve() for stored in stored_tensors(folder).values()})
    kind: Any = xxhash.xxh3_128

    def make(place: Path) -> None:
        hashes = []
        for file in files:
            with file.open("rb") as opened:
                hashes.append(hashlib.file_digest(opened, kind).hexdigest())
        (place / "xxh3").write_text(xxhash.xxh3_128_hexdigest(" ".join(sorted(hashes)).encode()), encoding="ascii")

    place = cache_root() / "models" / f"xxh3-{files_key(files)}"
    return (make_once(place, make, f"hashing {folder} for checkpoints") / "xxh3").read_text(encoding="ascii")


class BaseWeights:
    """Reads the tensors of a base one at a time by their transformers names, with the values adapters were trained on.

    The argument ``saved`` is the result of :func:`describe_base`.
    """

    def __init__(self, source: ModelSource, saved: Mapping[str, Any], trust_remote_code: bool) -> None:
        self.model = model = build_on_meta(source.hf_config, "eager", trust_remote_code)
        """On meta."""
        self._weights = open_weights(source, model, saved.get("seed", 0))
        packed = {f"{name}.weight" for name in linear_layers(model)} | set(fused_experts(model))
        self._quantized = packed if saved.get("quantize") else set()
        self._double = bool(saved.get("double_quantization"))
        self.specs: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Dtype (``float32``) in the files, and shape."""
        for name, tensor in model.state_dict().items():
            dtype = self._weights.read_named(name, slice(0, 0) if tensor.ndim else None).dtype
            self.specs[name] = str(dtype).removeprefix("torch."), tuple(tensor.shape)

    @property
    def experts_apart(self) -> dict[str, list[str]]:
        """See :class:`lit_fsdp.models.weights.Weights`."""
        return self._weights.experts_apart

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor on the CPU, in memory of its own."""
        stored = self._weights.read_named(name)
        return rounded(stored, self._double) if name in self._quantized else stored


def base_of_folder(adapter: Path) -> dict[str, Any]:
    """Read the base of an adapter folder, as :func:`describe_base`; only ``name`` if other software wrote it."""
    weights, recorded = adapter / WEIGHTS_FILE, None
    if weights.is_file():
        with safe_open(weights, "pt") as file:
            recorded = (file.metadata() or {}).get("base")
    name = read_adapter_config(adapter).get("base_model_name_or_path")
    return dict(json.loads(recorded)) if recorded else {"name": name}


def find_base(
    saved: Mapping[str, Any], adapters: Path, name: str | None = None, trust_remote_code: bool = False
) -> ModelSource:
    """Resolve the base of adapters, or ``name`` instead, at the revision used in training.

    The argument ``saved`` is the result of :func:`describe_base`. If it has only ``name``, nothing is compared.
    """
    fields = (*_DRAWN_FROM, "config_overrides")
    options: dict[str, Any] = {field: saved[field] for field in fields if saved.get(field)}
    options["lora"] = LoraConfig(**{field: saved[field] for field in _QUANTIZED if field in saved})
    seed, where = saved.get("seed", 0), name or saved["name"]
    try:
        if name is None and saved.get("revision"):
            where = str(fetch(where, "model", trust_remote_code, saved["revision"]))
        config = ModelConfig(name=where, trust_remote_code=trust_remote_code, **options)
        source = resolve_model(config)
    except ConfigError as error:
        fix = "name its current location with --base; if the model has its own code, export with --trust_remote_code"
        raise ConfigError("--base", error.given, f"{_words(saved)}, the base of {adapters}", fix) from error
    if len(saved) > 1:
        check_base(saved, describe_base(source, config, seed), "--base", adapters)
    return source


def open_base(
    saved: Mapping[str, Any], adapters: Path, name: str | None = None, trust_remote_code: bool = False
) -> BaseWeights:
    """Open the tensors of the base that :func:`find_base` finds."""
    return BaseWeights(find_base(saved, adapters, name, trust_remote_code), saved, trust_remote_code)


def _words(base: Mapping[str, Any]) -> str:
    revision = f" at revision {base['revision']}" if base.get("revision") else ""
    which = f"xxh3 {base['xxh3']}" if base.get("xxh3") else f"random init, seed {base.get('seed')}"
    return f"{base['name']}{revision} ({which})" if len(base) > 1 else str(base["name"])
