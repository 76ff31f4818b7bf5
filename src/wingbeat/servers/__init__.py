"""Parameter servers: processes that sum what all workers push, and send it back (no torch)."""
