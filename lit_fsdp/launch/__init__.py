"""Launching runs: local ranks, SLURM jobs, doctor."""
