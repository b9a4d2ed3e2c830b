"""A text becomes the same ids every time, and what is not a text is refused in one clear line."""

import gzip
import threading

import numpy as np
import pytest

from armillary.workloads import text as corpus

LINES = "".join(f"the {'big ' * (i % 3)}cat number{i} sat\n\n\n" for i in range(400))


def loaded(path, cache, min_count=2):
    return corpus.load(str(path), min_count, str(cache))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(LINES)
    return path


def test_ids_are_ranked_by_frequency_and_rare_words_are_unknown(text_file, tmp_path):
    found = loaded(text_file, tmp_path / "cache")
    counts = np.bincount(found.train, minlength=len(found.words))
    assert found.words[:2] == ("<unk>", "\n")
    assert set(found.words[2:]) == {"the", "cat", "sat", "big"}
    assert (np.diff(counts[2:]) <= 0).all()
    assert counts[corpus.UNKNOWN] == counts[corpus.END_OF_LINE], "one new number a line, one end a line"


def test_the_ids_spell_the_text(text_file, tmp_path):
    found = loaded(text_file, tmp_path / "cache", min_count=1)
    spelled = [found.words[i] for i in np.concatenate([found.train, found.held_out])]
    assert sorted(set(spelled) - {"<unk>"}) == sorted(set(corpus.tokens(LINES)) & set(found.words))
    assert len(spelled) == len(corpus.tokens(LINES))


def test_held_out_lines_are_not_trained_on(text_file, tmp_path):
    found = loaded(text_file, tmp_path / "cache", min_count=1)
    numbers = {word for word in found.words if word.startswith("number")}
    trained = {found.words[i] for i in found.train}
    assert len(numbers) < 400 and numbers <= trained
    assert (found.held_out == corpus.UNKNOWN).sum() == 400 - len(numbers), "each held-out number is new"


def test_many_files_are_held_out_whole(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(100):
        (folder / f"{i:03}.txt").write_text(f"file{i} file{i}\n" * 3)
    (folder / "picture.bin").write_bytes(b"\0\1\2" * 100)
    (folder / ".hidden").write_text("secret " * 99)
    found = loaded(folder, tmp_path / "cache", min_count=1)
    assert "secret" not in found.words
    assert {word for word in found.words if word.startswith("file")} == {
        f"file{i}" for i in range(100) if i not in (25, 75)
    }
    assert len(found.held_out) == 2 * 9


def test_plain_and_gzip_read_alike(text_file, tmp_path):
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(LINES.encode()))
    one, other = loaded(text_file, tmp_path / "cache"), loaded(packed, tmp_path / "cache")
    np.testing.assert_array_equal(one.train, other.train)
    assert one.words == other.words


def test_a_second_reading_comes_from_the_cache_and_a_changed_text_does_not(text_file, tmp_path, monkeypatch):
    first = loaded(text_file, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "documents", lambda *_: pytest.fail("read again"))
        again = loaded(text_file, tmp_path / "cache")
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.held_out, again.held_out)
    assert first.words == again.words
    text_file.write_text(LINES.replace("cat", "horse"))
    assert "horse" in loaded(text_file, tmp_path / "cache").words


def test_readers_who_start_at_once_read_the_text_once(text_file, tmp_path, monkeypatch):
    reads = []
    slow = corpus.documents
    monkeypatch.setattr(corpus, "documents", lambda *args: reads.append(1) or slow(*args))
    found = []
    threads = [threading.Thread(target=lambda: found.append(loaded(text_file, tmp_path / "cache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(reads) == 1
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix not in (".npz", "")]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"\0\1" * 50, "binary"),
        (bytes(range(128, 256)) * 9, "binary"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, content, complaint):
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        loaded(path, tmp_path / "cache")
    assert str(path) in str(caught.value)


def test_missing_empty_short_and_falsely_packed_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        loaded(tmp_path / "nowhere", tmp_path / "cache")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="without files"):
        loaded(tmp_path / "bare", tmp_path / "cache")
    (tmp_path / "short.txt").write_text("only one line")
    with pytest.raises(ValueError, match="pass more text"):
        loaded(tmp_path / "short.txt", tmp_path / "cache")
    (tmp_path / "false.gz").write_text("plain")
    with pytest.raises(ValueError, match="not the gzip file"):
        loaded(tmp_path / "false.gz", tmp_path / "cache")


def test_a_packed_text_that_is_damaged_is_refused(tmp_path):
    packed = bytearray(gzip.compress(LINES.encode()))
    packed[20] ^= 0xFF
    (tmp_path / "damaged.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=r"damaged\.gz is not the gzip file its name says"):
        loaded(tmp_path / "damaged.gz", tmp_path / "cache")


def test_the_standard_library_is_the_default_text():
    files = corpus.stdlib_files()
    assert len(files) > corpus.HELD_OUT_EVERY
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
