"""Bags hold their rating's features; what is missing is named with the command that fetches it."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.workloads import ratings, recommender


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
    with pytest.raises(ValueError, match="no data 'netflix'"):
        recommender.workload(data="netflix")


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
