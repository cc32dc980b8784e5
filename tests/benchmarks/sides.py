"""The processes of both sides of a comparison, with the same environment and threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import ROOT
from workload import Workload

from lit_fsdp.host import free_port

_HERE = Path(__file__).parent
_LIMIT_SECONDS = 1800


def fit(work: Workload, ranks: int) -> dict[str, Any]:
    """``lit-fsdp fit`` on the workload's recipe, in a run folder of its own."""
    return fit_recipe(work.folder / "recipe.yaml", ranks)


def fit_recipe(recipe: Path, ranks: int, *flags: str) -> dict[str, Any]:
    """``lit-fsdp fit`` on a recipe, in a run folder of its own beside it."""
    run = Path(tempfile.mkdtemp(prefix="run-", dir=recipe.parent))
    words = ["timed_fit.py", "OUT", "fit", "--config", str(recipe), "--trainer.default_root_dir", str(run), *flags]
    try:
        return _record([words], [{}], recipe.parent, ranks)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def peer_trainer(folder: Path, side: str) -> dict[str, Any]:
    """TRL or the Transformers Trainer, on one process."""
    return _record([["train_peer.py", str(folder), "OUT", side]], [{}], folder, 1)


def hand_written(work: Workload, ranks: int) -> dict[str, Any]:
    """The loop without Lightning; each rank is started here."""
    place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    words = ["hand_written.py", str(work.folder), "OUT"]
    return _record([words] * ranks, [{"RANK": rank, **place} for rank in range(ranks)], work.folder, ranks)


def lightning_script(work: Workload, ranks: int) -> dict[str, Any]:
    """The minimal Lightning script."""
    return _record([["minimal_lightning.py", str(work.folder), "OUT", str(ranks)]], [{}], work.folder, ranks)


def _record(commands: list[list[str]], places: list[dict[str, Any]], folder: Path, ranks: int) -> dict[str, Any]:
    """Run the processes of one side and return what they wrote, with the time of their launch."""
    out = folder / "record.json"
    out.unlink(missing_ok=True)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    env = {
        **os.environ,
        "OMP_NUM_THREADS": threads,  # Lightning would set the same for its own processes only
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    launched = time.time()
    processes = []
    for (script, *words), place in zip(commands, places, strict=True):
        command = [sys.executable, str(_HERE / script), *(str(out) if word == "OUT" else word for word in words)]
        full = {**env, **{name: str(value) for name, value in place.items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=full, cwd=ROOT, start_new_session=True, **pipes))
    try:
        said = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks it has started
    if any(process.returncode for process in processes) or not out.is_file():
        raise RuntimeError(f"{commands[0][0]} failed:\n" + "\n".join(text[-4000:] for text in said))
    return {"launched": launched, **json.loads(out.read_text())}
