"""Counting: memory and rates."""
