"""The language model's laws: sampled softmax estimates the full one, training lowers the loss."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from armillary.workloads import language_model as lm
from armillary.workloads import shares


def a_model(vocabulary=30, width=6):
    torch.manual_seed(0)
    model = lm.SampledSoftmaxLSTM(vocabulary, width, hidden=7).double()
    torch.nn.init.normal_(model.bias)
    words, targets = torch.randint(0, vocabulary, (2, 3, 4))
    full = F.linear(model.hidden(words), model.output, model.bias).detach()  # (positions, vocabulary)
    return model, words, targets, full


def test_every_word_a_negative_with_expected_count_one_is_the_full_softmax(monkeypatch):
    model, words, targets, full = a_model()
    monkeypatch.setattr(lm, "expected_counts", lambda ids, count, vocabulary: torch.ones(len(ids)).double())
    scores = model(words, targets, torch.arange(30))
    torch.testing.assert_close(scores.logsumexp(1), full.logsumexp(1))
    torch.testing.assert_close(scores[:, 0], full.gather(1, targets.flatten()[:, None])[:, 0])


def test_the_sampled_partition_sum_has_the_full_one_as_its_mean():
    model, words, targets, full = a_model()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        draws = [model(words, targets, lm.log_uniform(40, 30, rng)).exp().sum(1) for _ in range(4000)]
    draws = torch.stack(draws)
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - full.exp().sum(1)).abs() < 5 * error).all()
    assert (error < 0.02 * full.exp().sum(1)).all(), "the law is only tested if the noise is small"


def test_more_negatives_bring_the_loss_to_the_full_softmax():
    model, words, targets, full = a_model()
    exact = F.cross_entropy(full, targets.flatten(), reduction="none")
    with torch.no_grad():
        scores = model(words, targets, lm.log_uniform(200_000, 30, np.random.default_rng(1)))
    sampled = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long), reduction="none")
    torch.testing.assert_close(sampled, exact, rtol=0, atol=0.02)


def test_draws_follow_the_expected_counts_and_those_sum_to_the_draws():
    ids = torch.arange(50)
    expected = lm.expected_counts(ids, 100_000, 50)
    assert expected.sum().item() == pytest.approx(100_000)
    seen = torch.bincount(lm.log_uniform(100_000, 50, np.random.default_rng(2)), minlength=50)
    assert ((seen - expected).abs() < 5 * expected.sqrt()).all()


def test_a_negative_that_hits_the_target_counts_for_nothing():
    model, words, targets, _ = a_model()
    scores = model(words, targets, torch.tensor([int(targets[0, 0]), 29, 28]))
    assert scores[0, 1] == -math.inf
    assert torch.isfinite(scores[0, [0]]).all()


def test_evaluation_is_the_full_softmax_in_whatever_chunks(monkeypatch):
    work = lm.workload(**lm.SMALL)
    model = work.model()
    batch = next(work.batches("held_out", 0, 1, 0))
    with torch.no_grad():
        whole = work.evaluate(model, batch)
        monkeypatch.setattr(lm, "POSITIONS", 3)
        chunked = work.evaluate(model, batch)
        full = F.linear(model.hidden(batch[0]), model.output, model.bias)
    assert chunked == pytest.approx(whole)
    assert whole["nll"] == pytest.approx(F.cross_entropy(full, batch[1].flatten(), reduction="sum").item())


def test_targets_are_the_next_words_and_each_held_out_word_is_a_target_once():
    work = lm.workload(**lm.SMALL)
    batches = list(work.batches("held_out", 0, 1, 0))
    windows = torch.cat([batch[0] for batch in batches])
    in_reading_order = np.argsort(shares.shuffled(len(windows), seed=0))
    words = windows[in_reading_order].flatten().numpy()
    targets = torch.cat([batch[1] for batch in batches])[in_reading_order].flatten().numpy()
    text = work.text.held_out
    np.testing.assert_array_equal(words, text[: len(words)])
    np.testing.assert_array_equal(targets, text[1 : len(targets) + 1])
    assert len(text) - 1 - len(targets) < work.length


def test_the_first_held_out_batches_are_from_all_over_the_text_whatever_the_seed():
    work = lm.workload(**lm.SMALL)
    first, again = (next(work.batches("held_out", 0, 1, seed))[0].numpy() for seed in (0, 1))
    np.testing.assert_array_equal(first, again)
    rows = work.text.held_out[: len(first) * work.length].reshape(first.shape)
    assert not np.array_equal(first, rows)


def test_training_lands_between_the_unigram_and_the_bigram_model():
    torch.manual_seed(0)
    work = lm.workload(**{**lm.SMALL, "width": 16, "hidden": 32, "learning_rate": 0.5, "negatives": 60})
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for batch in work.batches("train", 0, 1, seed=0):
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
    totals = {"nll": 0.0, "words": 0.0}
    with torch.no_grad():
        for batch in work.batches("held_out", 0, 1, 0):
            for name, value in work.evaluate(model, batch).items():
                totals[name] += value
    shares = np.bincount(work.text.train, minlength=60) / len(work.text.train)
    unigram = -np.log(np.maximum(shares[work.text.held_out], 1e-4)).mean()
    reached = work.report(totals)["nats_per_word"]
    assert reached < unigram - 0.3
    assert reached > work.baseline()["nats_per_word"] - 0.1, "the text is a chain of pairs: nothing beats bigrams"


def test_negatives_are_a_workers_own_and_new_at_every_step():
    work = lm.workload(**lm.SMALL)
    drawn = [batch[2] for worker in (0, 1) for batch in itertools.islice(work.batches("train", worker, 2, 0), 3)]
    assert len({tuple(negatives.tolist()) for negatives in drawn}) == 6


@pytest.mark.parametrize("field", ["width", "negatives", "steps", "batch_size"])
def test_nonsense_options_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        lm.workload(**{**lm.SMALL, field: 0})
