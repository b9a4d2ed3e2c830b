"""The bigram yardstick is a probability distribution and counts what was there."""

import numpy as np
import pytest

from armillary.workloads import text as bigram


@pytest.fixture(params=[1, 2, 3])
def text(request):
    rng = np.random.default_rng(request.param)
    return (rng.random(200) ** 2 * 9).astype(np.int32)  # words 0..8 of a vocabulary of 12


def test_the_probabilities_of_all_next_words_sum_to_one(text):
    model = bigram.count(text, 12)
    for previous in range(12):  # 9, 10, 11 were never seen
        every = probabilities_after(model, previous)
        assert every.sum() == pytest.approx(1)
        assert (every > 0).all()


def test_they_agree_with_interpolated_kneser_ney_by_plain_loops(text):
    model = bigram.count(text, 12)
    pairs = list(zip(text[:-1].tolist(), text[1:].tolist(), strict=True))
    kinds = set(pairs)

    def discount(counts):
        once, twice = counts.count(1), counts.count(2)
        return once / (once + 2 * twice) if once and twice else 0.5

    upper = discount([pairs.count(kind) for kind in kinds])
    histories = [sum(after == word for _, after in kinds) for word in range(12)]
    lower = discount(histories)
    kept = [max(count - lower, 0) for count in histories]
    fallback = [(k + (sum(histories) - sum(kept)) / 12) / sum(histories) for k in kept]
    for previous in range(12):
        seen = sum(before == previous for before, _ in pairs)
        followers = sum(before == previous for before, _ in kinds)
        for word, found in enumerate(probabilities_after(model, previous)):
            if seen == 0:
                wanted = fallback[word]
            else:
                own = max(pairs.count((previous, word)) - upper, 0) / seen
                wanted = own + upper * followers / seen * fallback[word]
            assert found == pytest.approx(wanted, rel=1e-12)


def test_a_text_that_repeats_itself_is_hardly_surprising():
    circle = np.tile(np.arange(5, dtype=np.int32), 200)
    noise = np.random.default_rng(0).integers(0, 5, 1000).astype(np.int32)
    assert bigram.cross_entropy(circle, circle, 5) < 0.05
    assert bigram.cross_entropy(noise, noise[::-1], 5) == pytest.approx(np.log(5), abs=0.1)


def probabilities_after(model, previous):
    return bigram.probabilities(model, np.full(12, previous), np.arange(12))
