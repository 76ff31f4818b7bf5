"""Hooks on a model and its optimizer, gradients in buckets, and the optimizer's updates."""
