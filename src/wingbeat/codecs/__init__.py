"""How gradients are written on the wire: dense, cast, sketched, the largest only, low rank."""

from wingbeat.codecs.codec import Codec as Codec
from wingbeat.codecs.coding import Coding as Coding
from wingbeat.codecs.coding import make as make
