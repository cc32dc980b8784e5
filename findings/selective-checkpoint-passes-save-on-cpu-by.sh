#!/usr/bin/env bash
# torch 2.13.0 (CPU); run on 2026-11-28.
#
# Selective activation checkpointing (`create_selective_checkpoint_contexts`) inside `save_on_cpu` moves the inputs of the
# checkpointed region to the host, but not what it keeps: outputs of the ops on its list, the large ones, stay on the
# device until the backward pass. Combined to save memory they save less than either seems to promise, without a word.
# From torch 2.15 on a FutureWarning says so, and
# `checkpoint(respect_saved_tensors_hooks=True)` moves them.
#
# Seen (a block of two linear layers, whose two outputs are kept):
#   moved to the host: plain 4 tensors of 2048 bytes, selective 1
#   kept beside the hooks by selective: 2 outputs of linear layers
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import functools
import sys

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

moved, run = [], []
to_host = torch.Tensor.cpu
torch.Tensor.cpu = lambda tensor: (moved.append(tensor.nbytes), to_host(tensor))[1]
torch.manual_seed(0)
block = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU())
contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
x = torch.randn(16, 32, requires_grad=True)
activation = x.nbytes


class Counts(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        run.append(op)
        return op(*args, **(kwargs or {}))


def moves(forward):
    moved.clear()
    with torch.autograd.graph.save_on_cpu():
        loss = forward(x).sum()
    return loss, moved.count(activation)


_, plain = moves(block)
loss, selective = moves(lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
with Counts():
    loss.backward()
again = run.count(torch.ops.aten.addmm.default)  # none is computed again: both outputs were kept, and not on the host
print(f"moved to the host: plain {plain} tensors of {activation} bytes, selective {selective}")
print(f"kept beside the hooks by selective: {2 - again} outputs of linear layers")
is_same = (plain, selective, again) == (4, 1, 0)
print("unchanged" if is_same else "torch behaves otherwise now")
sys.exit(not is_same)
PYTHON
