"""Floating-point operations of a training step, from the shapes of a model and the counts of the step.

One multiplication with its addition is two operations; only matrix products count. For every token:

- multiplying by a weight of N elements costs 2 N forward; backward 2 N for the gradient of its input, if anything
  before it (or in the same block) is trained, and 2 N for its own gradient, if it is trained itself. Full
  fine-tuning therefore costs 6 N; a frozen weight under adapters 4 N, and the adapters' own products 6 N.
- embeddings are looked up and cost nothing. Only the experts that a token is routed to count.
- attention: a query attends to the previous keys of its own sample. A sample of T tokens has T² / 2 such pairs, with a
  window of W tokens W T - W² / 2; each costs 2 (D_qk + D_v) per query head forward, and twice that backward. Pairs
  across samples of a pack do not count.
- the head counts at supervised tokens only, since the loss needs no others.

This is the work that the loss and its gradients need, without the extra work of a backend (padding, logits of prompts,
the masked half of attention): dividing it by time and by the device's peak rate gives MFU. PaLM's formula (appendix B)
counts all T² pairs, and the head at every token; both agree for pre-training without the causal half. HFU adds the
forward pass of every block that activation checkpointing recomputes.

Source: PaLM, arXiv:2204.02311, appendix B; Korthikanti et al., arXiv:2205.05198, appendix A.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_fsdp.config.model import WITHOUT_SDPA

_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_KNOWN_LAYERS = {"full_attention", "attention", *_WINDOWS}
_NO_PRODUCT = {"original_module", "lora_embedding_A", "token_adapter"}
_OF_EXPERTS = re.compile(r"(^|\.)experts\.(\d+|(base_layer\.)*(lora_[AB]|\w+_proj))\.")  # \w+_proj: 4-bit experts
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")


@dataclass(frozen=True, kw_only=True)
class BlockFlops:
    """Operations of one block: per token for its weights, per pair of query and key for its attention.

    Fields ``forward_…`` are for the forward pass; fields ``train_…`` include the backward pass.
    """

    forward_per_token: float
    train_per_token: float
    forward_per_pair: float
    train_per_pair: float
    kept_from: float
    """Sample length in tokens from which recomputed blocks keep the results of attention."""
    window: int | None
    """Maximum number of keys per query; None for all previous keys."""


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Cost of a model, forward and backward; created by :func:`flop_formula`."""

    blocks: Mapping[str, BlockFlops]
    """By module name, as in ``model.named_modules()``."""
    outside_per_token: float
    """Cost of weights outside of blocks, without the head."""
    head_per_supervised_token: float

    def train_flops(self, counts: Mapping[str, float]) -> float:
        """Operations that loss and gradients of a step need; ``counts`` as :func:`~.step_metrics.step_counts`."""
        tokens, each = counts["tokens"], self.blocks.values()
        blocks = sum(b.train_per_token * tokens + b.train_per_pair * num_pairs(counts, b.window) for b in each)
        head = self.head_per_supervised_token * counts["supervised_tokens"]
        return blocks + self.outside_per_token * tokens + head

    def recomputed_flops(self, counts: Mapping[str, float], words: Mapping[str, str]) -> float | None:
        """Operations that activation checkpointing repeats in the backward pass; None if that is not known.

        The mode ``full`` repeats a block, but attention of short rows only; the mode ``selective`` repeats attention
        only, and only if it is eager; only the compiler knows what a memory budget keeps. The modes by block name are
        in ``words``; other blocks repeat nothing.
        """
        total = 0.0
        for name, block in self.blocks.items():
            word, _, more = words.get(name, "no").partition(",")
            if word not in ("no", "full", "selective") or "tiles" in more:  # tiled layers are computed once more
                return None
            if word == "full":
                total += block.forward_per_token * counts["tokens"]
            is_short = word == "full" and counts["squared_tokens"] < block.kept_from * counts["tokens"]
            if is_short or (word == "selective" and block.kept_from == math.inf):
                total += block.forward_per_pair * num_pairs(counts, block.window)
        return total


def num_pairs(counts: Mapping[str, float], window: int | None) -> float:
    """Number of query-key pairs within samples: half the sum of squared lengths.

    With a window, samples are assumed to be equally long, weighted by tokens: exact if they are, or if no sample is
    longer than the window; else slightly too many.
    """
    tokens, squared = counts["tokens"], counts["squared_tokens"]
    if window is None or squared <= window * tokens:
        return squared / 2
    return tokens * (window - window * window * tokens / (2 * squared))


def experts_per_token(config: Any) -> int:
    """Return the number of experts per token of a text config; 0 if it does not define one number."""
    return next((number for name in _PER_TOKEN if isinstance(number := getattr(config, name, None), int)), 0)


def flop_formula(model: nn.Module) -> ModelFlops:
    """Compute the cost of a transformers causal LM, with adapters and frozen weights, from its unsharded shapes.

    Call it before weights are sharded; meta tensors suffice. Input gradients count from the first block with trained
    weights. (In that block, adapters skip those of the first projections, so the count is slightly too high.)

    Raises:
        ValueError: No formula is known for this model; the message gives the reason.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds, count = getattr(config, "layer_types", None) or (), config.num_hidden_layers
    if unknown := sorted(set(kinds) - _KNOWN_LAYERS):
        raise ValueError(f"no formula is known for layers of type {', '.join(unknown)}")
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(f"it has no list of {count} blocks")
    name = min(lists, key=lambda found: found.count("."))
    names = [f"{name}.{index}" for index in range(count)]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    in_head = set(head.modules())
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    flows = any(p.requires_grad for module in embeddings for p in module.parameters(recurse=False))
    blocks: dict[str, BlockFlops] = {}
    outside = 0.0
    for name, module in model.named_modules():
        if name in names:
            flows = flows or any(p.requires_grad for p in module.parameters())
            blocks[name] = _block(module, flows, config, kinds[len(blocks)] if kinds else "sliding_attention")
        elif module not in in_head and not any(name.startswith(f"{block}.") for block in names):
            flows = flows or any(p.requires_grad for p in module.parameters(recurse=False))
            outside += _train(_own_products(name, module, config), flows)
    in_the_head = [p for name, module in head.named_modules() for p in _own_products(name, module, config)]
    per_head = _train(in_the_head, flows or any(trained for _, trained in in_the_head))
    return ModelFlops(blocks=blocks, outside_per_token=outside, head_per_supervised_token=per_head)


def _block(block: nn.Module, flows: bool, config: Any, kind: str) -> BlockFlops:
    products = [p for name, module in block.named_modules() for p in _own_products(name, module, config)]
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        dims = 2 * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    per_pair = 2.0 * config.num_attention_heads * dims
    keeps = str(getattr(config, "_attn_implementation", "")).startswith("sdpa")
    keeps = keeps and config.model_type not in WITHOUT_SDPA
    return BlockFlops(
        forward_per_token=sum(2 * elements for elements, _ in products),
        train_per_token=_train(products, flows),
        forward_per_pair=per_pair,
        train_per_pair=per_pair * (3 if flows else 1),
        kept_from=per_pair / 2 if keeps else math.inf,
        window=getattr(config, _WINDOWS[kind], None) if kind in _WINDOWS else None,
    )


def _own_products(name: str, module: Any, config: Any) -> list[tuple[float, bool]]:
    """For each weight of the module itself: elements that multiply one token, and whether it is trained."""
    if isinstance(module, nn.Embedding) or not _NO_PRODUCT.isdisjoint(name.split(".")):
        return []
    found = []
    num_experts = next((number for field in _NUM_EXPERTS if (number := getattr(config, field, None))), None)
    for own, p in module.named_parameters(recurse=False):
        if p.ndim < 2 or own.endswith("bias") or own in _NO_PRODUCT:
            continue
        elements: Any = p.numel()
        if own == "weight" and hasattr(module, "quant_state"):  # bitsandbytes packs several weights in one element
            elements = module.in_features * module.out_features
        is_of_experts = (p.ndim == 3 and p.shape[0] == num_experts) or _OF_EXPERTS.search(f"{name}.")
        if num_experts and is_of_experts:  # only the experts that a token is routed to
            if not experts_per_token(config):
                raise ValueError("its configuration does not give one number of experts per token")
            elements *= experts_per_token(config) / num_experts
        found.append((elements, p.requires_grad))
    return found


def _train(products: list[tuple[float, bool]], flows: bool) -> float:
    return sum(2 * elements * (1 + flows + trained) for elements, trained in products)
