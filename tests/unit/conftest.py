"""What every unit test gets: one thread, as tests run two at a time and their tensors are small."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # imported by the module that is about to be tested, or not needed
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
