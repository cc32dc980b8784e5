"""Freed memory of a training on CPUs is kept for the next tensors, and given back every so many steps."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lit_fsdp.parallel.kept_memory import STEPS
from tests.dist.workers import Workers

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to keep memory")
PAGES = 40 * 2**20 // resource.getpagesize()
ALONE = """
import ctypes, resource, sys
from lit_fsdp.parallel.kept_memory import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which a block would need few
kept = len(sys.argv) > 1 and keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(40 * 2**20)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_a_training_keeps_it(workers: Workers, tiny_model: Path, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32"}
    for found in workers.run("memory_after_training", 2, folder=str(tiny_model), strategy=strategy, steps=2 * STEPS + 1):
        assert found["given_back"] == 2
        assert found["faults"] < 3 * PAGES  # of five blocks at most one


@pytest.mark.parametrize(
    ("words", "env", "kept"),
    [
        (["keep"], {}, True),
        ([], {}, False),
        (["keep"], {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        (["keep"], {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_only_where_it_was_asked_for_and_the_user_has_not_chosen(words: list[str], env: dict[str, str], kept: bool):
    done = subprocess.run([sys.executable, "-c", ALONE, *words], env=env, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert said == str(kept)
    assert (int(faults) < 3 * PAGES) is kept
