"""Measuring what a plan needs to know: backward times per layer, links, codecs."""
