"""A running simulation feeds training: `Writer` in the solver, `Stream` and windows in training, `serve` for answers.

Names are imported when they are asked for: a solver that imports the writer needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.feeds.server import Server, serve
    from armillary.feeds.stream import Stream
    from armillary.feeds.windows import AllOnce, Latest, Reservoir
    from armillary.feeds.writer import Writer

__all__ = ["AllOnce", "Latest", "Reservoir", "Server", "Stream", "Writer", "serve"]

_FILES = {
    "AllOnce": "windows",
    "Latest": "windows",
    "Reservoir": "windows",
    "Server": "server",
    "Stream": "stream",
    "Writer": "writer",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'armillary.feeds' has no attribute {name!r}")
    return getattr(import_module(f"armillary.feeds.{_FILES[name]}"), name)
