"""What a run that goes on from a checkpoint does about damage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """The ``resume`` section: how far a checkpoint is trusted, and whether an older one may take its place."""

    verify: bool = True
    """Compare the hash of every file with the manifest before anything is loaded; false compares sizes only."""
    fallback: bool = False
    """Where last or best is damaged, say so and go on from the newest (next best) sound one instead of stopping."""
