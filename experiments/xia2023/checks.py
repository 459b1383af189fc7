"""What SpecDec promises, checked on the whole split: counts of violations."""

import functools
import math
from typing import Any

import jax
import numpy as np

from experiments import common
from experiments.report import Cells
from experiments.xia2023 import ways
from experiments.xia2023.ways import Pair
from specdec_jax.assembly import running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.recording import Record
from specdec_jax.assembly.rules import TopBeta
from specdec_jax.base import Context, Prompt
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.text.prompts import Batch

# The cached and the teacher-forced pass round differently; a token this close
# to a limit, in nats, is not held against a rule.
TOLERANCE = 1e-3
_NUM_CUTS = 4
RELAXED = {'top-3 tau 1': (3, 1.0), 'top-5 tau 3': (5, 3.0)}


def checks(pair: Pair, name: str, gamma: int, batch_size: int) -> list[Cells]:
  """Strict and beta 1 against greedy decoding, and relaxed rules by teacher
  forcing."""
  table = _strict_is_greedy(pair, name, gamma, batch_size)
  for rule, (beta, tau) in RELAXED.items():
    rows, corrections = _traced(pair, name, gamma, rule, batch_size)
    outside = wrong = 0
    for start in range(0, len(rows), batch_size):
      part = slice(start, start + batch_size)
      forced = _teacher_forced(pair, part, rows[part], batch_size)
      for ids, log_probs, places in zip(
        rows[part], forced, corrections[part], strict=False
      ):
        outside += _outside(ids, log_probs, beta, tau)
        wrong += sum(
          log_probs[i - 1].max() - log_probs[i - 1, ids[i]] > TOLERANCE
          for i in places
        )
    num_tokens = sum(len(ids) - 1 for ids in rows)
    num_corrections = sum(map(len, corrections))
    table += [
      _row(f'{rule}: within beta and tau', len(rows), num_tokens, outside),
      _row(f'{rule}: correction is top-1', len(rows), num_corrections, wrong),
    ]
  return table


def right_by_position(
  pair: Pair, made: Decoder, texts: list[list[int]], batch_size: int
) -> list[float]:
  """Returns how often a drafter's guess is the text's token, by position; the
  texts have a start token, and each is cut at `_NUM_CUTS` places."""

  @jax.jit
  def draft(prompt: Prompt, context: Context) -> jax.Array:
    own = made.params.drafter
    keys = jax.random.split(jax.random.key(0), batch_size)
    state = made.drafter.init(own, prompt, pair.max_len)
    guesses, _ = made.drafter.propose(own, keys, context, state)
    return guesses.tokens

  random = np.random.default_rng(0)
  gamma = made.drafter.gamma
  right, asked = np.zeros(gamma), np.zeros(gamma)
  batches = common.batches(pair.layout, pair.rows, batch_size)
  for i, (prompt, part) in enumerate(batches):
    tokens = np.zeros((batch_size, pair.max_len + gamma), np.int32)
    ends = np.ones(batch_size, int)
    for row, ids in enumerate(texts[i * batch_size :][: len(part)]):
      tokens[row, : len(ids)], ends[row] = ids, len(ids)
    for _ in range(_NUM_CUTS):
      # Between the start token and the end: of 1 + 3 tokens, after 1, 2 or 3.
      cuts = 1 + np.floor(random.random(batch_size) * (ends - 1)).astype(int)
      lengths, known = cuts.astype(np.int32), tokens[:, : pair.max_len]
      guesses = np.asarray(
        draft(prompt, Context(tokens=known, lengths=lengths))
      )
      block = cuts[:, None] + np.arange(gamma)
      is_text = block < ends[:, None]
      is_right = guesses == np.take_along_axis(tokens, block, axis=1)
      right += (is_right & is_text).sum(0)
      asked += is_text.sum(0)
  return (right / np.maximum(asked, 1)).tolist()


def _strict_is_greedy(
  pair: Pair, name: str, gamma: int, batch_size: int
) -> list[Cells]:
  table = []
  for size in (1, batch_size):
    compared = {
      'greedy': ways.greedy(pair),
      'strict': ways.speculate(pair, name, gamma, 'strict'),
    }
    if size > 1:
      likeliest = TopBeta(beta=1, tau=math.inf)
      compared['beta 1'] = ways.under(pair, name, gamma, likeliest)
    results = ways.decode(
      pair, compared, pair.rows, batch_size=size, is_timed=False
    )
    greedy = results.pop('greedy').ids
    for way, result in results.items():
      different = sum(a != b for a, b in zip(greedy, result.ids, strict=True))
      table.append(
        _row(
          f'{way} is greedy, batch {size}',
          len(greedy),
          result.num_tokens,
          different,
        )
      )
  return table


def _traced(
  pair: Pair, name: str, gamma: int, rule: str, batch_size: int
) -> tuple[list[list[int]], list[list[int]]]:
  """The outputs, and where in each a token is not one that was drafted."""
  decoder = ways.decoder(pair, name, gamma, ways.RULES[rule])
  batches = [
    (Batch(prompt=prompt, texts=()), part)
    for prompt, part in common.batches(pair.layout, pair.rows, batch_size)
  ]
  settings = running.DecodeSettings(max_new_tokens=pair.layout.targets_length)
  decode = running.compile_decode(decoder, batches[0][0], settings)
  outputs: list[list[int]] = []
  corrections: list[list[int]] = []
  for batch, part in batches:
    places: dict[int, list[int]] = {row.index: [] for row in part}

    def add(record: Record, places=places) -> None:
      if record['next'] is not None:
        last = record['start'] + record['committed'] - 1
        places[record['row']].append(last)

    output = jax.device_get(decode(batch, [add]))
    texts = zip(output.tokens, output.lengths, strict=True)
    outputs += [ids[:length].tolist() for ids, length in texts][: len(part)]
    corrections += places.values()
  return outputs, corrections


def _teacher_forced(
  pair: Pair, part: slice, rows: list[list[int]], batch_size: int
) -> np.ndarray:
  """Log-probabilities `[B, S, V]` of what follows each token."""
  sources = np.zeros((batch_size, pair.layout.inputs_length), np.int32)
  texts = np.zeros((batch_size, pair.max_len), np.int32)
  for i, (row, ids) in enumerate(zip(pair.rows[part], rows, strict=True)):
    sources[i, : len(row.ids)] = row.ids
    texts[i, : len(ids)] = ids
  layout = pair.layout
  return np.asarray(
    _log_probs(
      layout.config, layout.vocabulary.vocab_size, pair.target, sources, texts
    )
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _log_probs(
  config: T5Config, vocab_size: int, params: Any, sources: Any, texts: Any
) -> Any:
  logits: Any = T5(config).apply({'params': params}, sources, texts)
  # The ids beyond are padding.
  return jax.nn.log_softmax(logits[..., :vocab_size], axis=-1)


def _outside(
  ids: list[int], log_probs: np.ndarray, beta: int, tau: float
) -> int:
  """How many tokens are not among the beta likeliest or not within tau."""
  following = log_probs[: len(ids) - 1]
  chosen = np.take_along_axis(following, np.array(ids[1:])[:, None], axis=1)
  is_outranked = (following > chosen + TOLERANCE).sum(1) >= beta
  is_far = following.max(1) - chosen[:, 0] > tau + TOLERANCE
  return int((is_outranked | is_far).sum())


def _row(check: str, examples: int, checked: int, violations: int) -> Cells:
  return {
    'check': check,
    'examples': examples,
    'tokens': checked,
    'violations': int(violations),
  }
