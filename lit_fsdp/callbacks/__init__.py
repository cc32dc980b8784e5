"""Callbacks: checkpoints, signals, the audit, throughput, the progress bar, predictions."""
