"""What a run or an audit found, for people to read."""
