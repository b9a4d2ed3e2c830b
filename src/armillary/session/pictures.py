"""Whether pictures can be drawn here: matplotlib is an extra of its own, and its absence costs a picture and no run."""

import warnings
from importlib.util import find_spec
from pathlib import Path

__all__ = ["can_draw"]


def can_draw(picture: Path) -> bool:
    """Where it cannot be drawn, a warning says what to install."""
    if find_spec("matplotlib") is not None:
        return True
    warnings.warn(f"{picture} is not drawn: matplotlib is not installed; pip install 'armillary[plot]'", stacklevel=3)
    return False
