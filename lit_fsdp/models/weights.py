"""Read the tensors of a model one at a time, and only the requested rows.

A folder of safetensors files is matched with the model once, by names and shapes; missing tensors are initialized.
"""

import copy
import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.models.tensor_files import read_header, read_rows

_log = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXPERT_PARTS = {  # names of separately stored expert weights that form one tensor of all experts, joined in dim 0
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# tensor names of quantized models only: bitsandbytes, GPTQ, AWQ, MXFP4, fp8, HQQ, torchao and others
_QUANTIZED = re.compile(
    r"\.(quant_state\.|absmax|nested_absmax|quant_map|SCB$|g_idx$|qweight$|qzeros$|W_q$|codes$|codebooks$|scales$)"
    r"|_(blocks|scales)$|\.((weight|input|output)_scale(s|_inv)?|weight_(zero_point|packed|shape|global_scale))$"
    r"|(\._data|_qdata)$"
)


@dataclass(frozen=True)
class ModelSource:
    """A resolved model name; no weights have been read yet."""

    hf_config: PretrainedConfig
    weights_folder: Path | None
    """Folder of safetensors files whose names and shapes match, or None for random initialization."""
    tokenizer_source: str | None
    """Folder or hub name of the tokenizer; None with a miniature means the generated one."""
    hub_name: str | None = None
    """Hub name, for the base model of model cards."""
    base: str | None = None
    """Hub name or folder that adapters record so that peft finds their base; None with random init."""
    overlay: Path | None = None
    """Folder of tensors that replace those in ``weights_folder``: embedding and head grown by ``model.add_tokens``."""

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the model accepts; a tokenizer may have more."""
        return int(self.hf_config.get_text_config().vocab_size)


class Stored(NamedTuple):
    """A tensor in a safetensors file: its shape, dtype and first byte."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Read the tensor or its ``rows`` in dim 0, on the CPU, in the dtype of the file."""
        try:
            return read_rows(self.file, self.shape, self.dtype, self.start, rows)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file}: cannot read {self.name} ({error})") from error


class StoredExperts(NamedTuple):
    """A tensor of all experts that is stored per expert, as on the hub: ``experts.0.w1.weight`` and so on."""

    parts: tuple[tuple[Stored, ...], ...]
    """For each expert, the tensors to join in dim 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor: experts first."""
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Same as :meth:`Stored.read`; reads only the experts in ``rows``."""
        chosen = self.parts[rows or slice(None)]
        whole = self.parts[0][0].read(slice(0, 0)).new_empty(len(chosen), *self.shape[1:])
        for expert, parts in zip(whole, chosen, strict=True):
            for target, part in zip(expert.split([part.shape[0] for part in parts]), parts, strict=True):
                target.copy_(part.read())
        return whole


class StoredMxfp4(NamedTuple):
    """A tensor of all experts in MXFP4, as published for GPT-OSS: 32 numbers of 4 bits share an exponent.

    Shapes: E experts, O outputs, I inputs. Source: OCP Microscaling Formats (MX), version 1.0.
    """

    blocks: Stored
    """(E, O, I / 32, 16): two numbers per byte, the first in the lower half."""
    exponents: Stored
    """(E, O, I / 32), above -127."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, I, O), the shape in the model."""
        experts, outputs, blocks = self.exponents.shape
        return experts, 32 * blocks, outputs

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """Same as :meth:`Stored.read`, in bf16, which is exact; experts are unpacked one at a time."""
        chosen = range(self.shape[0])[rows or slice(None)]
        whole = torch.empty(len(chosen), *self.shape[1:], dtype=torch.bfloat16)
        for expert, number in zip(whole, chosen, strict=True):
            packed, exponents = (part.read(slice(number, number + 1))[0] for part in self)
            codes = torch.stack([packed & 15, packed >> 4], dim=-1).int()
            values = torch.ldexp(torch.tensor(_FP4)[codes], exponents[:, :, None, None].int() - 127)
            expert.copy_(values.flatten(1).t())
        return whole


_Readable = Stored | StoredExperts | StoredMxfp4


class Match(NamedTuple):
    """Result of matching a model with a folder: stored tensors ``found`` by the model's names, one for tied names.

    The ``missing`` names are of the model, the ``unexpected`` ones in the folder, ``misshapen`` lines of text.
    """

    found: dict[str, _Readable]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]


class Weights:
    """Reads or initializes every parameter and buffer of a model; created by :func:`open_weights`.

    Tensors without a file are initialized independently of order, number of ranks and sharding: ``_init_weights`` of
    transformers is called on one module with real tensors, in a copy of the model that is otherwise on meta, seeded by
    the seed and the module's name. Some models initialize a child from its parent (GPT-2 scales the output projections
    from the attention block), so it is also called on the module's ancestors, nearest first.
    """

    def __init__(self, model: PreTrainedModel, seed: int, stored: dict[str, _Readable]) -> None:
        self._seed, self._stored = seed, stored
        self._first_owner = {name: names[0] for names in tied_groups(model) for name in names}
        self._modules = dict(copy.deepcopy(model).named_modules(remove_duplicate=False))

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """Same as :meth:`read_named`, for the parameter or buffer ``attribute`` of module ``module_name``."""
        return self.read_named(f"{module_name}.{attribute}".removeprefix("."), rows)

    def read_named(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Read a parameter or buffer, or only its ``rows`` in dim 0.

        The result is on the CPU and owns its memory. It has the dtype of the file, or of the model if initialized.

        Raises:
            CheckpointError: The file is truncated, or the model's code does not initialize a tensor without a file.
        """
        if name in self._stored:
            return self._stored[name].read(rows)
        value = self._initialized(self._first_owner.get(name, name))
        if value.is_floating_point() and value.isnan().any():
            text = "the model's code (_init_weights) does not initialize it, and no file contains it"
            raise CheckpointError(f"{name}: {text}")
        return value if rows is None else value[rows].clone()

    def is_stored(self, name: str) -> bool:
        """Whether a file contains the tensor, so that rows are read without the rest; others are initialized whole."""
        return name in self._stored

    @property
    def experts_apart(self) -> dict[str, list[str]]:
        """For each fused tensor whose experts are stored separately: their module in the files, and names of parts.

        If there are such tensors, also the name in the files of each other tensor that has another name there.
        """
        found: dict[str, list[str]] = {}
        for name, stored in self._stored.items():
            if isinstance(stored, StoredExperts):
                (owner, *_), *_ = parts = [part.name.rsplit(".", 3) for part in stored.parts[0]]
                found[name] = [owner, *(word for _, _, word, _ in parts)]
        ours = self._stored.keys() | self._first_owner.keys()
        for name, stored in self._stored.items() if found else ():
            if isinstance(stored, Stored) and stored.name not in ours:
                found[name] = [stored.name]
        return found

    @torch.no_grad()
    def _initialized(self, name: str) -> torch.Tensor:
        owner, _, attribute = name.rpartition(".")
        module, above = self._modules[owner], owner
        kept = module._parameters, module._buffers
        module._parameters = {k: p if p is None else nn.Parameter(_blank(p)) for k, p in kept[0].items()}
        module._buffers = {k: b if b is None else _blank(b) for k, b in kept[1].items()}
        try:
            with seeded(self._seed, owner):
                self._nearest_model(owner)._init_weights(module)
                while above:
                    above = above.rpartition(".")[0]
                    self._nearest_model(above)._init_weights(self._modules[above])
            made: torch.Tensor = getattr(module, attribute)
            return made.detach()
        finally:
            module._parameters, module._buffers = kept

    def _nearest_model(self, name: str) -> PreTrainedModel:
        """The model at or above ``name``, whose ``_init_weights`` applies."""
        while not isinstance(module := self._modules[name], PreTrainedModel):
            name = name.rpartition(".")[0]
        return module


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same (unsharded) shape, filled with NaN to detect missing initialization."""
    return torch.full(tensor.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU generator from (seed, name) and restore its state afterwards; accelerators are not affected."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
        yield


def open_weights(source: ModelSource, model: PreTrainedModel, seed: int) -> Weights:
    """Open the weights of ``source`` for ``model`` (on meta, not yet wrapped), after matching names and shapes.

    Raises:
        CheckpointError: Tensors are missing in the folder or have other shapes, or a file is damaged.
    """
    folder, kind = source.weights_folder, type(model).__name__
    if folder is None:
        return Weights(model, seed, {})
    tensors = stored_tensors(folder)
    if source.overlay is not None:
        tensors |= headers_of(source.overlay.glob("*.safetensors"))
    match = match_names(model, tensors)
    for names, what in ((match.missing, "are missing"), (match.misshapen, "have other shapes than config.json says")):
        if names:
            raise CheckpointError(f"{folder}: {len(names)} tensors of {kind} {what}: {'; '.join(names[:8])}")
    if extra := match.unexpected:
        text = "%s: %d tensors are not in %s and are not loaded: %s"
        _log.warning(text, folder, len(extra), kind, "; ".join(extra[:8]))
    return Weights(model, seed, match.found)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a safetensors model folder, from :func:`headers_of` its files; empty without such files."""
    if (folder / _SINGLE).is_file():
        return headers_of([folder / _SINGLE])
    if not (folder / _INDEX).is_file():
        return {}
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return headers_of(folder / name for name in sorted(set(index.values())))


def headers_of(files: Iterable[Path]) -> dict[str, Stored]:
    """All tensors of safetensors files by name; only headers are read.

    Raises:
        CheckpointError: A file is missing, damaged or truncated.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            tensors |= {name: Stored(file, name, *entry) for name, entry in read_header(file).items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a valid safetensors file ({error}); download it again") from error
    return tensors


def match_names(model: PreTrainedModel, tensors: dict[str, Stored]) -> Match:
    """Match ``model`` (any device) with the tensors of a folder.

    A name in the folder may lack the model's base prefix (``h.0.…`` for ``transformer.h.0.…``) or have one that the
    model lacks. A tied parameter may be stored under any of its names, and experts may be stored separately.
    """
    found: dict[str, _Readable] = {}
    used: set[str] = set()
    groups = tied_groups(model)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}
    for names in groups:
        for candidate in [c for n in names for c in _may_be_stored_as(model, n)]:
            if candidate in tensors:
                used.add(candidate)
                found.update({name: found.get(name, tensors[candidate]) for name in names})
            packed = [f"{candidate}_blocks", f"{candidate}_scales"]
            if all(part in tensors for part in packed):
                used.update(packed)
                found[names[0]] = StoredMxfp4(*(tensors[part] for part in packed))
        if names[0] not in found and (experts := _experts(model, names[0], shapes[names[0]], tensors)):
            used |= {part.name for parts in experts.parts for part in parts}
            found[names[0]] = experts
    # transformers silently drops these: they are computed, not trained
    dropped = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    surplus = (name for name in tensors if name not in used)
    wrong = [(name, stored.shape, shapes[name]) for name, stored in found.items() if stored.shape != shapes[name]]
    return Match(
        found=found,
        missing=[names[0] for names in groups if names[0] not in found],
        unexpected=sorted(name for name in surplus if not any(re.search(pattern, name) for pattern in dropped)),
        misshapen=[f"{name}: {there} in the folder, {here} in the model" for name, there, here in wrong],
    )


def refuse_quantized(source: Path, unexpected: Iterable[str]) -> None:
    """Refuse quantized weights, whatever config.json says; they are detected by unexpected tensor names."""
    name = next((name for name in sorted(unexpected) if _QUANTIZED.search(name)), None)
    fix = "start from the model's bf16 or fp32 version; model.lora.quantize: nf4 quantizes it while it is read"
    given = f"{source}, which is quantized: it contains {name}"
    require(name is None, "model.name", given, "weights that can be trained", fix)


def _may_be_stored_as(model: PreTrainedModel, name: str) -> list[str]:
    prefix = f"{model.base_model_prefix}."
    same = [name, name.removeprefix(prefix), prefix + name]
    if model.config.model_type == "gemma3_text":  # names in the vision-language model: on the hub, and in memory
        same += [f"language_model.{name}", name.replace("model.", "model.language_model.", 1)]
    for stored, ours in _renames(model.config.model_type):
        same += [one.replace(ours, stored) for one in same if ours in one]
    return same


@functools.cache
def _renames(model_type: str) -> list[tuple[str, str]]:
    """Parts of names in a family's files and in transformers, if the family only renames tensors and fuses experts."""
    found = []
    for one in get_checkpoint_conversion_mapping(model_type) or []:
        if type(one) is WeightConverter and all(".experts." in f".{target}" for target in one.target_patterns):
            continue
        stored = re.sub(r"\\(\W)", r"\1", one.source_patterns[0])
        if type(one) is not WeightRenaming or re.search(r"[\\^$*+?()\[\]|]", stored):
            return []
        found.append((stored, one.target_patterns[0]))
    return found


def _experts(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], tensors: dict[str, Stored]
) -> StoredExperts | None:
    owner, _, own = name.rpartition(".")
    for stored_owner in _may_be_stored_as(model, owner) if owner.endswith(".experts") else ():
        for words in _EXPERT_PARTS.get(own, ()):
            names = [[f"{stored_owner}.{i}.{word}.weight" for word in words] for i in range(shape[0])]
            if all(part in tensors for parts in names for part in parts):
                return StoredExperts(tuple(tuple(tensors[part] for part in parts) for parts in names))
    return None


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of parameters and persistent buffers, grouped by tensor, in the order of the module tree."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def files_key(files: Iterable[Path], *more: object) -> str:
    """A short hash of file paths, sizes, modification times and ``more``, as the cache key of derived files."""
    seen = sorted((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in set(files))
    return hashlib.blake2b(repr((seen, more)).encode(), digest_size=8).hexdigest()
