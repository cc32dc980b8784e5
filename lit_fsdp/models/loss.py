"""The next-token loss as a sum over supervised tokens.

The model is always called as a whole, so that hooks and all-gathers happen; only its head's own forward is replaced
while it runs, by one that takes supervised tokens a chunk at a time: the logits of a whole batch never exist.

Shapes: B batch, T tokens, N supervised tokens, C tokens of a chunk, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import require
from lit_fsdp.models.attention import is_causal

IGNORED = -100
"""Label of a token that is not supervised, as in ``torch.nn.functional.cross_entropy``."""
NUM_TARGETS = "num_targets"
"""In a batch, as a plain number: how many labels are supervised. Where it is not known the device is waited for."""
ONE_ROW = "one_row"
"""In a batch of padded rows: the same samples as one row without padding, which the model gets in their place, and as
``taken`` which positions of the flattened rows are its own. All targets are there, and in the same order."""
CHUNK_BYTES = 96 * 2**20
"""What the fp32 logits of a chunk take by default."""
_log = logging.getLogger(__name__)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_OF_LOGITS = re.compile(r"logit|lm_head|output_mult")
_ELSEWHERE = re.compile(r"router|^attn_|^mlp_|_to_keep$|_bias$")
_BACKEND = "model.loss.backend"
_FP16_ROOM = 16.0  # gradients of logits are probabilities, and in fp16 those below 6e-8 would vanish
Head = Callable[[torch.Tensor], torch.Tensor]
"""Gives logits (C, V) of hidden states (C, D)."""


class TokenLoss(NamedTuple):
    """Sums over the supervised tokens of a batch, in nats, to be added up over batches and ranks before dividing.

    Backward runs on ``loss_sum``, the only one with a graph: ``nll_sum`` and a mixture's router loss, or the loss of
    pairs. ``num_correct`` is NaN with Liger, which does not tell.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    nll_sum: torch.Tensor
    num_correct: torch.Tensor


@dataclass(frozen=True)
class LossPlan:
    """How the loss of one model is computed; its logits are ``cap * tanh(scale * head(hidden) / cap)``."""

    backend: str
    chunk_tokens: int | None = None
    scale: float = 1.0
    cap: float | None = None

    def logits(self, head: Head, hidden_CD: torch.Tensor) -> torch.Tensor:
        """The model's logits, in fp32 at least, (C, V)."""
        z_CV = _wide(head(hidden_CD))
        if self.scale != 1.0:
            z_CV = z_CV * self.scale
        return z_CV if self.cap is None else self.cap * torch.tanh(z_CV / self.cap)


def plan_loss(model: nn.Module, config: LossConfig | None = None) -> LossPlan:
    """How the loss of ``model`` is computed; one whose logits are not understood gets the plain way, and a warning.

    Raises:
        ConfigError: Liger is not installed or does not fit this model.
    """
    config = config or LossConfig()
    if config.backend == "plain":
        return LossPlan("plain")
    if config.backend == "liger":
        fix = "set model.loss.backend: chunked, which does the same in plain PyTorch"
        given = "liger, but liger_kernel is not installed"
        is_there = importlib.util.find_spec("liger_kernel")
        require(is_there, _BACKEND, given, "liger_kernel", f"pip install lit-fsdp[liger], or {fix}")
        owner = owner_of_head(model)
        kind = None if owner is None else type(_head_of(owner))
        # no adapter, which it would pass by
        require(kind is nn.Linear, _BACKEND, f"liger with a head that is a {kind}", "a plain linear head", fix)
    try:
        scale, cap = _after_the_head(model)
    except ValueError as unknown:
        text = "%s: %s is not for %s: %s. All logits are made at once (plain): the same loss, more memory"
        _log.warning(text, _BACKEND, config.backend, type(model).__name__, unknown)
        return LossPlan("plain")
    return LossPlan(config.backend, config.chunk_tokens, scale, cap)


def _after_the_head(model: nn.Module) -> tuple[float, float | None]:
    """The model's factor on its logits, and their bound; ValueError says why they are not known."""
    owner: Any = owner_of_head(model)
    if owner is None:
        raise ValueError("it has no output head (get_output_embeddings)")
    if not type(owner).forward.__module__.startswith("transformers.models."):
        raise ValueError("its forward is not one of transformers")
    config = owner.config.get_text_config()
    scale, cap = 1.0, None
    for key, value in config.to_dict().items():
        if not value or not _OF_LOGITS.search(key) or _ELSEWHERE.search(key):
            continue
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        if number and key in _CAPS:
            cap = number
        elif number and key in _FACTORS:
            scale = number
        elif number and key == "logits_scaling" and config.model_type.startswith("granite"):
            scale = 1.0 / number
        else:
            raise ValueError(f"what it does with {key}: {value} is not known here")
    return scale, cap


def owner_of_head(model: nn.Module) -> nn.Module | None:
    """The module that has a body and an output head, inside whatever is around it."""
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        if get is not None and isinstance(get(module), nn.Module):
            return module
    return None


def _head_of(owner: Any) -> nn.Module:
    """The module whose forward makes logits of hidden states, without FSDP1's wrapper."""
    head: nn.Module = owner.get_output_embeddings()
    while (inner := head._modules.get("_fsdp_wrapped_module")) is not None:
        head = inner
    return head


def causal_lm_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None) -> TokenLoss:
    """The loss of ``model`` on a batch with ``input_ids``, ``labels`` and what else its forward takes.

    Where ``position_ids`` start anew (packed samples) the first token of a sample is never supervised. Without a plan,
    that of :func:`plan_loss` is taken.
    """
    targets_BT = next_targets(batch)
    loss, nll, correct, router = token_losses(model, batch, targets_BT, plan or plan_loss(model))
    num_tokens = (targets_BT != IGNORED).sum()
    loss = loss.sum() if router is None else loss.sum() + router * num_tokens
    return TokenLoss(loss, num_tokens, nll.sum(), correct.sum())


@torch.no_grad()
def sample_losses(
    model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed negative log-likelihood in nats, fp32 (B,), and supervised tokens, int64 (B,), of each unpacked row."""
    targets_BT = next_targets(batch)
    _, nll_N, _, _ = token_losses(model, batch, targets_BT, plan or plan_loss(model))
    return by_position(nll_N, targets_BT).sum(dim=1), (targets_BT != IGNORED).sum(dim=1)


def by_position(values_N: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """What is known of each target, where it stands, (B, T); zeros elsewhere."""
    return values_N.new_zeros(targets_BT.shape).masked_scatter(targets_BT != IGNORED, values_N)


def next_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The token that each position is to predict, (B, T): the label after it, never that of another sample."""
    targets_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    positions_BT = batch.get("position_ids")
    if positions_BT is not None:
        starts_BT = F.pad(positions_BT[:, 1:] == 0, (0, 1), value=False)
        targets_BT = targets_BT.masked_fill(starts_BT, IGNORED)
    return targets_BT


def target_positions(targets_BT: torch.Tensor, num: int | None = None) -> torch.Tensor:
    """Where the flattened targets are supervised, int64 (N,); ``num`` of them, if that is known."""
    is_target = (targets_BT != IGNORED).flatten()
    if num is None:
        return is_target.nonzero().squeeze(1)
    torch._assert_async(is_target.sum() == num, f"labels changed on the device: drop {NUM_TARGETS} of the batch")
    return torch.nonzero_static(is_target, size=num).squeeze(1)


def token_losses(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    targets_BT: torch.Tensor,
    plan: LossPlan,
    each: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The negative log-likelihoods of all targets with a graph, summed unless ``each``; and what has none.

    That is the same of every target, (N,), and whether its most likely token was right, (N,): of Liger the sum and
    NaN; and the router's loss, which has a graph again.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "padding", NUM_TARGETS)}
    owner: Any = owner_of_head(model)
    if ONE_ROW in batch:
        inputs = dict(batch[ONE_ROW])
        targets_BT = targets_BT.flatten()[inputs.pop("taken")].unsqueeze(0)
    elif "padding" in batch and _needs_mask(owner):
        inputs["attention_mask"] = batch["padding"]
    positions_N = target_positions(targets_BT, batch.get(NUM_TARGETS))  # type: ignore[arg-type]  # the one number
    targets_N = targets_BT.flatten()[positions_N]
    if plan.backend == "plain":
        out = model(**inputs)
        _, nll_N, correct_N = _scores(_wide(out.logits.flatten(0, 1)[positions_N]), targets_N)
        return nll_N, nll_N.detach(), correct_N, _router_loss(model, out)
    head = _head_of(owner)
    own_forward = head.forward
    found: list[Sequence[torch.Tensor]] = []

    def loss_forward(hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, positions_N)
        rows = plan.chunk_tokens or chunk_rows(owner.config.get_text_config().vocab_size, hidden_ND.shape[1])
        trained = _trained(head)
        if not torch.is_grad_enabled() or not (hidden_ND.requires_grad or trained) or each:
            found.append(_loss_of_each(own_forward, hidden_ND, targets_N, plan, rows))
        elif plan.backend == "liger" and hidden_ND.requires_grad and len(targets_N):  # else its head has no gradient
            found.append(_liger_loss(head, hidden_ND, targets_N, plan))
        else:
            found.append(ChunkedLoss.apply(own_forward, targets_N, plan, rows, hidden_ND, *trained))
        return found[-1][0]

    head.forward = loss_forward
    try:
        out = model(**inputs)
    finally:
        del head.forward
    if len(found) != 1:
        raise RuntimeError(f"{type(model).__name__} called its head {len(found)} times instead of once")
    loss, nll_N, correct_N = found[0]
    return loss.flatten(), nll_N, correct_N, _router_loss(model, out)


def _needs_mask(owner: Any) -> bool:
    """Whether padding behind a row changes what the model makes of it, or might: a router's loss is of all tokens."""
    is_known = owner is not None and type(owner).forward.__module__.startswith("transformers.models.")
    has_router_loss = is_known and getattr(owner.config.get_text_config(), "output_router_logits", False)
    return not is_known or has_router_loss or not is_causal(owner)


def _trained(head: nn.Module) -> list[torch.Tensor]:
    """What is trained of the head, as its modules hold it now: FSDP1 puts plain tensors in the place of parameters."""
    held = [values for module in head.modules() for values in (module._parameters, module.__dict__)]
    tensors = [t for values in held for t in values.values() if torch.is_tensor(t) and t.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _router_loss(model: nn.Module, out: Any) -> torch.Tensor | None:
    """What a mixture of experts would add to its mean loss if it were given labels, so that all experts are used.

    Models compute it only where their configuration says ``output_router_logits: true``.
    """
    aux, owner = getattr(out, "aux_loss", None), owner_of_head(model)
    if not torch.is_tensor(aux) or owner is None:
        return None
    for holder in (owner, owner.config):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(factor := getattr(holder, name, None), (int, float)):
                return aux * factor
    raise ValueError(f"{type(owner).__name__} returns a router loss, but says no factor for it")


def chunk_rows(vocab_size: int, width: int) -> int:
    """Tokens per chunk by default: :data:`CHUNK_BYTES` of fp32 logits, or a quarter of the head's fp32 gradient.

    The second where it is larger: every chunk adds to that gradient, which many small ones would be slow at.
    """
    return max(1, CHUNK_BYTES // (4 * vocab_size), width // 4)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scores(z_CV: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, the negative ones of the targets, and whether the most likely token is the target."""
    log_p_CV = z_CV.log_softmax(dim=-1)
    return log_p_CV, F.nll_loss(log_p_CV, targets_C, reduction="none"), z_CV.argmax(dim=-1) == targets_C


def _loss_of_each(
    head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, plan: LossPlan, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of every token, (1, N, 1) with a graph and (N,) without; a chunk is computed again in backward."""

    def of_chunk(hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _scores(plan.logits(head, hidden_CD), targets_C)[1:]

    chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    nll, correct = zip(*(checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
    nll_N = torch.cat(nll)
    return nll_N[None, :, None].clone(), nll_N.detach(), torch.cat(correct)  # FSDP2 warns of views


class ChunkedLoss(torch.autograd.Function):
    """The summed loss of all tokens, (1, 1, 1) with a graph; of each, and whether it was right, (N,), without one.

    The gradient of a sum is known as soon as the logits of a chunk are, up to the factor that backward brings. So the
    forward pass differentiates each chunk of ``rows`` tokens at once and keeps the sums of the gradients: nothing of
    size (N, V) outlives a chunk, and nothing is computed twice. ``trained`` is what of ``head`` is trained. Without any
    token the loss is a zero whose gradients are zeros. Backward works once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        targets_N: torch.Tensor,
        plan: LossPlan,
        rows: int,
        hidden_ND: torch.Tensor,
        *trained: torch.Tensor,
    ) -> Any:
        """Differentiate each chunk and keep the sums."""
        sums: list[torch.Tensor | None] = [None] * len(trained)
        chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
        found = zip(*(_differentiate(head, plan, *chunk, trained, sums) for chunk in chunks), strict=True)
        nll_N, correct_N, dhidden_ND = map(torch.cat, found)
        ctx.gradients, ctx.dtypes = [dhidden_ND, *sums], [tensor.dtype for tensor in (hidden_ND, *trained)]
        ctx.mark_non_differentiable(nll_N, correct_N)
        return nll_N.sum().reshape(1, 1, 1).clone(), nll_N, correct_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *ignored: Any) -> Any:
        """Give the sums away, times ``grad``."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of a chunked loss are given away once"
        factor = grad.view(()) / _FP16_ROOM
        totals = zip(gradients, ctx.dtypes, strict=True)
        narrow = [None if total is None else total.mul_(factor).to(dtype) for total, dtype in totals]
        return (None, None, None, None, *narrow)


def _differentiate(
    head: Head,
    plan: LossPlan,
    hidden_CD: torch.Tensor,
    targets_C: torch.Tensor,
    trained: Sequence[torch.Tensor],
    sums: list[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of a chunk and its gradient by the hidden states; what it adds to those of the head goes into ``sums``.

    They are summed in fp32: in bf16 a sum rounds, and in fp16 it may have no room before the loss scale is known. A
    function of its own, so that nothing of a chunk is left for the next.
    """
    leaf_CD = hidden_CD.detach().requires_grad_()
    with torch.enable_grad():
        z_CV = plan.logits(head, leaf_CD)
    edge = torch.autograd.graph.get_gradient_edge(z_CV)
    log_p_CV, nll_C, correct_C = _scores(z_CV.detach(), targets_C)
    del z_CV  # backward needs its edge alone, and tensors of this size are the largest cost
    grad_CV = log_p_CV.exp_()
    grad_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
    dhidden_CD, *found = torch.autograd.grad(edge, [leaf_CD, *trained], grad_CV.mul_(_FP16_ROOM), allow_unused=True)
    for i, grad in enumerate(found):
        if grad is not None:
            so_far = sums[i]  # add_ widens as it reads: a wide copy would be as large as the sum
            sums[i] = _wide(grad) if so_far is None else so_far.add_(grad)
    return nll_C, correct_C, _wide(dhidden_CD)


def _liger_loss(
    head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, plan: LossPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Liger's kernel, inside the head's forward, where its weight is gathered under either engine."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    # a factor on the logits may as well stand on the hidden states and the bias
    bias = None if head.bias is None else head.bias.to(dtype) * plan.scale
    options: dict[str, Any] = {"bias": bias, "softcap": plan.cap, "reduction": "sum", "accum_dtype": torch.float32}
    hidden_ND = hidden_ND.to(dtype) * plan.scale
    loss = liger_fused_linear_cross_entropy(hidden_ND, head.weight.to(dtype), targets_N, **options)
    nll = loss.detach().float().reshape(1)
    return loss.reshape(1, 1, 1).clone(), nll, nll * torch.nan
