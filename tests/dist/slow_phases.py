"""``lit-fsdp`` with one phase of a run made slow, so that a signal can fall into it; a file says that it has begun.

``SLOW_PHASE=imports python slow_phases.py fit ...``; a script, because Lightning starts further ranks with the same
words.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = float(os.environ.get("SLOW_SECONDS") or 1.5)
"""At most; less once a file says ``go``."""


def begin() -> None:
    Path(f"{os.environ['SLOW_PHASE']}-{os.environ.get('LOCAL_RANK', '0')}").touch()
    end, go = time.monotonic() + SECONDS, Path(f"{os.environ['SLOW_PHASE']}-go")
    while time.monotonic() < end and not go.exists():  # a signal must not cut it short
        time.sleep(0.05)


class Imports:
    """The first import of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            begin()


def slow(phase: str) -> None:
    """Make it say that it has begun on this rank, and wait before it goes on."""
    from lit_fsdp import datamodule, module
    from lit_fsdp.checkpoint import files as disk
    from lit_fsdp.parallel import base

    places: dict[str, tuple[Any, str]] = {
        "rows": (datamodule.CausalLMDataModule, "prepare"),
        "step": (module.CausalLMModule, "training_step"),  # every forward
        "setup": (base.EngineStrategy, "_check_optimized"),
        "validation": (module.CausalLMModule, "on_validation_epoch_end"),
        "test": (module.CausalLMModule, "on_test_epoch_end"),
        "save": (disk, "publish"),
    }
    if phase == "exit":
        atexit.register(begin)
        return
    place, name = places[phase]
    fast = getattr(place, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        begin()
        return fast(*args, **kwargs)

    setattr(place, name, slowed)


def main() -> int:
    phase = os.environ["SLOW_PHASE"]
    if phase == "imports":
        sys.meta_path.insert(0, Imports())  # type: ignore[arg-type]
    elif phase != "none":
        slow(phase)
    from lit_fsdp.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
