"""What somebody's own function raised, in words: the error, and the line of theirs that it came from."""

import dataclasses
import traceback
from pathlib import Path

import torch

__all__ = ["said_of"]

NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), dataclasses.__file__)


def said_of(error: BaseException) -> str:
    """Who raised what, and where: in the last line that is somebody else's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*NOT_THEIRS, "<"))]
    place = (theirs or frames)[-1]
    first, *more = str(error).split("\n")
    said = f"{place.name} raises {type(error).__name__}: {first} ({place.filename}, line {place.lineno})"
    return "\n".join([said, *more])
