"""Ports for tests."""

from __future__ import annotations

import os

from lit_fsdp.host import free_port


def own_port() -> int:
    """A free port that no other process of this test run chooses, however long it takes until somebody listens."""
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return next(port for port in iter(free_port, None) if port % count == index % count)
