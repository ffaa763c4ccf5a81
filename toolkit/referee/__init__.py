"""What a referee's process uses.  It has the standard library alone, and so has this room."""
