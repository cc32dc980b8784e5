"""What a command says on standard error."""

from __future__ import annotations

import logging
import warnings

from lit_fsdp.host import is_first_process


def speak() -> None:
    """Show our own log lines on standard error, from the first process; warnings from all; less of Lightning's."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("lit_fsdp")
    own.addHandler(handler)
    own.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # on every login node; several tasks without srun are an error of ours
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # torch >= 2.12 deprecates a check that lightning 2.6 makes: delete when the minimum of lightning no longer does
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
