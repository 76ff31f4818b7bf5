"""What gradients travel as: their own dtype, a narrower one, or what a codec makes of them."""

from wingbeat.wires.codecs import BY_NAME as BY_NAME
from wingbeat.wires.codecs import DTYPES as DTYPES
from wingbeat.wires.codecs import LEVELS as LEVELS
from wingbeat.wires.codecs import MOST_BITS as MOST_BITS
from wingbeat.wires.codecs import SPLITS as SPLITS
from wingbeat.wires.codecs import CodecPart as CodecPart
from wingbeat.wires.codecs import Coded as Coded
from wingbeat.wires.codecs import Groups as Groups
from wingbeat.wires.codecs import Half as Half
from wingbeat.wires.codecs import LowRank as LowRank
from wingbeat.wires.codecs import Sketch as Sketch
from wingbeat.wires.codecs import TopK as TopK
from wingbeat.wires.codecs import Wire as Wire
from wingbeat.wires.codecs import from_json as from_json
from wingbeat.wires.codecs import of as of
from wingbeat.wires.codecs import pairs as pairs
from wingbeat.wires.codecs import read_groups as read_groups
from wingbeat.wires.codecs import spelled as spelled
from wingbeat.wires.codecs import to_json as to_json
from wingbeat.wires.parameters import HALF_BYTES as HALF_BYTES
from wingbeat.wires.parameters import INDEX_BYTES as INDEX_BYTES
from wingbeat.wires.parameters import kinds as kinds
from wingbeat.wires.parameters import least_bytes as least_bytes
from wingbeat.wires.parameters import own as own
from wingbeat.wires.parameters import unmatched as unmatched
