"""Who applies the optimizer, to what, and when: to all at once, later, or to this worker's part."""
