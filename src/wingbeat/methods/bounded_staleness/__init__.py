"""Bounded staleness with the gradient exchange index (Canary)."""
