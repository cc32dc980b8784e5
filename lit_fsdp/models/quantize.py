"""A base in NF4 under adapters (QLoRA): bitsandbytes' 4-bit layers on meta, whose weights are packed while read.

Four weights are packed into each element of a ``(n, 1)`` tensor in bf16, which is sharded like any other parameter. The
scales, one per block of 64, are not sharded.

Source: QLoRA, arXiv:2305.14314.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lit_fsdp.errors import ConfigError, require
from lit_fsdp.models.special_layers import bypassed_layers, router_layers

_BLOCK = 64
_STORED = torch.bfloat16
_NF4 = {"quant_type": "nf4", "quant_storage": _STORED}


def apply_nf4(model: PreTrainedModel, keep: Collection[str], double_quantization: bool) -> None:
    """Replace the linear layers of ``model``, which is on meta, by 4-bit layers in place, before it gets adapters.

    Not replaced are :func:`whole_layers` and modules in ``keep``: names, or ends of names, of fully trained modules.
    """
    library = _bitsandbytes()
    linears = {n: m for n, m in linear_layers(model).items() if not any(f".{kept}." in f".{n}." for kept in keep)}
    given = f"nf4 for {type(model).__name__}, which has no linear layer except the head"
    require(linears, "model.lora.quantize", given, "a model with linear layers", "drop quantize")
    options = {"compress_statistics": double_quantization, **_NF4}
    for name, linear in linears.items():
        numel, has_bias = linear.weight.numel(), linear.bias is not None
        layer = _layer_class()(linear.in_features, linear.out_features, has_bias, device="meta", **options)
        packed = torch.empty(math.ceil(numel / 4), 1, dtype=_STORED, device="meta")
        layer.weight = library.nn.Params4bit(packed, requires_grad=False, bnb_quantized=True, **options)
        layer.bias = linear.bias
        layer.double_quantization = double_quantization
        layer.quantization_bytes = _bytes_of_scales(numel, double_quantization)
        # Otherwise bitsandbytes repacks the gathered weight in place for the first evaluation on such a CPU.
        layer.support_avx512bf16_for_cpu = False
        model.set_submodule(name, layer)
    chosen_by: Any = model
    chosen_by.is_loaded_in_4bit = True  # peft chooses its adapter class by this


class PackedExperts(nn.Module):
    """A fused expert tensor in NF4, a submodule under the parameter's name.

    It is never called; :mod:`lit_fsdp.models.experts` multiplies by the unpacked weights.
    """

    def __init__(self, shape: torch.Size, double_quantization: bool) -> None:
        super().__init__()
        self.shape, self.double_quantization, self.quant_state = shape, double_quantization, None
        packed = torch.empty(math.ceil(shape.numel() / 4), 1, dtype=_STORED, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.quantization_bytes = _bytes_of_scales(shape.numel(), double_quantization)
        self.in_features, self.out_features = shape[-1], shape[0] * shape[1]

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized weights of all experts; the packed weight must be gathered, as in a forward pass."""
        return unpacked(self.weight, self.quant_state).view(self.shape).to(dtype)


def pack_experts(owners: Mapping[str, nn.Module], double_quantization: bool) -> None:
    """Replace fused expert parameters, given by name with their owning module, in place and on meta."""
    for name, owner in owners.items():
        own = name.rpartition(".")[2]
        shape = owner._parameters.pop(own).shape  # type: ignore[union-attr]
        owner.add_module(own, PackedExperts(shape, double_quantization))


def _bytes_of_scales(numel: int, double: bool) -> int:
    """Bytes of a layer's scales; the code book of doubly quantized scales is shared by all layers and not counted."""
    blocks, code_book, mean = math.ceil(numel / _BLOCK), 16 * 4, 4
    return (blocks + math.ceil(blocks / 256) * 4 + mean if double else blocks * 4) + code_book


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of a plain model by name, except :func:`whole_layers`."""
    whole = whole_layers(model)
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n not in whole}


def whole_layers(model: PreTrainedModel) -> set[str]:
    """Names of the linear layers that are never quantized: the head, routers, and those whose weight code uses."""
    head = model.get_output_embeddings()
    heads = {name for name, module in model.named_modules() if module is head}
    return heads | router_layers(model) | bypassed_layers(model)


def pack(read: Callable[[slice], torch.Tensor], layer: Any, device: torch.device) -> torch.Tensor:
    """Pack the whole weight and set the layer's ``quant_state`` for unpacking.

    The function ``read`` returns rows of the weight in dim 0, in the dtype of its file. Experts are read and packed one
    at a time, because packing needs several copies in fp32 on a CPU; the result is bit-equal to packing them together.
    The same weight gives the same bits on the same kind of ``device``, where ``quant_state`` stays.
    """
    is_double = layer.double_quantization
    if not (isinstance(layer, PackedExperts) and layer.shape[1:].numel() % _BLOCK == 0):
        packed, layer.quant_state = _quantized(read(slice(None)).to(device), is_double)
        return packed
    parts = [_quantized(read(slice(expert, expert + 1)).to(device), False) for expert in range(layer.shape[0])]
    functional, whole = _bitsandbytes().functional, parts[0][1]
    whole.shape, whole.absmax = layer.shape, torch.cat([state.absmax for _, state in parts])
    if is_double:
        whole.offset, whole.nested = whole.absmax.mean(), True
        whole.absmax, whole.state2 = functional.quantize_blockwise(whole.absmax - whole.offset, blocksize=256)
    layer.quant_state = whole
    return torch.cat([packed for packed, _ in parts])


def rounded(weight: torch.Tensor, double_quantization: bool) -> torch.Tensor:
    """Round ``weight`` to the values that a quantized layer, or fused experts (3-D), use, in the same dtype."""
    if weight.ndim < 3:
        return _bitsandbytes().functional.dequantize_4bit(*_quantized(weight, double_quantization))
    experts = PackedExperts(weight.shape, double_quantization)
    experts.weight = nn.Parameter(pack(weight.__getitem__, experts, weight.device), requires_grad=False)
    return experts.unpacked(weight.dtype)


def _quantized(weight: torch.Tensor, double: bool) -> Any:
    return _bitsandbytes().functional.quantize_4bit(weight, blocksize=_BLOCK, compress_statistics=double, **_NF4)


def as_loaded(compute_dtype: torch.dtype, double_quantization: bool, keep: Sequence[str]) -> BitsAndBytesConfig:
    """The config with which ``from_pretrained`` builds the same layers, except ``keep``, from the same weights."""
    kind: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quantization}
    kind["llm_int8_skip_modules"] = list(keep)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute_dtype, **kind)


def is_nf4(layer: Any) -> bool:
    """Whether a layer has exactly the class that :func:`apply_nf4` creates."""
    return hasattr(layer, "quant_state") and type(layer) is _layer_class()


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, quant_state: Any) -> torch.Tensor:
    """The product of a quantized layer, as bitsandbytes computes it."""
    return _bitsandbytes().matmul_4bit(x, packed, quant_state=quant_state, bias=bias)


def unpacked(packed: torch.Tensor, quant_state: Any) -> torch.Tensor:
    """The weight of a quantized layer, of shape (outputs, inputs)."""
    return _bitsandbytes().functional.dequantize_4bit(packed.view(-1, 1), quant_state)


def give_shapes(layer: Any, dtype: torch.dtype) -> None:
    """Give a layer a quantization state without values, for models that are planned but not loaded."""
    numel = layer.in_features * layer.out_features
    scales = torch.empty(math.ceil(numel / _BLOCK))
    shape = getattr(layer, "shape", torch.Size((layer.out_features, layer.in_features)))
    kind = {"blocksize": _BLOCK, "quant_type": "nf4", "dtype": torch.float32}
    library = _bitsandbytes()
    layer.quant_state = library.functional.QuantState(scales, shape, torch.empty(16), **kind)

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return multiply(x.to(dtype), layer.weight, bias, layer.quant_state)

    forward.only_has_shapes = True  # type: ignore[attr-defined]
    layer.forward = forward  # its own builds a Params4bit from the gathered weight, which fails without values


@functools.cache
def _layer_class() -> Any:
    class NF4Linear(_bitsandbytes().nn.Linear4bit):  # type: ignore[misc]
        """``Linear4bit`` whose state dict has only its parameters, before and after the first call."""

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    return NF4Linear


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        given, fix = "nf4, but bitsandbytes is not installed", "pip install 'lit-fsdp[qlora]'"
        raise ConfigError("model.lora.quantize", given, "bitsandbytes", fix) from error
    return bitsandbytes
