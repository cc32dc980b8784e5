#!/usr/bin/env bash
# torch 2.15.0 (FSDP2, CPU, one process); run on 2026-11-30.
#
# The function `fully_shard` replaces each parameter by a new one, without what was attached to the old one: attributes
# such as `_no_weight_decay` (of Mamba's code) or `lr_mult`, hooks of `register_hook`, and hooks of
# `register_post_accumulate_grad_hook`. An optimizer that makes its groups by these attributes decays or scales other
# weights than before, and a hook that masks rows of a gradient masks nothing. No warning is shown. Under DDP all three
# work. FSDP1 with `use_orig_params=True` keeps the attributes.
#
# Seen:
#   plain:        attribute True, gradient hook called, hook after accumulation called
#   fully_shard:  attribute False, gradient hook not called, hook after accumulation not called
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy
cd "$folder"
MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 RANK=0 WORLD_SIZE=1 venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")


def measured(what, shards):
    torch.manual_seed(0)
    model, called = torch.nn.Linear(2, 2, bias=False), []
    model.weight._no_weight_decay = True
    model.weight.register_hook(lambda grad: called.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda param: called.append("accumulated"))
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(1, 2)).sum().backward()
    has = hasattr(model.weight, "_no_weight_decay")
    words = ["called" if name in called else "not called" for name in ("gradient", "accumulated")]
    print(f"{what + ':':13} attribute {has}, gradient hook {words[0]}, hook after accumulation {words[1]}")
    return has, *words


plain, sharded = measured("plain", False), measured("fully_shard", True)
unchanged = plain == (True, "called", "called") and sharded == (False, "not called", "not called")
dist.destroy_process_group()
print("unchanged" if unchanged else "CHANGED")
sys.exit(not unchanged)
PYTHON
