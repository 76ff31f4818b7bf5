"""Watching a job: workers report, a process collects, `wingbeat top` looks (no torch)."""
