"""A rank of ``doctor`` that is killed, or stops for ever, in its second all-reduce: run in place of the real one."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from lit_fsdp.commands import doctor_rank


def main() -> int:
    """As the real rank, with the fault that ``DOCTOR_FAULT`` names."""
    import torch.distributed as dist

    from lit_fsdp.launch import bandwidth

    real, calls = bandwidth._all_reduce, []

    def faulty(device: Any, elements: int) -> Any:
        calls.append(elements)
        if len(calls) == 2 and dist.get_rank() == 1:
            if os.environ["DOCTOR_FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return real(device, elements)

    bandwidth._all_reduce = faulty
    return doctor_rank.main()


if __name__ == "__main__":
    sys.exit(main())
