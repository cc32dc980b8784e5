"""Where ranks meet, and room for the connections that end in rank 0's process."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lit_fsdp.parallel.contact import ContactWithRanks, _allow_open_files

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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, range(10000, 20000)),
        ({"MASTER_PORT": "31234"}, [31234]),
        ({"STANDALONE_PORT": "31235"}, [31235]),  # Lightning's variable for its own choice
    ],
)
def test_where_further_processes_are_started_the_port_is_chosen_by_us_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: range | list[int]
) -> None:
    for name in ("MASTER_PORT", "STANDALONE_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    os.environ.update(given)
    contact = ContactWithRanks()
    contact.cluster_environment = LightningEnvironment()
    contact.choose_port()
    assert contact.cluster_environment.main_port in expected


def test_a_rank_that_was_started_chooses_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    contact = ContactWithRanks()
    contact.cluster_environment = LightningEnvironment()
    contact.choose_port()
    assert "MASTER_PORT" not in os.environ


def test_lightnings_observer_has_no_children_while_a_failure_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks every 5 s, and kills this process once a child has ended with an error."""
    children = ["one", "two"]
    observed, seen = list(children), []
    contact: Any = ContactWithRanks()
    contact._launcher = SimpleNamespace(procs=observed)
    monkeypatch.setattr("lit_fsdp.parallel.contact.explain_failure", lambda error, store: seen.append(list(observed)))
    contact.explain(RuntimeError("lost"))
    assert seen == [[]]
    assert contact._launcher.procs == children  # for who ends them afterwards
    contact._launcher = None
    contact.explain(RuntimeError("lost"))
    assert seen == [[], []]
