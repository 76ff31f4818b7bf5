"""Ako: partial gradient exchange, a baseline of the Canary paper."""

from wingbeat_lab.ako.options import Partial

__all__ = ["Partial"]
