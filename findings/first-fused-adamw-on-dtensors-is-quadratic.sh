#!/usr/bin/env bash
# torch 2.13.0 (the same with 2.15.0), CPU; run on 2026-11-28.
#
# torch.optim.AdamW(fused=True) over the DTensors that fully_shard makes steps through torch._fused_adamw_, whose lists of
# tensors are laid out by DTensor's sharding propagation once, at the first step. That takes time that grows with the
# square of the number of parameters, whatever their size: two seconds for the 420 factors of LoRA adapters on a model of
# 30 blocks, while all further steps, and every step over plain tensors, are linear. A parameter group per block would
# hide it; the state of the optimizer is the same if the step is taken on local shards.
#
# Seen (CPU seconds):
#   100 parameters: plain 0.003, DTensors 0.244 at first, then 0.004
#   800 parameters: plain 0.019, DTensors 5.725 at first, then 0.032
#   8 times as many parameters take 23.5 times as long at first, 8.0 times as long afterwards
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
cd "$folder"
OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29611 RANK=0 WORLD_SIZE=1 venv/bin/python -W ignore - <<'PYTHON'
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))


def steps(number, on_dtensors):
    """CPU seconds of two steps over so many small parameters."""
    params = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(number)]
    if on_dtensors:
        params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer, found = torch.optim.AdamW(params, fused=True), []
    for _ in range(2):
        before = time.process_time()
        optimizer.step()
        found.append(time.process_time() - before)
    return found


steps(4, True)  # what is set up once
found = {}
for number in (100, 800):
    plain, (first, second) = steps(number, False)[0], steps(number, True)
    found[number] = first, second
    print(f"{number} parameters: plain {plain:.3f}, DTensors {first:.3f} at first, then {second:.3f}")
first, second = (found[800][i] / found[100][i] for i in range(2))
print(f"8 times as many parameters take {first:.1f} times as long at first, {second:.1f} times as long afterwards")
dist.destroy_process_group()
if first < 12:
    sys.exit("changed: the first step is linear now")
print("unchanged")
PYTHON
