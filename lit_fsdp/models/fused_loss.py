"""Cross-entropy kernels of other packages behind ``model.loss.backend``: Liger's and Apple's cut cross-entropy.

They run inside the head's forward, where its weight is gathered under either engine. Both need Triton, so a GPU.
Validation never takes them: it wants entropy and right predictions, which they do not tell.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.head import is_plain_linear
from lit_fsdp.models.token_scores import LossTerms

_PACKAGES = {"liger": "liger_kernel", "cce": "cut_cross_entropy"}


def check_fused(config: LossConfig, head: nn.Module | None, terms: LossTerms, reason: str) -> None:
    """Refuse a backend that is missing here or would compute something else for this model.

    Args:
        config: Its backend is ``liger`` or ``cce``.
        head: None where the model's use of it is not understood.
        terms: What the model does with its logits.
        reason: Why it is not understood.

    Raises:
        ConfigError: Names what stands in the way.
    """
    fix = "set model.loss.backend: chunked, which does the same in plain PyTorch"
    if importlib.util.find_spec(_PACKAGES[config.backend]) is None:
        raise ConfigError(
            "model.loss.backend",
            f"{config.backend}, but {_PACKAGES[config.backend]} is not installed",
            f"{_PACKAGES[config.backend]}",
            f"pip install lit-fsdp[{config.backend}], or {fix}",
        )
    problem = None
    if head is None:
        problem = f"this model: {reason}"
    elif not is_plain_linear(head):
        problem = f"a head that is a {type(head).__name__} (adapters, quantised or its own product)"
    elif config.backend == "cce" and getattr(head, "bias", None) is not None:
        problem = "a head with a bias"
    elif terms.scale != 1.0 and terms.cap is not None:
        problem = "logits that are both scaled and capped"
    if problem:
        raise ConfigError("model.loss.backend", f"{config.backend} with {problem}", "a plain linear head", fix)


def refuse_cpu(backend: str, device_type: str) -> None:
    """Raise ConfigError for a fused backend on anything but a GPU; others run anywhere."""
    if backend in _PACKAGES and device_type != "cuda":
        raise ConfigError(
            "model.loss.backend", f"{backend} on {device_type}", "a GPU", "set model.loss.backend: chunked"
        )


def fused_loss(
    backend: str,
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    terms: LossTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss with a graph, of shape (1, 1, 1), and without: negative log-likelihood and z-loss, scalars.

    A factor on the logits goes to the hidden states and the bias: the product is the same.

    Args:
        backend: ``liger`` or ``cce``.
        hidden_ND: Of supervised tokens, in the compute dtype.
        weight_VD: In the compute dtype, gathered.
        bias_V: Or None.
        targets_N: Right tokens.
        terms: As :func:`check_fused` let them through.

    Raises:
        ConfigError: Tensors that the kernels cannot take: not on a GPU, or for ``cce`` in fp32.
    """
    refuse_cpu(backend, hidden_ND.device.type)
    if terms.scale != 1.0:
        hidden_ND = hidden_ND * terms.scale
        bias_V = None if bias_V is None else bias_V * terms.scale
    nothing = torch.zeros((), device=hidden_ND.device)
    if backend == "cce":
        loss = _cut(hidden_ND, weight_VD, targets_N, terms)
        return loss.reshape(1, 1, 1).clone(), loss.detach().float(), nothing
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    result: Any = liger_fused_linear_cross_entropy(
        hidden_ND,
        weight_VD,
        targets_N,
        bias=None if bias_V is None else bias_V.to(weight_VD.dtype),
        lse_square_scale=terms.z_loss,
        reduction="sum",
        softcap=terms.cap,
        return_z_loss=True,
        accum_dtype=torch.float32,
    )
    z_loss = result.z_loss.detach().float() if terms.z_loss else nothing
    return result.loss.reshape(1, 1, 1).clone(), result.loss.detach().float() - z_loss, z_loss


def _cut(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    if hidden_ND.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "model.loss.backend",
            f"cce with {str(hidden_ND.dtype).removeprefix('torch.')} hidden states",
            "bf16 or fp16 compute",
            "set precision: mixed in the strategy, or model.loss.backend: chunked",
        )
    from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

    loss: torch.Tensor = linear_cross_entropy(
        hidden_ND, weight_VD, targets_N, softcap=terms.cap, reduction="sum", filter_eps="auto", impl="cce"
    )
    return loss
