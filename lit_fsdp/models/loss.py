"""The next-token loss as a sum over supervised tokens.

The model is always called as a whole, so that hooks and all-gathers run. Only its head's forward is replaced during
the call, by one that processes supervised tokens in chunks: the logits of a whole batch never exist.

Shapes: B batch, T tokens, N supervised tokens, C tokens of a chunk, D width of the hidden states, V vocabulary.
"""

import importlib.util
import logging
import re
import sys
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
from lit_fsdp.models.context import ContextGroup

IGNORED = -100
"""Label of a token that is not supervised, as in ``torch.nn.functional.cross_entropy``."""
NUM_TARGETS = "num_targets"
"""Batch key: number of supervised labels, as an int. Without it the host synchronizes with the device."""
ONE_ROW = "one_row"
"""Batch key of padded rows: the same samples as one row without padding, which the model gets instead. Its ``taken``
are the positions in the flattened padded rows. All targets keep their order. In a ``context`` group it is this rank's
part of the row, and the parts of all ranks together have all targets."""
CHUNK_BYTES = 96 * 2**20
"""Default size of the fp32 logits of a chunk."""
_log = logging.getLogger(__name__)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_OF_LOGITS = re.compile(r"logit|lm_head|output_mult")
_ELSEWHERE = re.compile(r"router|^attn_|^mlp_|_to_keep$|_bias$")
_BACKEND = "model.loss.backend"
_FP16_ROOM = 16.0  # gradients of logits are probabilities, and in fp16 those below 6e-8 would vanish
Head = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits (C, V) from hidden states (C, D)."""


class TokenLoss(NamedTuple):
    """Sums over the supervised tokens of a batch, in nats, to be added up over batches and ranks before dividing.

    Only ``loss_sum`` has a graph: it is ``nll_sum`` plus a mixture's router loss, or the loss of pairs. The entry
    ``num_correct`` is NaN with Liger, which does not compute it.
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
        """Compute the model's logits, in fp32 or wider, (C, V)."""
        num, step = len(hidden_CD), _step_of(hidden_CD)
        z_CV = _wide(head(F.pad(hidden_CD, (0, 0, 0, -num % step)))[:num])
        if self.scale != 1.0:
            z_CV = z_CV * self.scale
        return z_CV if self.cap is None else self.cap * torch.tanh(z_CV / self.cap)


def plan_loss(model: nn.Module, config: LossConfig | None = None) -> LossPlan:
    """Decide how to compute the loss of ``model``; unknown logits options select the plain backend with a warning.

    Raises:
        ConfigError: Liger is not installed or does not fit this model.
    """
    config = config or LossConfig()
    if config.backend == "plain":
        return LossPlan("plain")
    if config.backend == "liger":
        fix = "set model.loss.backend: chunked, the same computation in plain PyTorch"
        given = "liger, but liger_kernel is not installed"
        is_there = importlib.util.find_spec("liger_kernel")
        require(is_there, _BACKEND, given, "liger_kernel", f"pip install 'lit-fsdp[liger]', or {fix}")
        owner = owner_of_head(model)
        kind = None if owner is None else type(_head_of(owner))
        # no adapter, which Liger would ignore
        require(kind is nn.Linear, _BACKEND, f"liger with a head that is a {kind}", "a plain linear head", fix)
    try:
        scale, cap = _after_the_head(model)
    except ValueError as unknown:
        text = "%s: %s does not support %s: %s. Using plain: all logits at once, the same loss, more memory"
        _log.warning(text, _BACKEND, config.backend, type(model).__name__, unknown)
        return LossPlan("plain")
    return LossPlan(config.backend, config.chunk_tokens, scale, cap)


def _after_the_head(model: nn.Module) -> tuple[float, float | None]:
    """Return the scale and soft cap that the model applies to its logits; ValueError if they are unknown."""
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
            raise ValueError(f"the effect of {key}: {value} on its logits is unknown")
    return scale, cap


def owner_of_head(model: nn.Module) -> nn.Module | None:
    """The first module inside any wrappers that has a body and an output head, or None."""
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        if get is not None and isinstance(get(module), nn.Module):
            return module
    return None


def _head_of(owner: Any) -> nn.Module:
    """The module whose forward computes logits from hidden states, without FSDP1's wrapper."""
    head: nn.Module = owner.get_output_embeddings()
    while (inner := head._modules.get("_fsdp_wrapped_module")) is not None:
        head = inner
    return head


def causal_lm_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None) -> TokenLoss:
    """Compute the loss of ``model`` on a batch with ``input_ids``, ``labels`` and other inputs of its forward.

    Where ``position_ids`` restart (packed samples) the first token of a sample is never supervised. The ``plan``
    defaults to that of :func:`plan_loss`.
    """
    targets_BT = next_targets(batch)
    loss, nll, correct, router = token_losses(model, batch, targets_BT, plan or plan_loss(model))
    num_tokens = (targets_here(batch, targets_BT) != IGNORED).sum()
    loss = loss.sum() if router is None else loss.sum() + router * num_tokens
    return TokenLoss(loss, num_tokens, nll.sum(), correct.sum())


@torch.no_grad()
def sample_losses(
    model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed negative log-likelihood in nats, fp32 (B,), and supervised tokens, int64 (B,), of each unpacked row."""
    targets_BT = next_targets(batch)
    _, nll_N, _, _ = token_losses(model, batch, targets_BT, plan or plan_loss(model))
    sums_B, context = by_position(nll_N, targets_here(batch, targets_BT)).sum(dim=1), context_of(batch)
    return sums_B if context is None else context.summed(sums_B), (targets_BT != IGNORED).sum(dim=1)


def context_of(batch: Mapping[str, Any]) -> ContextGroup | None:
    """The context group whose ranks each compute a part of this batch, or None."""
    group: ContextGroup | None = batch.get(ONE_ROW, {}).get("context")
    return group


def targets_here(batch: Mapping[str, Any], targets_BT: torch.Tensor) -> torch.Tensor:
    """The targets whose positions this rank computes, (B, T); others are ignored labels."""
    if context_of(batch) is None:
        return targets_BT
    taken_N, flat = batch[ONE_ROW]["taken"], targets_BT.flatten()
    return torch.full_like(flat, IGNORED).index_copy(0, taken_N % len(flat), flat[taken_N]).view_as(targets_BT)


def by_position(values_N: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Put values of the targets at their positions, (B, T); zeros elsewhere."""
    return values_N.new_zeros(targets_BT.shape).masked_scatter(targets_BT != IGNORED, values_N)


def next_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The token that each position predicts, (B, T): the next label, never that of another sample."""
    targets_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    positions_BT = batch.get("position_ids")
    if positions_BT is not None:
        starts_BT = F.pad(positions_BT[:, 1:] == 0, (0, 1), value=False)
        targets_BT = targets_BT.masked_fill(starts_BT, IGNORED)
    return targets_BT


def target_positions(targets_BT: torch.Tensor, num: int | None) -> torch.Tensor:
    """Indices of supervised targets in the flattened batch, int64 (N,); the value ``num`` is their number, if known."""
    is_target = (targets_BT != IGNORED).flatten()
    if num is None:
        return is_target.nonzero().squeeze(1)
    torch._assert_async(is_target.sum() == num, f"labels changed on the device: drop {NUM_TARGETS} from the batch")
    return torch.nonzero_static(is_target, size=num).squeeze(1)


def token_losses(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    targets_BT: torch.Tensor,
    plan: LossPlan,
    each: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the negative log-likelihood of all targets with a graph (summed unless ``each``), and three more values.

    These are, without a graph, the negative log-likelihoods, (N,), and whether the most likely token was right, (N,)
    (Liger: the sum and NaN); and the router loss, which has a graph.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "padding", NUM_TARGETS)}
    owner: Any = owner_of_head(model)
    num_tokens: Any = 0
    if ONE_ROW in batch:
        inputs = dict(batch[ONE_ROW])
        targets_BT = targets_BT.flatten()[inputs.pop("taken")].unsqueeze(0)
        num_tokens = inputs.pop("num_tokens", 0)
    elif "padding" in batch and _needs_mask(owner):
        inputs["attention_mask"] = batch["padding"]
    positions_N = target_positions(targets_BT, batch.get(NUM_TARGETS))  # type: ignore[arg-type]  # an int
    targets_N = targets_BT.flatten()[positions_N]
    if plan.backend == "plain":
        out = model(**inputs)
        _, nll_N, correct_N = _scores(_wide(out.logits.flatten(0, 1)[positions_N]), targets_N)
        return nll_N, nll_N.detach(), correct_N, _router_loss(model, out, context_of(batch), num_tokens)
    head, context = _head_of(owner), context_of(batch)
    own_forward, degree = head.forward, 1 if context is None else context.degree
    found: list[Sequence[torch.Tensor]] = []

    def loss_forward(hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, positions_N)
        rows = plan.chunk_tokens or chunk_rows(owner.config.get_text_config().vocab_size, hidden_ND.shape[1], degree)
        trained = _trained(head)
        if not torch.is_grad_enabled() or not (hidden_ND.requires_grad or trained) or each:
            found.append(_loss_of_each(own_forward, hidden_ND, targets_N, plan, rows))
        elif plan.backend == "liger" and hidden_ND.requires_grad and len(targets_N):  # else Liger gives no gradient
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
    return loss.flatten(), nll_N, correct_N, _router_loss(model, out, context, num_tokens)


def _needs_mask(owner: Any) -> bool:
    """Whether right padding may change the model's outputs; a router loss, for example, counts all tokens."""
    is_known = owner is not None and type(owner).forward.__module__.startswith("transformers.models.")
    has_router_loss = is_known and getattr(owner.config.get_text_config(), "output_router_logits", False)
    return not is_known or has_router_loss or not is_causal(owner)


def _trained(head: nn.Module) -> list[torch.Tensor]:
    """Trainable tensors of the head as its modules have them now: FSDP1 replaces parameters by plain tensors."""
    held = [values for module in head.modules() for values in (module._parameters, module.__dict__)]
    tensors = [t for values in held for t in values.values() if torch.is_tensor(t) and t.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _router_loss(model: nn.Module, out: Any, context: ContextGroup | None, num_tokens: int) -> torch.Tensor | None:
    """Load balancing loss that a mixture of experts would add to its mean loss if it got labels.

    Models compute it only if their configuration has ``output_router_logits: true``. It is not additive over parts of
    a row, so in a context group it is computed again from the ``num_tokens`` of all ranks.
    """
    aux, owner = getattr(out, "aux_loss", None), owner_of_head(model)
    if not torch.is_tensor(aux) or owner is None:
        return None
    if context is not None:
        whole = tuple(context.gathered(logits, 0)[:num_tokens] for logits in out.router_logits)
        balance = balance_of(owner)
        assert balance is not None  # see context_method
        aux = balance(whole, owner.num_experts, owner.num_experts_per_tok)
    for holder in (owner, owner.config):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if isinstance(factor := getattr(holder, name, None), (int, float)):
                return aux * factor
    raise ValueError(f"{type(owner).__name__} returns a router loss, but has no coefficient for it")


def balance_of(owner: Any) -> Callable[..., Any] | None:
    """The transformers function that computes the router loss from the logits of all tokens, if the model has one."""
    found = getattr(sys.modules[type(owner).__module__], "load_balancing_loss_func", None)
    return found if hasattr(owner, "num_experts") and hasattr(owner, "num_experts_per_tok") else None


def chunk_rows(vocab_size: int, width: int, degree: int) -> int:
    """Default tokens per chunk: :data:`CHUNK_BYTES` of fp32 logits, or a quarter of the head's fp32 gradient.

    The larger of both applies: every chunk adds to that gradient, which is slow with many small chunks. Ranks that
    share rows (``degree``) divide the chunk as they divide all other activations.
    """
    return max(1, max(CHUNK_BYTES // (4 * vocab_size), width // 4) // degree)


def _step_of(hidden: torch.Tensor) -> int:
    """The number of tokens is padded to a multiple of this: on CPUs, oneDNN compiles bf16 products per shape."""
    is_narrow = hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
    return 64 if hidden.device.type == "cpu" and is_narrow else 1


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scores(z_CV: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, negative log-likelihoods of targets, and whether the most likely token is the target."""
    log_p_CV = z_CV.log_softmax(dim=-1)
    return log_p_CV, F.nll_loss(log_p_CV, targets_C, reduction="none"), _is_most_likely(z_CV, targets_C)


def _is_most_likely(z_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Whether the first of the largest logits is the target's."""
    if z_CV.device.type != "cpu":
        return z_CV.argmax(dim=-1) == targets_C
    # on a CPU argmax takes 12 times as long as amax (torch 2.15)
    is_largest_C = z_CV.gather(1, targets_C[:, None]).squeeze(1) == z_CV.amax(dim=-1)
    return is_largest_C.masked_scatter(is_largest_C, z_CV[is_largest_C].argmax(dim=-1) == targets_C[is_largest_C])


def _loss_of_each(
    head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, plan: LossPlan, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of every token, (1, N, 1) with a graph and (N,) without; backward recomputes each chunk."""

    def of_chunk(hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _scores(plan.logits(head, hidden_CD), targets_C)[1:]

    chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    nll, correct = zip(*(checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks), strict=True)
    nll_N = torch.cat(nll)
    return nll_N[None, :, None].clone(), nll_N.detach(), torch.cat(correct)  # FSDP2 warns of views


class ChunkedLoss(torch.autograd.Function):
    """The summed loss, (1, 1, 1), with a graph; losses and correctness of all tokens, (N,), without a graph.

    The gradient of a sum is known from the logits of a chunk, up to the factor that backward receives. So the forward
    pass differentiates each chunk of ``rows`` tokens immediately and keeps the sums of the gradients: logits outlive no
    chunk, and nothing is computed twice. The trainable tensors of ``head`` are in ``trained``. Without tokens, loss and
    gradients are zero. Backward works only once.
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
        """Return the sums times ``grad`` and release them."""
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "backward of a chunked loss works only once"
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
    """Scores of a chunk and its gradient with respect to hidden states; gradients of the head are added to ``sums``.

    They are summed in fp32: bf16 would round, and fp16 could overflow before the loss scale is known. A separate
    function, so that all tensors of a chunk are freed before the next.
    """
    leaf_CD = hidden_CD.detach().requires_grad_()
    with torch.enable_grad():
        z_CV = plan.logits(head, leaf_CD)
    edge = torch.autograd.graph.get_gradient_edge(z_CV)
    log_p_CV, nll_C, correct_C = _scores(z_CV.detach(), targets_C)
    del z_CV  # backward needs only its edge, and tensors of this size dominate memory
    grad_CV = log_p_CV.exp_()
    grad_CV[torch.arange(len(targets_C), device=targets_C.device), targets_C] -= 1
    dhidden_CD, *found = torch.autograd.grad(edge, [leaf_CD, *trained], grad_CV.mul_(_FP16_ROOM), allow_unused=True)
    for i, grad in enumerate(found):
        if grad is not None:
            so_far = sums[i]  # add_ upcasts while reading: an fp32 copy would be as large as the sum
            sums[i] = _wide(grad) if so_far is None else so_far.add_(grad)
    return nll_C, correct_C, _wide(dhidden_CD)


def _liger_loss(
    head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, plan: LossPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Liger's kernel, called inside the head's forward, where both engines have gathered its weight."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    # scaling hidden states and bias is the same as scaling the logits
    bias = None if head.bias is None else head.bias.to(dtype) * plan.scale
    options: dict[str, Any] = {"bias": bias, "softcap": plan.cap, "reduction": "sum", "accum_dtype": torch.float32}
    hidden_ND = hidden_ND.to(dtype) * plan.scale
    loss = liger_fused_linear_cross_entropy(hidden_ND, head.weight.to(dtype), targets_N, **options)
    nll = loss.detach().float().reshape(1)
    return loss.reshape(1, 1, 1).clone(), nll, nll * torch.nan
