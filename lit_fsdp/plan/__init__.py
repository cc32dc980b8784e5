"""What a run would need and cost, by arithmetic."""
