#!/usr/bin/env bash
# torch 2.15.0 and 2.11.0 (CPU); run on 2026-11-28.
#
# FSDPModule.set_gradient_divide_factor(f) makes FSDP2 divide gradients by f in place of the number of ranks, as expert
# parallel needs it, and set_force_sum_reduction_for_comms(True) makes it reduce by plain sums (gloo has no premultiplied
# ones). Where the mesh over which a module is sharded has one rank, as that of experts which all ranks divide among
# themselves, both together divide by f twice: once where the single rank's gradient is copied in place of a
# reduce-scatter, and once more after it. The gradient is f times too small, without a word. Either setting alone is right.
#
# Seen:
#   gradient 8.0, divided by 4: 2.0 by the factor alone, 0.5 with forced sums
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, found = init_device_mesh("cpu", (1,)), []
for forces_sum in (False, True):
    layer = torch.nn.Linear(1, 1, bias=False)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(4.0)
    layer.set_force_sum_reduction_for_comms(forces_sum)
    layer(torch.full((1, 1), 8.0)).sum().backward()
    found.append(layer.weight.grad.to_local().item())
dist.destroy_process_group()
print(f"gradient 8.0, divided by 4: {found[0]} by the factor alone, {found[1]} with forced sums")
is_same = found == [2.0, 0.5]
print("unchanged" if is_same else "torch behaves otherwise now")
sys.exit(not is_same)
PYTHON
