"""BLEU, ROUGE and exact matches against figures worked out by hand."""

import math

import pytest

from specdec_jax.infer import quality


def test_bleu_by_hand():
  """Four of five words match, as do three, two and one of the longer n-grams;
  the prediction is shorter by one word of six."""
  pytest.importorskip('sacrebleu')
  targets = ['the cat sat on the mat']
  predictions = ['the cat sat on mats']
  precisions = [4 / 5, 3 / 4, 2 / 3, 1 / 2]
  expected = 100 * math.exp(1 - 6 / 5) * math.prod(precisions) ** 0.25
  assert quality.bleu(targets, predictions)['bleu'] == pytest.approx(expected)
  assert quality.bleu(targets, targets)['bleu'] == pytest.approx(100)


def test_bleu_separates_punctuation():
  pytest.importorskip('sacrebleu')
  spaced = quality.bleu(['a b c d .'], ['a b c d.'])
  assert spaced['bleu'] == pytest.approx(100)


def test_rouge_by_hand():
  """Stems count; F1 of unigrams, bigrams, and of the longest subsequence."""
  pytest.importorskip('rouge_score')
  figures = quality.rouge(['dogs bark loudly'], ['dog barks'])
  assert figures['rouge1'] == pytest.approx(100 * 2 * (2 / 5))
  assert figures['rouge2'] == pytest.approx(100 * 2 * (1 / 3))
  assert figures['rougeLsum'] == pytest.approx(100 * 2 * (2 / 5))
  halves = quality.rouge(['dogs bark', 'cats'], ['dog barks', 'birds'])
  assert halves['rouge1'] == pytest.approx(50)


def test_rouge_lsum_goes_by_sentences():
  """Swapped sentences share no long subsequence, but all of each sentence."""
  pytest.importorskip('rouge_score')
  figures = quality.rouge(['a b c . d e f .'], ['d e f . a b c .'])
  assert figures['rougeLsum'] == pytest.approx(100)


def test_exact_match():
  figures = quality.exact_match(['a', 'b', 'c', 'd'], ['a', 'x', 'c', ''])
  assert figures == {'exact_match': 50}


@pytest.mark.parametrize('metric_fn', quality.METRICS.values())
@pytest.mark.parametrize(('num_targets', 'num'), [(0, 0), (2, 1)])
def test_what_cannot_be_compared(metric_fn, num_targets, num):
  with pytest.raises(ValueError, match=f'{num_targets} targets and {num} pred'):
    metric_fn(['a'] * num_targets, ['a'] * num)
