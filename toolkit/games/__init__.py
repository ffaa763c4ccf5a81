"""Games for comparison: controls, the race, statistics."""
