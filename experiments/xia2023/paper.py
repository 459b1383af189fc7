"""What Xia et al. (arXiv 2203.16487) report, each value with where it was read:
P in the paper or in its authors' code, S in a secondary source.

All speeds are over beam search with 5 beams, batch 1, on one P100, WMT14 EN-DE
unless said. A value that is not here is not known here: its cell stays empty.
"""

SOURCE = 'Xia et al. 2023, EN-DE, one P100, batch 1, speed over beam 5'

# By way: BLEU, tokens per iteration, speed.
MAIN = {
  'blockwise': {'speed': '1.2 to 2.0 (S)'},
  'strict': {'bleu': '26.62 (S)', 'tokens': '6.41 (S)'},
  'top-3 tau 1': {
    'bleu': '26.97 (S)',
    'tokens': '7.89 (S)',
    'speed': '5.1 (S)',
  },
}
# By k: the same.
BLOCK_SIZE = {
  10: {'tokens': '6.05 (S)', 'speed': '3.99 (S)'},
  15: {'tokens': '6.93 (S)', 'speed': '4.54 (S)'},
  20: {'tokens': '7.41 (S)', 'speed': '4.72 (S)'},
  25: {'tokens': '7.89 (S)', 'speed': '5.04 (S)'},
  30: {'tokens': '7.67 (S)', 'speed': '4.82 (S)'},
}
# By drafter: the same, and milliseconds of a draft.
DRAFTERS = {
  'heads': {'tokens': '2.32 (S)', 'draft': '0.81 (S)', 'speed': '1.7 (S)'},
  'without_capability': {
    'tokens': '7.05 (S)',
    'draft': '2.29 (S)',
    'speed': '4.4 (S)',
  },
  'without_latency': {
    'tokens': '8.21 (S)',
    'draft': '10.87 (S)',
    'speed': '4.0 (S)',
  },
  'full': {'tokens': '8.23 (S)', 'draft': '5.21 (S)', 'speed': '5.1 (S)'},
}
VERIFICATION = {
  'strict': {'tokens': '6.41 (S)', 'bleu': '26.62 (S)'},
  'top-3 tau 1': {'tokens': '7.89 (S)', 'bleu': '26.97 (S)'},
  'top-5 tau 5': {'tokens': '11.01 (S)', 'bleu': '26.58 (S)'},
}
# BLEU of an output against the target's own.
BEHAVIOUR = {'top-3 tau 1': {'kept': '86.5 (S)'}}
