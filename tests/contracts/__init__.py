"""Suites that every implementation of an interface has to pass."""
