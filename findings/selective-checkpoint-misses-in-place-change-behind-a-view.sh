#!/usr/bin/env bash
# torch 2.15.0 (CPU), transformers 5.24.0; run on 2026-11-30.
#
# Selective activation checkpointing keeps the results of chosen operations and raises an error if one of them is
# changed in place, because the recomputation would read the changed values. The check compares version counters. Some
# products end with a view that has a counter of its own (`aten._unsafe_view`). It shares the memory of the kept result,
# but not its counter. An in-place change of it is not noticed: the recomputation starts from the changed values and
# changes them again. The gradients are wrong by tens of percent, without an error or a warning.
#
# This holds for `torch.matmul` of 3-D and 4-D tensors with a kept `aten.bmm`, and for `F.linear` of a 3-D input with a
# kept `aten.mm` (no bias) or `aten.addmm` (bias). The same change raises an error after `torch.bmm`, `torch.einsum` and
# `torch.mm`, and after `F.linear` of a 2-D input. The gradients are right if no product is kept, and if the change is
# out of place. Gemma 3n is affected: the prediction of AltUp in each block is a 4-D `torch.matmul`, then `+=`.
#
# Seen (y = product; y += x; sum of squares; difference of the gradients from those without recomputation):
#   matmul 4-D, keeps bmm:             wrong by 36%, out of place by 0%, no product kept by 0%
#   matmul 3-D, keeps bmm:             wrong by 36%, out of place by 0%, no product kept by 0%
#   linear 3-D, keeps mm:              wrong by 45%, out of place by 0%, no product kept by 0%
#   linear 3-D with bias, keeps addmm: wrong by 34%, out of place by 0%, no product kept by 0%
#   bmm 3-D, keeps bmm:                RuntimeError, out of place by 0%, no product kept by 0%
#   einsum 3-D, keeps bmm:             RuntimeError, out of place by 0%, no product kept by 0%
#   mm 2-D, keeps mm:                  RuntimeError, out of place by 0%, no product kept by 0%
#   linear 2-D, keeps mm:              RuntimeError, out of place by 0%, no product kept by 0%
#   linear 2-D with bias, keeps addmm: RuntimeError, out of place by 0%, no product kept by 0%
#   Gemma 3n, none: loss 4.8612, gradient norm 4.4415, wrong by 0%
#   Gemma 3n, full: loss 4.8612, gradient norm 4.4415, wrong by 0%
#   Gemma 3n, selective, keeps mm: loss 4.8612, gradient norm 4.4415, wrong by 0%
#   Gemma 3n, selective, keeps bmm: loss 4.8612, gradient norm 1.7768, wrong by 73%
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 transformers==5.24.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PYTHON'
import functools
import sys

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

MM, ADDMM, BMM = (getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))
linear, einsum = torch.nn.functional.linear, functools.partial(torch.einsum, "bij,bjk->bik")
SILENT = {"matmul 4-D, keeps bmm": (torch.matmul, BMM, (1, 2, 3, 4), (1, 2, 4, 4))}
SILENT["matmul 3-D, keeps bmm"] = (torch.matmul, BMM, (2, 3, 4), (2, 4, 4))
SILENT["linear 3-D, keeps mm"] = (linear, MM, (2, 3, 4), (4, 4))
SILENT["linear 3-D with bias, keeps addmm"] = (linear, ADDMM, (2, 3, 4), (4, 4), (4,))
NOTICED = {"bmm 3-D, keeps bmm": (torch.bmm, BMM, (2, 3, 4), (2, 4, 4))}
NOTICED["einsum 3-D, keeps bmm"] = (einsum, BMM, (2, 3, 4), (2, 4, 4))
NOTICED["mm 2-D, keeps mm"] = (torch.mm, MM, (3, 4), (4, 4))
NOTICED["linear 2-D, keeps mm"] = (linear, MM, (3, 4), (4, 4))
NOTICED["linear 2-D with bias, keeps addmm"] = (linear, ADDMM, (3, 4), (4, 4), (4,))
SIZES = {"vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 32, "hidden_size_per_layer_input": 16}
SIZES |= {"intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 16, "laurel_rank": 8, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4}


def options(*kept):
    return {"use_reentrant": False, "context_fn": functools.partial(create_selective_checkpoint_contexts, list(kept))}


def gradient(product, shapes, is_in_place=True, **recomputed):
    """The gradient of one region with a change after the product; `recomputed` are options of `checkpoint`, if any."""

    def region(x, *others):
        y = product(x, *others)
        if is_in_place:
            y += x
        else:
            y = y + x
        return y.square()

    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = checkpoint(region, *inputs, **recomputed) if recomputed else region(*inputs)
    out.sum().backward()
    return torch.cat([tensor.grad.flatten() for tensor in inputs])


def error(right, found):
    return float((found - right).norm() / right.norm())


def measured(what, product, kept, *shapes):
    right = gradient(product, shapes)
    others = [error(right, gradient(product, shapes, False, **options(kept)))]
    others += [error(right, gradient(product, shapes, **options()))]
    try:
        wrong = error(right, gradient(product, shapes, **options(kept)))
        text = f"wrong by {wrong:.0%}"
    except RuntimeError:
        wrong, text = None, "RuntimeError"
    print(f"{what + ':':34} {text}, out of place by {others[0]:.0%}, no product kept by {others[1]:.0%}")
    return wrong, max(others)


def gemma(recomputed):
    """Loss and gradient of a random Gemma 3n of 4 blocks, which are recomputed with these options, if any."""
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES)).train()
    if recomputed:
        model.gradient_checkpointing_enable(recomputed)
    ids = torch.randint(1, 128, (2, 32))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


silent = [measured(what, *given) for what, given in SILENT.items()]
noticed = [measured(what, *given) for what, given in NOTICED.items()]
is_same = all(wrong and wrong > 0.1 and other < 1e-5 for wrong, other in silent)
is_same &= all(wrong is None and other < 1e-5 for wrong, other in noticed)
ways = {"none": None, "full": {"use_reentrant": False}, "selective, keeps mm": options(MM)}
ways["selective, keeps bmm"] = options(BMM)
right, errors = gemma(None)[1], []
for what, recomputed in ways.items():
    loss, found = gemma(recomputed)
    errors.append(error(right, found))
    print(f"Gemma 3n, {what}: loss {loss:.4f}, gradient norm {found.norm():.4f}, wrong by {errors[-1]:.0%}")
is_same &= max(errors[:3]) < 1e-5 and errors[3] > 0.1
print("unchanged" if is_same else "it behaves otherwise now")
sys.exit(not is_same)
PYTHON
