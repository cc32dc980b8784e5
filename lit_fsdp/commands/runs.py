"""Short runs of ``fit`` in separate processes, for verbs that compare runs."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.signals import EXIT_STOPPED


def quiet_flags(changes: Mapping[str, Any]) -> list[str]:
    """Flags that disable validation, checkpoints and the progress bar, plus ``changes`` of ``trainer``."""
    quiet = {"enable_checkpointing": "false", "enable_progress_bar": "false", "limit_val_batches": 0}
    return [f"--trainer.{name}={value}" for name, value in {**quiet, **changes}.items()]


def run_fit(folder: Path, words: Sequence[str]) -> str:
    """Run ``fit`` with ``folder`` as run folder and its log in log.txt; return the final error, or an empty string.

    SIGTERM and Ctrl-C end both this process and the run.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lit_fsdp", "fit", *words, f"--trainer.default_root_dir={folder}"]
    with (folder / "log.txt").open("w+", encoding="utf-8", errors="replace") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode  # noqa: S603
        log.seek(0)
        text = log.read()
    last = text[text.rfind("error: ") :] if "error: " in text else text[-2000:]
    return f"exit code {code}: {last.strip()}" if code else ""
