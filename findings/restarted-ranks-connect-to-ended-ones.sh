#!/usr/bin/env bash
# torch 2.15.0 (CPU, gloo); run on 2026-12-01.
#
# After a rank was killed, the command `torchrun --max-restarts 1` starts all ranks again, but about half of the
# restarted runs fail before their first collective: "Gloo connectFullMesh failed with … Connection refused". The
# restarted ranks use the store of torchrun, which still has the addresses of the ranks that have ended, under the same
# keys. A rank that reads a key before the other one has replaced it connects to a port on which nobody listens. Which
# rank is first is a matter of luck. torch used to prefix the keys with the number of restarts. That prefix was removed,
# with the comment that each restart has a new store, but a c10d rendezvous keeps its store.
#
# With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, rank 0 opens a store of its own after each
# restart, and all runs finish. https://github.com/pytorch/pytorch/issues/135712 describes the same with NCCL.
#
# Seen (runs that finish after their restart):
#   store of torchrun:  4 of 8
#   store of rank 0:    8 of 8
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy
cd "$folder"
cat >job.py <<'PYTHON'
import datetime
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
ones = torch.ones(1)
dist.all_reduce(ones)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones)
dist.destroy_process_group()
PYTHON
finished() {
  local count=0
  for _ in 1 2 3 4 5 6 7 8; do
    if OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$1 timeout 120 venv/bin/python -m torch.distributed.run \
      --standalone --nproc-per-node 2 --max-restarts 1 job.py 2>log; then
      count=$((count + 1))
    fi
  done
  echo "$count"
}
shared=$(finished 0)
echo "store of torchrun:  $shared of 8"
own=$(finished 1)
echo "store of rank 0:    $own of 8"
if [ "$shared" -lt 8 ] && [ "$own" -eq 8 ]; then
  echo "unchanged"
else
  echo "it behaves otherwise now"
  exit 1
fi
