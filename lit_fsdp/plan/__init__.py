"""Predict the memory of a run from a simulated step, and calculate the time of a step."""
