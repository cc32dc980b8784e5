"""A run that is out of memory ends with its error and with what would take less, on the rank that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.forks import command
from tests.dist.test_command_line import SMOKE

_CALLBACK = """
import resource
import torch
from lightning.pytorch import Callback

class Short(Callback):
    def __init__(self, rank: int, how: str):
        self.rank, self.how = rank, how

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step < 1 or trainer.global_rank != self.rank:
            return
        if self.how == "raise":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, resource.RLIM_INFINITY))
        torch.ones(2**33)
"""


CASES = ((2, 1, "raise", "Tried to allocate 2.00 GiB"), (1, 0, "limit", "can't allocate memory"))


@pytest.mark.parametrize(("ranks", "bad", "how", "error"), CASES, ids=("one of two ranks", "a limited process"))
def test_the_rank_that_failed_says_what_takes_less(tmp_path: Path, ranks: int, bad: int, how: str, error: str) -> None:
    (tmp_path / "short.py").write_text(_CALLBACK)
    callback = f"[{{class_path: short.Short, init_args: {{rank: {bad}, how: {how}}}}}]"
    words = ["fit", *SMOKE, "--allow-imports", "short", "--trainer.callbacks", callback]
    words += [f"--trainer.devices={ranks}", "--data.micro_batch_size=2", f"--trainer.default_root_dir={how}"]
    outcomes = command(ranks, words, tmp_path)
    failed = outcomes[bad]
    assert failed.code == 1, failed.output
    before, headline, after = failed.err.partition("Each of these by itself takes less")
    assert error in before
    assert headline not in after
    assert f"accumulates over {4 // ranks}: the same global batch  --data.micro_batch_size 1" in after
    assert "--model.lora.target_modules all-linear" in after
    if ranks > 1:
        assert outcomes[0].code not in (0, None)
        assert headline not in outcomes[0].output
