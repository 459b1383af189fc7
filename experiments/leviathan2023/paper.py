"""What Leviathan et al. (https://arxiv.org/abs/2211.17192) report; every value
was read in the paper itself, which the tables mark with P.

Tables 2, 4 and 5: T5-XXL in T5X, batch 1, one TPU v4. Tasks are named as there.
"""

from typing import NamedTuple

TAG = '(P)'
ENDE, CNNDM, LM1B = 'EnDe', 'CNN/DM', 'LM1B'


class Operations(NamedTuple):
  """A row of Table 1."""

  alpha: float
  gamma: int
  operations: float
  speed: float


class Speed(NamedTuple):
  """A row of Tables 2 and 4."""

  task: str
  drafter: str
  temperature: int
  gamma: int
  alpha: float
  expected: float
  empirical: float


TABLE_1 = (
  Operations(0.6, 2, 1.53, 1.96),
  Operations(0.7, 3, 1.58, 2.53),
  Operations(0.8, 2, 1.23, 2.44),
  Operations(0.8, 5, 1.63, 3.69),
  Operations(0.9, 2, 1.11, 2.71),
  Operations(0.9, 10, 1.60, 6.86),
)

# Time of a step over that of T5-XXL.
C = {'T5-small': 0.02, 'T5-base': 0.04, 'T5-large': 0.11}

TABLE_4 = (
  Speed(ENDE, 'T5-small', 0, 7, 0.75, 3.2, 3.4),
  Speed(ENDE, 'T5-base', 0, 7, 0.80, 3.3, 2.8),
  Speed(ENDE, 'T5-large', 0, 7, 0.82, 2.5, 1.7),
  Speed(ENDE, 'T5-small', 1, 7, 0.62, 2.3, 2.6),
  Speed(ENDE, 'T5-base', 1, 5, 0.68, 2.4, 2.4),
  Speed(ENDE, 'T5-large', 1, 3, 0.71, 2.0, 1.4),
  Speed(CNNDM, 'T5-small', 0, 5, 0.65, 2.4, 3.1),
  Speed(CNNDM, 'T5-base', 0, 5, 0.73, 2.6, 3.0),
  Speed(CNNDM, 'T5-large', 0, 3, 0.74, 2.0, 2.2),
  Speed(CNNDM, 'T5-small', 1, 5, 0.53, 1.9, 2.3),
  Speed(CNNDM, 'T5-base', 1, 3, 0.55, 1.8, 2.2),
  Speed(CNNDM, 'T5-large', 1, 3, 0.56, 1.6, 1.7),
)

# By task and drafter: alpha at temperatures 0 and 1.
TABLE_3 = {
  LM1B: {
    'unigram': (0.03, 0.03),
    'bigram': (0.05, 0.05),
    'GPT 6M': (0.88, 0.89),
  },
  ENDE: {
    'unigram': (0.08, 0.07),
    'bigram': (0.20, 0.19),
    'T5-small': (0.75, 0.62),
    'T5-base': (0.80, 0.68),
    'T5-large': (0.82, 0.71),
  },
  CNNDM: {
    'unigram': (0.13, 0.08),
    'bigram': (0.23, 0.16),
    'T5-small': (0.65, 0.53),
    'T5-base': (0.73, 0.55),
    'T5-large': (0.74, 0.56),
  },
}

# LaMDA 137B with top-40 sampling: no model at hand stands beside it.
TABLE_3_LAMDA = {'100M': (0.61, 0.57), '2B': (0.71, 0.71), '8B': (0.75, 0.74)}

LENIENCES = (1.0, 0.5, 0.3, 0.1)
# English to German: alpha at temperature 1 by lenience, and at temperature 0
# under the rule for the argmax.
TABLE_5 = {
  'unigram': (0.07, 0.10, 0.11, 0.16),
  'bigram': (0.19, 0.23, 0.25, 0.32),
  'T5-small': (0.62, 0.71, 0.76, 0.84),
  'T5-base': (0.68, 0.80, 0.83, 0.90),
}
ARGMAX_ALPHA = (0.75, 0.75, 0.80, 0.87)
# Of T5-small, with this c and gamma.
ARGMAX_SPEED = (3.3, 3.3, 3.9, 4.9)
ARGMAX_C, ARGMAX_GAMMA = 0.015, 8

FIGURE_2_GAMMAS = (1, 3, 5, 7, float('inf'))
FIGURE_3_C = (0.01, 0.02, 0.05, 0.1)
FIGURE_4_GAMMAS = (1, 3, 5, 7, 10)
# Of the trace in Figure 1.
FIGURE_1_TOKENS, FIGURE_1_RUNS = 38, 9


def rows_of(task: str, temperature: int) -> list[Speed]:
  """The rows of Tables 2 and 4 for a task."""
  return [
    row for row in TABLE_4 if (row.task, row.temperature) == (task, temperature)
  ]
