"""What a run would need, by a simulated step, and how long a step takes, by arithmetic."""
