"""How training under a plan may differ from training in one process: a word each, with one sentence.

A group of a plan lists the words that are true of it; none means exact. Methods state their own words in their registry
entries, so nobody else judges a method by its name. What departs is never taken by price.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

__all__ = ["DEPARTURES", "EXACT", "checked"]

EXACT = "as in one process"

DEPARTURES: Mapping[str, str] = MappingProxyType(
    {
        "stale": "NOT exact: gradients are taken at weights at most one step old",
        "lazy": "NOT exact: rows without gradient stay put, though the optimizer may have moved them",
        "lossy": "NOT exact: what crosses is rounded or thinned",
        "uncoupled": "NOT exact: stages learn from losses of their own instead of the next one's gradient",
        "local": "NOT exact: replicas train alone between their meetings",
        "event": "NOT exact: replicas send only what has changed enough",
        "async": "NOT exact: nobody waits for the others; a log can replay what happened",
    }
)


def checked(words: Iterable[str]) -> tuple[str, ...]:
    """The words in the registry's order, each once.

    Raises:
        ValueError: a word that is none of `DEPARTURES`.
    """
    given = set(words)
    if strange := sorted(given - DEPARTURES.keys()):
        raise ValueError(f"departures: {', '.join(strange)} unknown; want some of {', '.join(DEPARTURES)}")
    return tuple(word for word in DEPARTURES if word in given)
