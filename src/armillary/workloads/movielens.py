"""MovieLens data sets as GroupLens hands them out: ratings, and what is told of users and films beside them.

Three layouts are read, told apart by the name of the file with the ratings. GroupLens allows research use but no
redistribution, so the files are the user's: https://grouplens.org/datasets/movielens.

Source: Harper & Konstan, The MovieLens Datasets, 2015.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Movielens", "Row", "files_of", "read_movielens"]

Row = Sequence[str]

GENRES = (  # the flags of u.item, in order
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
YEAR = re.compile(r"\((\d{4})\)\s*$")


@dataclass(frozen=True)
class Movielens:
    """
    Args of note:
        ratings: (user, item, stars, seconds since the epoch) each.
        users: id -> (id, age, gender, occupation, zip). items: id -> (id, title, year, genres with blanks between).
            What nobody told is missing, or "".
    """

    ratings: list[Row]
    users: Mapping[str, Row]
    items: Mapping[str, Row]


class _Beside(NamedTuple):
    """A file beside the ratings: how its lines are told as rows. fields: a line has at least so many."""

    name: str
    mark: str
    fields: int
    told: Callable[[Row], Row]


class _Layout(NamedTuple):
    """mark: between the fields of a rating. users: None where nothing is told of them."""

    mark: str
    has_heading: bool
    users: _Beside | None
    items: _Beside


def _flagged(row: Row) -> Row:
    genres = [name for name, flag in zip(GENRES, row[5:], strict=False) if flag == "1"]
    return (row[0], row[1], _year(row[1]), " ".join(genres))


def _listed(row: Row) -> Row:
    genres = "" if row[2].startswith("(") else row[2].replace("|", " ")
    return (row[0], row[1], _year(row[1]), genres)


def _year(title: str) -> str:
    found = YEAR.search(title)
    return found[1] if found else ""


LAYOUTS: Mapping[str, _Layout] = MappingProxyType(
    {
        "u.data": _Layout(
            "\t", False,
            _Beside("u.user", "|", 5, lambda row: row),
            _Beside("u.item", "|", 5 + len(GENRES), _flagged),
        ),
        "ratings.dat": _Layout(
            "::", False,
            _Beside("users.dat", "::", 5, lambda row: (row[0], row[2], row[1], row[3], row[4])),
            _Beside("movies.dat", "::", 3, _listed),
        ),
        "ratings.csv": _Layout(",", True, None, _Beside("movies.csv", ",", 3, _listed)),
    }
)  # fmt: skip


def files_of(path: Path) -> list[Path]:
    """The file with the ratings and those beside it that are there, given itself or its folder.

    Raises:
        ValueError: there is none.
    """
    names = ", ".join(LAYOUTS)
    if not path.exists():
        raise ValueError(f"recommender: no file or folder {path}; pass the path of MovieLens ratings ({names})")
    found = [path / name for name in LAYOUTS if (path / name).is_file()] if path.is_dir() else [path]
    if len(found) != 1 or found[0].name not in LAYOUTS:
        those = f"holds {len(found)} of" if path.is_dir() else "is none of"
        raise ValueError(f"recommender: {path} {those} {names}; pass one of these files of MovieLens, or its folder")
    layout = LAYOUTS[found[0].name]
    beside = [found[0].parent / one.name for one in (layout.users, layout.items) if one is not None]
    return [*found, *(file for file in beside if file.is_file())]


def read_movielens(files: Sequence[Path]) -> Movielens:
    """
    Args:
        files: of `files_of`.

    Raises:
        ValueError: a line is not what the file's name says; the message quotes it.
    """
    first, *beside = files
    layout = LAYOUTS[first.name]
    users, items = (_told(one, beside, layout.has_heading) for one in (layout.users, layout.items))
    ratings = [_rating(row, number, first) for number, row in _rows(first, layout.mark, layout.has_heading)]
    if not ratings:
        raise ValueError(f"recommender: {first} holds no rating; pass a whole file of MovieLens")
    return Movielens(ratings, users, items)


def _rows(file: Path, mark: str, has_heading: bool) -> Sequence[tuple[int, Row]]:
    """Its lines in fields, numbered from 1; the heading and empty lines are left out."""
    try:
        lines = file.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError:
        lines = file.read_bytes().decode("latin-1").splitlines()  # the older sets
    rows = csv.reader(lines) if mark == "," else (line.split(mark) for line in lines)
    numbered = [(number, row) for number, row in enumerate(rows, 1) if any(cell.strip() for cell in row)]
    return numbered[1:] if has_heading else numbered


def _rating(row: Row, number: int, file: Path) -> Row:
    try:
        user, item, stars, seconds = row
        is_rating = int(user) >= 0 and int(item) >= 0 and 0 < float(stars) <= 5 and float(seconds) >= 0
    except ValueError:
        is_rating = False
    if not is_rating:
        raise ValueError(
            f"recommender: line {number} of {file} reads {LAYOUTS[file.name].mark.join(row)[:60]!r}; want user, item, "
            f"stars up to 5 and seconds, as in MovieLens' {file.name}"
        )
    return row


def _told(one: _Beside | None, files: Sequence[Path], has_heading: bool) -> Mapping[str, Row]:
    """By id, what a file beside the ratings tells; nothing where it is not among those there."""
    found: dict[str, Row] = {}
    for file in files:
        if one is None or file.name != one.name:
            continue
        for number, row in _rows(file, one.mark, has_heading):
            if len(row) < one.fields:
                raise ValueError(
                    f"recommender: line {number} of {file} has {len(row)} fields, want {one.fields}; take the file "
                    "away, or put MovieLens' own there"
                )
            found[row[0]] = one.told(row)
    return found
