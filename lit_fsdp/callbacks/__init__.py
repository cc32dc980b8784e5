"""What happens around the steps: checkpoints, signals, the audit, throughput, the progress bar, predictions."""
