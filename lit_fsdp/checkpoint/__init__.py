"""Checkpoints: written beside their place, described by a manifest, visible only when complete."""
