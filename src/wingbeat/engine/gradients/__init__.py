"""Gradient buckets: buffers, order, encoding."""
