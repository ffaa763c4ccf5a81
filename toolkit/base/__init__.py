"""What every room uses: files, ranks, progress bars."""
