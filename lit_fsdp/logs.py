"""What a command says on standard error."""

from __future__ import annotations

import logging
import sys
import warnings

from lit_fsdp.host import is_first_process


def setup_logging() -> None:
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


def quiet_imports() -> None:
    """Leave out what torchao, which transformers imports wherever it is installed, says about itself on a CPU."""
    # its kernels for GPUs cannot be loaded by a CPU build of torch, and torch >= 2.13 takes its enums unregistered:
    # delete when importing torchao >= 0.19 says neither
    logging.getLogger("torchao").addFilter(lambda record: not _is_about_a_gpu(record.getMessage()))
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())


def _is_about_a_gpu(text: str) -> bool:
    return text.startswith("Failed to load") and ".so" in text and sys.modules["torch"].version.cuda is None
