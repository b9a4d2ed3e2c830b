"""Padding changes nothing, greedy decoding says what the scores say, real pairs are aligned."""

import numpy as np
import pytest
import torch

from armillary.workloads import translation
from armillary.workloads.translation import BEGIN, END, PAD


def small_and_model():
    torch.manual_seed(0)
    work = translation.workload(**translation.SMALL)
    return work, work.model().double()


def test_padding_changes_no_score():
    work, model = small_and_model()
    source, target = next(work.batches("train", 0, 1, 0))
    wider = torch.nn.functional.pad(source, (0, 4), value=PAD)
    torch.testing.assert_close(model(source, target), model(wider, target))


def test_a_translation_depends_on_the_whole_source_and_on_no_later_target_word():
    _, model = small_and_model()
    source, target = torch.tensor([[4, 5, 6, END]]), torch.tensor([[BEGIN, 6, 5, 4]])
    for place in range(3):
        other = source.clone()
        other[0, place] = 9
        assert not torch.allclose(model(source, target), model(other, target))
    later = target.clone()
    later[0, 3] = 9
    torch.testing.assert_close(model(source, target)[:, :3], model(source, later)[:, :3])


def test_greedy_words_are_the_likeliest_after_the_words_before_them():
    work, model = small_and_model()
    source, _ = next(work.batches("held_out", 0, 1, 0))
    with torch.no_grad():
        for row, said in zip(source, translation.greedy(model, source), strict=True):
            assert END not in said
            so_far = torch.tensor([[BEGIN, *said]])
            likeliest = model(row[None], so_far).argmax(2)[0].tolist()
            assert likeliest[: len(said)] == said
            assert len(said) == 2 * int((row != PAD).sum()) + 5 or likeliest[len(said)] == END


def test_global_batches_hold_sentences_of_similar_length():
    work = translation.workload(**{**translation.SMALL, "longest": 30})
    spans = [np.ptp((source != PAD).sum(1).numpy()) for source, _ in work.batches("train", 0, 1, 0)]
    assert np.mean(spans) < 1


def test_the_made_up_language_is_the_source_backwards():
    text = translation.reversed_words(words=5, pairs=20, longest=4)
    for source, target in zip(text.train.source, text.train.target, strict=True):
        said = source[source != PAD][:-1].tolist()
        assert target[target != PAD].tolist() == [BEGIN, *reversed(said), END]


def write_help(root, paragraphs):
    (root / "text").mkdir(parents=True)
    (root / "text" / "page.html").write_text(
        "".join(f'<p id="p{i}" class="x">{words}</p>\n' for i, words in paragraphs.items())
    )


@pytest.fixture
def a_help(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "HELP", tmp_path)
    english = {i: f"the <b>cat</b> number{i} &amp; co" for i in range(200)} | {200: "Same", 201: "only here"}
    german = {i: f"die Katze nummer{i}" for i in range(200)} | {200: "Same"}
    write_help(tmp_path / "en-US", english)
    write_help(tmp_path / "de", german)
    return tmp_path


def test_pairs_share_their_paragraph_id_and_are_translated(a_help):
    english, german = (translation.paragraphs(a_help / side) for side in ("en-US", "de"))
    pairs = translation.pairs_of(english, german)
    assert pairs[7] == ("the cat number7 & co", "die Katze nummer7")
    assert len(pairs) == 200


def test_every_fiftieth_pair_is_held_out_and_its_words_are_not_learned(a_help):
    text = translation.libreoffice("de", longest=9, min_count=1, cache=str(a_help / "cache"))
    assert (len(text.train), len(text.held_out)) == (196, 4)
    assert {f"number{i}" for i in (25, 75, 125, 175)}.isdisjoint(text.source_words)
    assert len([word for word in text.target_words if word.startswith("nummer")]) == 196
    again = translation.libreoffice("de", longest=9, min_count=1, cache=str(a_help / "cache"))
    np.testing.assert_array_equal(text.train.source, again.train.source)
    assert text.target_words == again.target_words


def test_a_missing_language_names_the_command_that_installs_it(a_help):
    with pytest.raises(ValueError, match="apt-get install libreoffice-help-en-us libreoffice-help-fr"):
        translation.workload(language="fr", cache=str(a_help / "cache"))


def test_pairs_too_long_are_refused_with_the_option_to_change(a_help):
    with pytest.raises(ValueError, match="raise `longest`"):
        translation.libreoffice("de", longest=2, min_count=1, cache=str(a_help / "cache"))


@pytest.mark.skipif(
    not (translation.HELP / "de" / "text").is_dir(),
    reason="needs real help pages: apt-get install libreoffice-help-en-us libreoffice-help-de",
)
def test_the_real_help_is_parsed_into_tens_of_thousands_of_pairs(tmp_path):
    work = translation.workload(cache=str(tmp_path))
    assert len(work.text.train) > 20_000
    assert {"LibreOffice", "die", "und"} <= set(work.text.target_words)
    unknown = (work.text.train.target == translation.UNKNOWN).sum() / (work.text.train.target != PAD).sum()
    assert unknown < 0.1
