"""Updates: whole, deferred, or divided."""
