"""Bags hold their rating's features; what is missing is named with the command that fetches it."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.workloads import ratings, recommender
from armillary.workloads import ratings as movielens


def test_features_hold_each_attribute_and_its_crosses():
    bags = ratings.features(
        ["7", "9", "4", "881250949"],
        ["7", "24", "M", "writer", "85711"],
        ["9", "Some Film", "1994", "Drama War"],
    )
    assert bags[0] == ["user 7", "age 2", "gender M", "job writer", "zip 85"]
    assert bags[1] == ["item 9", "year 1994", "decade 199", "genre Drama", "genre War"]
    assert {"user 7 x genre Drama", "user 7 x genre War", "item 9 x age 2", "user 7 x hour 15"} <= set(bags[2])


def test_chosen_ratings_keep_their_bags_in_any_order():
    data = ratings.latent_factors(users=9, items=8, ratings=50, rows=1000)
    chosen = np.array([31, 4, 4, 49])
    ids, offsets = data.bags(chosen)
    ends = [*offsets[1:], len(ids)]
    found = [ids[start:end].tolist() for start, end in zip(offsets, ends, strict=True)]
    wanted = [
        data.ids[data.starts[3 * i + bag] : data.starts[3 * i + bag + 1]].tolist() for i in chosen for bag in range(3)
    ]
    assert found == wanted
    assert {len(bag) for bag in wanted} == {1, 2}, "bags of unequal length, or the test shows little"


def test_of_whom_nothing_is_told_there_are_the_ids_and_the_time():
    bags = ratings.features(["7", "9", "4.5", "881250949"], ["7"], ["9"])
    assert bags[0] == ["user 7"] and bags[1] == ["item 9"]
    assert {one.split(" x ")[1].split()[0] for one in bags[2]} == {"hour", "day"}


MARKS = {"u.data": ("\t", []), "ratings.dat": ("::", []), "ratings.csv": (",", ["userId,movieId,rating,timestamp"])}
NUMBERS = range(1, 21)


def movielens_files(folder, name, count=300):
    """The same ratings as each of GroupLens' sets writes them, with what it tells of users and films."""
    rated = [(1 + i % 30, 1 + (i * 7) % 20, 1 + i % 5, 881250949 + 3600 * i) for i in range(count)]
    flags = "|".join("1" if genre in (8, 18) else "0" for genre in range(19))  # Drama, Western
    mark, heading = MARKS[name]
    beside = {
        "u.data": {
            "u.user": [f"{i}|{20 + i}|F|writer|12345" for i in range(1, 31)],
            "u.item": [f"{i}|Amélie (19{60 + i})|01-Jan-1995||http://x|{flags}" for i in NUMBERS],
        },
        "ratings.dat": {
            "users.dat": [f"{i}::F::{20 + i}::writer::12345" for i in range(1, 31)],
            "movies.dat": [f"{i}::Amélie (19{60 + i})::Drama|Western" for i in NUMBERS],
        },
        "ratings.csv": {
            "movies.csv": [
                "movieId,title,genres",
                *(f'{i},"Amélie, a (19{60 + i})",Drama|Western' for i in NUMBERS),
            ],
        },
    }[name]
    folder.mkdir(exist_ok=True)
    for file, lines in {name: [*heading, *(mark.join(map(str, row)) for row in rated)], **beside}.items():
        (folder / file).write_bytes(("\n".join(lines) + "\n").encode("latin-1" if name != "ratings.csv" else "utf-8"))
    return folder, rated


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv"])
def test_every_layout_of_movielens_is_read_with_what_stands_beside(tmp_path, name):
    folder, rated = movielens_files(tmp_path / "ml", name)
    whole = movielens.read_movielens(movielens.files_of(folder))
    assert [(int(u), int(i), int(stars), int(t)) for u, i, stars, t in whole.ratings] == rated
    assert list(whole.items["3"][2:]) == ["1963", "Drama Western"]
    assert list(whole.users.get("3", ())) == ([] if name == "ratings.csv" else ["3", "23", "F", "writer", "12345"])
    work = recommender.workload(data=str(folder), cache=str(tmp_path), rows=500, batch_size=16)
    assert sorted(work.ratings.stars.tolist()) == sorted(float(stars) for _, _, stars, _ in rated)
    (folder / ("u.item" if name == "u.data" else "movies" + name[-4:])).unlink()
    bare = recommender.workload(data=str(folder / name), cache=str(tmp_path), rows=500, batch_size=16)
    assert len(bare.ratings.ids) < len(work.ratings.ids) and next(bare.batches("train", 0, 1, 0))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1\t2\t3\t4", "nonsense"], r"line 2 of .*u.data reads 'nonsense'; want user, item, stars up to 5"),
        (["1\t2\tmany\t4"], r"line 1 of .*u.data reads '1\\t2\\tmany\\t4'"),
        (["1\t2\t6\t4"], r"line 1 of .*u.data"),
        ([], r"u.data holds no rating"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_the_line(tmp_path, lines, said):
    (tmp_path / "u.data").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=said):
        recommender.workload(data=str(tmp_path / "u.data"), cache=str(tmp_path))


def test_a_folder_must_hold_one_set_and_what_stands_beside_must_be_whole(tmp_path):
    with pytest.raises(ValueError, match=r"holds 0 of u.data, ratings.dat, ratings.csv; pass one"):
        movielens.files_of(tmp_path)
    folder, _ = movielens_files(tmp_path, "u.data")
    (folder / "u.user").write_text("1|20\n")
    with pytest.raises(ValueError, match=r"line 1 of .*u.user has 2 fields, want 5; take the file away"):
        movielens.read_movielens(movielens.files_of(folder))
    movielens_files(tmp_path, "ratings.csv")
    with pytest.raises(ValueError, match=r"holds 2 of u.data"):
        movielens.files_of(folder)
    (tmp_path / "mine.txt").write_text("1")
    with pytest.raises(ValueError, match=r"mine.txt is none of u.data"):
        movielens.files_of(tmp_path / "mine.txt")


def test_the_model_sums_rows_bag_by_bag():
    torch.manual_seed(0)
    model = recommender.WideAndDeep(rows=20, width=3, hidden=4, mean=3.5).double()
    torch.nn.init.normal_(model.wide.weight)
    ids, offsets = torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([0, 2, 3, 4, 5, 6])
    bags = [[1, 2], [3], [4], [5], [6], [7]]
    deep = torch.stack([model.deep.weight[bag].sum(0) for bag in bags]).view(2, 9)
    wide = torch.stack([model.wide.weight[bag].sum() for bag in bags]).view(2, 3).sum(1)
    wanted = model.head(model.perceptron(deep)).squeeze(1) + wide
    torch.testing.assert_close(model(ids, offsets), wanted)


def test_the_baseline_is_damped_averages_by_plain_loops():
    work = recommender.workload(**recommender.SMALL)
    data, cut = work.ratings, work.held_out
    rows = list(zip(data.users.tolist(), data.items.tolist(), data.stars.tolist(), strict=True))
    mean = sum(stars for _, _, stars in rows[cut:]) / len(rows[cut:])

    def deviation(which, key, guess):
        mine = [row[2] - guess(row) for row in rows[cut:] if row[which] == key]
        return sum(mine) / (len(mine) + recommender.DAMPING)

    items = {key: deviation(1, key, lambda row: mean) for key in {row[1] for row in rows}}
    users = {key: deviation(0, key, lambda row: mean + items[row[1]]) for key in {row[0] for row in rows}}
    errors = [min(5, max(1, mean + items[i] + users[u])) - stars for u, i, stars in rows[:cut]]
    wanted = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    assert work.baseline()["root_mean_squared_error"] == pytest.approx(wanted, rel=1e-6)


def fake_wheel(folder):
    users = [f"{i}\t{20 + i}\tF\tjob\t12345" for i in range(30)]
    items = [f"{i}\tTitle\t19{60 + i}\tDrama" for i in range(20)]
    inter = [f"{i % 30}\t{(i * 7) % 20}\t{1 + i % 5}\t{881250949 + 3600 * i}" for i in range(300)]
    with zipfile.ZipFile(folder / ratings.WHEEL, "w") as archive:
        for kind, rows in (("user", users), ("item", items), ("inter", inter)):
            archive.writestr(f"{ratings.FOLDER}.{kind}", "\n".join(["heading", *rows]) + "\n")


def test_the_wheel_is_read_as_it_is_and_the_same_each_time(tmp_path):
    fake_wheel(tmp_path)
    first, again = (ratings.movielens(str(tmp_path), rows=500) for _ in range(2))
    assert sorted(first.stars.tolist()) == sorted([1.0 + i % 5 for i in range(300)])
    assert set(zip(first.users.tolist(), first.items.tolist(), strict=True)) == {
        (i % 30, (i * 7) % 20) for i in range(300)
    }
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.ids.min() >= 0 and first.ids.max() < 500
    batch = next(recommender.workload(cache=str(tmp_path), rows=500, batch_size=16).batches("train", 0, 1, 0))
    assert len(batch[1]) == 16 * ratings.BAGS and batch[2].dtype == torch.float32


def test_a_missing_wheel_names_the_command_that_fetches_it(tmp_path):
    with pytest.raises(ValueError, match=r"pip download --no-deps -d .* recbole==1\.2\.1"):
        recommender.workload(cache=str(tmp_path))
    with pytest.raises(ValueError, match=r"no file or folder netflix; pass the path of MovieLens ratings \(u\.data, "):
        recommender.workload(data="netflix", cache=str(tmp_path))


@pytest.mark.skipif(
    not Path(".cache", ratings.WHEEL).is_file(),
    reason="needs the real ratings: pip download --no-deps -d .cache recbole==1.2.1",
)
def test_the_real_ratings_fill_a_wide_table_thinly():
    work = recommender.workload()
    assert len(work.ratings.stars) == 100_000
    ids, _, _ = next(work.batches("train", 0, 1, 0))
    assert len(ids.unique()) < 0.01 * work.rows < 0.2 * len(np.unique(work.ratings.ids))
    assert 0.8 < work.baseline()["root_mean_squared_error"] < 1.0
