"""How numbers are written on the wire: registry.py is the contract, then one file a codec.

What the file of a codec imports stands here.
"""

from armillary.codecs.packing import (
    BLOCK,
    Tiles,
    all_finite,
    as_bytes,
    chunks_of,
    from_bytes,
    packed,
    packed_bytes,
    scale_bytes,
    tiled,
    unpacked,
    within,
    working,
)
from armillary.codecs.registry import CODECS, Codec, CodecEntry, Draw, build_codec, codec, codec_of
from armillary.codecs.rows import RowCode, row_code

__all__ = [
    "BLOCK",
    "CODECS",
    "Codec",
    "CodecEntry",
    "Draw",
    "RowCode",
    "Tiles",
    "all_finite",
    "as_bytes",
    "build_codec",
    "chunks_of",
    "codec",
    "codec_of",
    "from_bytes",
    "packed",
    "packed_bytes",
    "row_code",
    "scale_bytes",
    "tiled",
    "unpacked",
    "within",
    "working",
]
