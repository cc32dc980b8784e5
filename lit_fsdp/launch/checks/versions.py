"""Installed versions against the floors of our own package metadata, before any of them is imported.

The metadata is the only list: what ``pyproject.toml`` says is what pip has installed by and what is compared here.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lit_fsdp.launch.checks.row import Row

OWN = "lit-fsdp"
FIRST = ("torch", "lightning")
"""Without these nothing that needs a process group can be looked at."""
# Releases that must never be run, whatever a floor says.
_KNOWN_BAD: Mapping[tuple[str, str], str] = {
    ("lightning", "2.6.2"): "an upload with malicious code",
    ("lightning", "2.6.3"): "an upload with malicious code",
}


@dataclass(frozen=True)
class Installed:
    """What is installed, as far as package metadata tell."""

    python: str
    requires_python: str | None
    """``None``: our own package has no metadata, as in a checkout that was never installed."""
    requires: tuple[str, ...]
    """Requirements of our own package, as its metadata write them."""
    find: Callable[[str], str | None]
    """Version of a package by its name; ``None``: not installed."""


def installed() -> Installed:
    """The facts of this interpreter."""
    try:
        own = importlib.metadata.distribution(OWN)
    except importlib.metadata.PackageNotFoundError:
        return Installed(platform.python_version(), None, (), find_version)
    needs_python = (own.metadata.get_all("Requires-Python") or [">=3"])[0]
    return Installed(platform.python_version(), needs_python, tuple(own.requires or ()), find_version)


def find_version(name: str) -> str | None:
    """Version of an installed package, or ``None``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_versions(found: Installed, extras: Sequence[str] = ()) -> list[Row]:
    """A row for Python and for each package that a run imports.

    Args:
        found: Facts.
        extras: Optional groups that the recipe needs.
    """
    try:
        import packaging.version
    except ImportError:
        fix = "python -m pip install packaging"
        return [Row("packaging", "not installed, so that no version can be compared", "bad", fix)]
    if found.requires_python is None:
        fix = "python -m pip install -e . in the checkout"
        missing = [Row(name, "not installed", "bad", fix) for name in FIRST if found.find(name) is None]
        own = Row(OWN, "not installed, so that its floors are not known", "warning", fix)
        return [Row("Python", found.python), own, *missing, *_known_bad(found)]
    rows = [_compare("Python", found.python, found.requires_python)]
    rows.append(Row(OWN, found.find(OWN) or "not installed"))
    for name, floor, extra in _requirements(found.requires, extras):
        version = found.find(name)
        fix = f'python -m pip install "{OWN}[{extra}]"' if extra else f'python -m pip install "{name}{floor}"'
        if version is None:
            why = f", which the recipe needs ({extra})" if extra else ""
            rows.append(Row(name, f"not installed{why}", "bad", fix))
        elif (name, version) not in _KNOWN_BAD:
            try:
                rows.append(_compare(name, version, floor))
            except packaging.version.InvalidVersion:
                text = f"{version}, which cannot be compared with {floor or 'anything'}"
                rows.append(Row(name, text, "warning", fix))
    return [*rows, *_known_bad(found)]


def lacks_torch(rows: Sequence[Row]) -> bool:
    """Whether a package without which nothing else can be looked at is missing or too old."""
    return any(row.grade == "bad" and row.name in (*FIRST, "Python", "packaging") for row in rows)


def compare_nodes(versions: Mapping[str, Mapping[str, str | None]]) -> Row:
    """One row on whether all nodes have the same versions.

    Args:
        versions: By node, then by package.
    """
    names = dict.fromkeys(name for found in versions.values() for name in found)
    different = []
    for name in names:
        by_version: dict[str, list[str]] = {}
        for node, found in sorted(versions.items()):
            by_version.setdefault(found.get(name) or "none", []).append(node)
        if len(by_version) > 1:
            different.append(f"{name}: " + ", ".join(f"{v} on {' '.join(nodes)}" for v, nodes in by_version.items()))
    if different:
        fix = "install into one folder that all nodes see, and start its Python on all of them"
        return Row("versions of the nodes", "; ".join(different), "bad", fix)
    return Row("versions of the nodes", f"the same on {len(versions)} nodes ({', '.join(names)})")


def _requirements(lines: Sequence[str], extras: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(name, specifier, extra or empty) of what holds here; a package is named once."""
    from packaging.requirements import Requirement

    seen: set[str] = set()
    for line in lines:
        need = Requirement(line)
        for extra in ("", *extras):
            if need.name not in seen and (need.marker is None or need.marker.evaluate({"extra": extra})):
                seen.add(need.name)
                yield need.name, str(need.specifier), extra if need.marker is not None else ""


def _compare(name: str, version: str, floor: str) -> Row:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    allowed, has = SpecifierSet(floor), Version(version)
    if allowed.contains(has, prereleases=True):
        return Row(name, f"{version} ({floor})" if floor else version)
    if allowed.contains(Version(has.base_version), prereleases=True):
        return Row(name, f"{version}, a build from before the release ({floor})", "warning", f"install {name} {floor}")
    fix = f"use a Python {floor}" if name == "Python" else f'python -m pip install "{name}{floor}"'
    return Row(name, f"{version}; allowed: {floor}", "bad", fix)


def _known_bad(found: Installed) -> list[Row]:
    return [
        Row(
            name,
            f"{version}: {what}",
            "bad",
            f"python -m pip uninstall {name}, change every password and token that this machine has held, and install "
            "another release",
        )
        for (name, version), what in _KNOWN_BAD.items()
        if found.find(name) == version
    ]
