"""The columns that ride on the headers of a round of look-ups where tables prefetch: what a sender tells each rank.

Columns 0 and 1 are of an idle sender: bits of the predicted look-ups it has made in this batch, and of those of the
next batch for which it sent rows that moved since. Then come, of a batch to come, bits of the look-ups the sender
predicts, how many bytes of rows they bring, and how many rows of the receiver each will want. So counts need no message
of their own. Every number is float64: exact for integers below 2**53.
"""

__all__ = [
    "BITS",
    "BYTES",
    "FIRST_COUNT",
    "MADE",
    "MOVED",
    "PREDICTED",
    "announcement_bytes",
    "announcement_columns",
    "most_of_each",
]

MADE, MOVED = 0, 1
BITS, BYTES = 2, 3
FIRST_COUNT = 4
PREDICTED = 52  # look-ups of a batch that may be predicted: their bits travel in one float64


def most_of_each(tables: int) -> int:
    """How many look-ups of each of so many tables may be predicted in one batch."""
    return min(4, PREDICTED // max(1, tables))


def announcement_columns(tables: int) -> int:
    """Numbers for each rank, where so many tables prefetch."""
    return FIRST_COUNT + min(tables, PREDICTED) * most_of_each(tables) if tables else 0


def announcement_bytes(tables: int) -> int:
    """The same on every header."""
    return 8 * announcement_columns(tables)
