"""Monitoring of jobs: workers report, a supervisor collects, `wingbeat top` displays (no torch)."""
