"""Thin verbs: each parses its arguments and calls one function of the library."""
