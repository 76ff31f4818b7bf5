"""Exact strategies that continue without a replica that has failed."""
