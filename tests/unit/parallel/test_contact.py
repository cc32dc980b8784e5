"""Room for the connections that end in rank 0's process."""

from __future__ import annotations

import resource

import pytest

from lit_fsdp.parallel.contact import _allow_open_files

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "needed", "soft"),
    [
        ((1024, 4096), 2000, 2000),
        ((1024, 4096), 9000, 4096),  # as far as it may
        ((1024, INFINITY), 9000, 9000),
        ((65536, 65536), 2000, None),
        ((INFINITY, INFINITY), 2000, None),
    ],
)
def test_the_limit_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], needed: int, soft: int | None
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: told.append(values))
    _allow_open_files(needed)
    assert told == ([] if soft is None else [(soft, limits[1])])
