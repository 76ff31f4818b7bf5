"""Plans, and what they cost: curves, probes, merge plans, tuning, drift."""
