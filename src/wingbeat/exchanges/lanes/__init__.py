"""Reliable multipath streams between workers: ordered, over all interfaces, around cut paths."""
