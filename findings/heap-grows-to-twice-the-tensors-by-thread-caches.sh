#!/usr/bin/env bash
# torch 2.15.0 (CPU, two threads) on glibc 2.36; run on 2026-11-29.
#
# On a CPU, torch allocates each tensor with posix_memalign, and frees it to glibc's heap. glibc serves an aligned
# request of n bytes from a chunk of about n + 96 bytes and frees the rest, pieces of at most 96 bytes. The cache of each
# thread (tcache) and the fast bins keep such pieces for small requests, and a chunk beside a kept piece is not merged
# with it. So a freed tensor is too small, by these bytes, for the next tensor of the same size, and the heap grows
# although most of it is free: in a plain stack of recomputed blocks at 4,096 positions to more than twice what is in
# use. Without both (glibc.malloc.tcache_count=0, glibc.malloc.mxfast=0) freed tensors are reused. glibc 2.39 merges the
# pieces (sourceware.org bug 30723); the releases of Debian 12, Ubuntu 22.04 and RHEL 9 are older.
#
# Seen (30 gated feed-forward blocks, width 576, frozen; after the third forward pass, and the peak of the process):
#   default: heap of 1090 MiB with 419 MiB in use, peak 1967 MiB
#   no fast bins: heap of 946 MiB with 419 MiB in use, peak 1967 MiB
#   no cache of the thread: heap of 838 MiB with 419 MiB in use, peak 1778 MiB
#   neither: heap of 574 MiB with 419 MiB in use, peak 1619 MiB
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy
cd "$folder"
cat > measure.py <<'PYTHON'
import ctypes

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(2)


class Heap(ctypes.Structure):
    """mallinfo2 of glibc 2.33 and newer."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(576, 1536), nn.Linear(576, 1536), nn.Linear(1536, 576)

    def forward(self, x):
        y = nn.functional.rms_norm(x, (576,))
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
blocks = nn.ModuleList(Block() for _ in range(30)).requires_grad_(False)
large = torch.empty(12 << 20)
del large  # from here on, glibc serves up to 32 MiB from its heap, as in any program that has freed a large tensor
for _ in range(3):
    x = torch.zeros(1, 4096, 576, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    heap = libc.mallinfo2()
    x.sum().backward()
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
print(heap.arena >> 20, heap.uordblks >> 20, peak >> 10)
PYTHON
declare -A heaps
measure() { # NAME [TUNABLES]
  local found
  read -ra found <<< "$(GLIBC_TUNABLES="${2-}" venv/bin/python -W ignore measure.py)"
  heaps[$1]=${found[0]}
  echo "$1: heap of ${found[0]} MiB with ${found[1]} MiB in use, peak ${found[2]} MiB"
}
measure default
measure "no fast bins" glibc.malloc.mxfast=0
measure "no cache of the thread" glibc.malloc.tcache_count=0
measure neither glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0
if ((2 * heaps[default] > 3 * heaps[neither])); then
  echo unchanged
else
  echo "torch or glibc behaves otherwise now"
  exit 1
fi
