"""Checkpoints of other tools as checkpoints of ours: read without trusting a pickle, matched name by name."""
