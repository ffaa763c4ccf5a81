"""What the rooms above it use: files, ranks, worker processes, progress bars."""
