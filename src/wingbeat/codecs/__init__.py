"""Codecs: how gradients are encoded on the links: dense, cast, sketched, top-k, low rank."""

from wingbeat.codecs.codec import Codec as Codec
from wingbeat.codecs.coding import Coding as Coding
from wingbeat.codecs.coding import make as make
