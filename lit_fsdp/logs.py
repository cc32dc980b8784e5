"""Logging of commands on standard error."""

import logging
import sys
import warnings
from typing import Any

from lit_fsdp.host import is_first_process
from lit_fsdp.redaction import redact


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the present ``sys.stderr``, which a progress bar replaces while it is open."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Redact the message here: the bar wraps lines before they reach the redacting stream."""
        return redact(super().format(record))


def setup_logging() -> None:
    """Log our messages to standard error from the first process, warnings from all, and only warnings of Lightning."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("lit_fsdp")
    own.addHandler(handler)
    own.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of trainer.profiler
    # it appears on every login node; several tasks without srun are already an error here
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # torch >= 2.12 deprecates a check of lightning 2.6: delete when the minimum lightning no longer uses it
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")


def quiet_imports() -> None:
    """Suppress messages of torchao and bitsandbytes on a CPU; transformers and peft import them if installed."""
    # bitsandbytes >= 0.50 looks for an optional kernel on the Hub when it is imported
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # a CPU build of torch cannot load its GPU kernels, and torch >= 2.13 warns about its unregistered enums:
    # delete when importing torchao >= 0.19 logs neither
    logging.getLogger("torchao").addFilter(lambda record: not _is_about_a_gpu(record.getMessage()))
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())


def _is_about_a_gpu(text: str) -> bool:
    return text.startswith("Failed to load") and ".so" in text and sys.modules["torch"].version.cuda is None
