"""How good predictions are: BLEU and ROUGE.

Each metric has SeqIO's signature, `(targets, predictions)` of texts to figures
by name, so that SeqIO tasks carry them, and needs SeqIO for nothing. Both are
in percent, with T5's settings
(https://github.com/google-research/text-to-text-transfer-transformer).
"""

import re
from collections.abc import Mapping, Sequence

from specdec_jax.files.require import require
from specdec_jax.text.tasks import MetricFn

Figures = dict[str, float]
_ROUGE = ('rouge1', 'rouge2', 'rougeLsum')


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> Figures:
  """Computes corpus BLEU by sacrebleu, with international tokenisation, as
  `bleu`. ValueError if there are no texts, or not as many of both."""
  _check(targets, predictions)
  sacrebleu = require('sacrebleu', extra='eval', purpose='BLEU')
  score = sacrebleu.corpus_bleu(
    list(predictions),
    [list(targets)],
    smooth_method='exp',
    tokenize='intl',
    use_effective_order=False,
  )
  return {'bleu': float(score.score)}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> Figures:
  """Computes ROUGE-1, -2 and -Lsum by rouge-score: means of F1 with stems, as
  `rouge1`, `rouge2` and `rougeLsum`. Raises as `bleu`."""
  # T5 reports the median of bootstrap samples of the mean, which is random;
  # this is the mean, which that estimates.
  _check(targets, predictions)
  rouge_scorer = require(
    'rouge_score.rouge_scorer', extra='eval', purpose='ROUGE'
  )
  scorer = rouge_scorer.RougeScorer(list(_ROUGE), use_stemmer=True)
  totals = dict.fromkeys(_ROUGE, 0.0)
  # ROUGE-Lsum needs one sentence per line; they are split as in T5.
  lines = lambda text: re.sub(r' \. ', ' .\n', text)
  for target, prediction in zip(targets, predictions, strict=True):
    scores = scorer.score(lines(target), lines(prediction))
    for name in _ROUGE:
      totals[name] += scores[name].fmeasure
  return {name: 100 * total / len(targets) for name, total in totals.items()}


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> Figures:
  """Computes the percentage of exact predictions; raises as `bleu`."""
  _check(targets, predictions)
  hits = sum(a == b for a, b in zip(targets, predictions, strict=True))
  return {'exact_match': 100 * hits / len(targets)}


METRICS: Mapping[str, MetricFn] = {
  'bleu': bleu,
  'rouge': rouge,
  'exact_match': exact_match,
}


def _check(targets: Sequence[str], predictions: Sequence[str]) -> None:
  if len(targets) != len(predictions) or not targets:
    raise ValueError(
      f'{len(targets)} targets and {len(predictions)} predictions cannot be '
      'compared'
    )
