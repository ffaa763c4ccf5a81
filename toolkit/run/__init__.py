"""A training run: its folder, what is watched, its result and its page."""
