"""Models: what this machine can hold, where they come from, adapters."""
