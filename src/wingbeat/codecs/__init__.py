"""Codecs encode gradients for the links: dense, half precision, sketch, top-k and low rank."""

from wingbeat.codecs.codec import Codec as Codec
from wingbeat.codecs.coding import Coding as Coding
from wingbeat.codecs.coding import make as make
