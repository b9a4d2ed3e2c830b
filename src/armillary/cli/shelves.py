"""Names of the methods that come with the package, by shelf, read off the source: a file registers one of its name.

The shelves themselves (`facts/registry`) import torch, which takes a second that no refusal of a name should wait for.
"""

from armillary.cli.sources import aliases_in, modules_with

__all__ = ["EDGES_ONLY", "aliases", "codecs", "exchanges", "schedules"]

PACKAGES = ("armillary.schedules", "armillary.codecs", "armillary.exchanges")

EDGES_ONLY = ("aq_sgd", "same")  # what an edge may be besides a codec (`schedules/edge`)


def schedules() -> tuple[str, ...]:
    return modules_with("armillary.schedules", r"^SCHEDULES\.register\(")


def codecs() -> tuple[str, ...]:
    return modules_with("armillary.codecs", r"^@codec\(")


def exchanges() -> tuple[str, ...]:
    """Dense ones and those of rows; a codec is a dense exchange too."""
    own = modules_with("armillary.exchanges", r"^@(dense|row)_exchange\(")
    return tuple(sorted({*own, *codecs()}))


def aliases() -> tuple[str, ...]:
    """Other names of all of these."""
    return tuple(sorted(name for package in PACKAGES for name in aliases_in(package)))
