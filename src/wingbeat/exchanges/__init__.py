"""Exchanges: what an operation on a bucket transfers over the links."""
