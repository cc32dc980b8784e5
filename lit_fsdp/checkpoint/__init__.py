"""Checkpoints: written under a hidden name, described by a manifest, visible only when complete."""
