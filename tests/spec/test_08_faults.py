"""A kill costs what was not yet saved and nothing else; damage is seen before anything is loaded; a signal saves."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.dist.forks import command, server
from tests.spec.running import RECIPE, checkpoint, fit, logged, run

KILLS = """
import os, signal
import lightning.pytorch as L
from lit_fsdp import host

class Kills(L.Callback):
    \"\"\"Ends the last rank inside of the second save.\"\"\"
    def on_save_checkpoint(self, trainer, module, state):
        if trainer.global_step == 4 and host.global_rank() == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_a_save(reference: Path, tmp_path: Path) -> None:
    Path("kills.py").write_text(KILLS)
    flags = ("--allow-imports", "kills", "--trainer.callbacks+=kills.Kills")
    words = ("fit", *RECIPE, "--trainer.default_root_dir", tmp_path / "run", *flags)
    other, killed = command(2, words, tmp_path)
    assert (killed.code, other.code in (1, 76)) == (-signal.SIGKILL, True), other.output
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))] == ["step-00000002"]
    run("ckpt", "verify", tmp_path / "run")
    assert "resumed from step 2" in fit(tmp_path / "run", "--ckpt_path", "last")
    assert logged(tmp_path / "run") == logged(reference)


def test_a_flipped_bit(stopped: Path) -> None:
    largest = max(checkpoint(stopped, 2).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-100] ^= 1
    largest.write_bytes(content)
    assert largest.name in "".join(run("ckpt", "verify", checkpoint(stopped, 2), code=1))
    assert largest.name in fit(stopped, "--ckpt_path", "last", code=1)


def test_a_signal_saves(reference: Path, tmp_path: Path) -> None:
    """To all ranks, as a scheduler sends it."""
    folder = tmp_path / "run"
    words = ("fit", *RECIPE, "--trainer.default_root_dir", folder, "--checkpoint.every_steps", "1000")
    endless = ("--trainer.max_steps", "2000", "--trainer.limit_val_batches", "0")
    job = server().start("program", 2, words=[*words, *endless], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.csv").is_file() or len(logged(folder)) < 2:
        assert time.monotonic() < deadline, job.output(0)
        time.sleep(0.1)
    job.kill(number=signal.SIGTERM)
    outcomes = job.wait(120)
    assert (outcomes[0].code, outcomes[1].code in (0, 75)) == (75, True), outcomes[0].output
    steps = len(logged(folder))
    assert checkpoint(folder, steps).is_dir(), outcomes[0].output
    assert dict(list(logged(folder).items())[:6]) == dict(list(logged(reference).items())[:steps])
