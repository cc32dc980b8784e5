"""The processes of both sides of a comparison, with the same environment and threads."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import ROOT, together
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
    lines = [[sys.executable, str(_HERE / script), *words] for script, *words in commands]
    together(
        [[str(out) if word == "OUT" else word for word in line] for line in lines],
        [{**env, **{name: str(value) for name, value in place.items()}} for place in places],
        _LIMIT_SECONDS,
    )
    return {"launched": launched, **json.loads(out.read_text())}
