"""Bounded staleness, traced by the gradient exchange index: Canary's core, without torch or I/O."""
