"""Traces: every token of a decode with its verdict, p, q and u, as in Figure 1
of Leviathan et al. (https://arxiv.org/abs/2211.17192).

A trace is a sequence of records, plain dicts that are one JSON object each:

- `header`: version, target, drafter, verification, gamma, temperature, top_k,
  top_p, lenience, seed, dtype, and whatever else the caller adds;
- `prompt`: row, text, num_tokens;
- `iteration`: row, iteration, start, drafted, next, committed, for each
  iteration of each row that was not finished;
- `summary`: the totals, at the end of a complete run.

A tree of drafts is recorded as the chain that stands for it: the accepted path,
and first children below it (`decoding.tree_drafts.along_line`).

Rows and iterations count from 0 here, from 1 where shown (`wording.ordinal`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.base import Array, Prompt
from specdec_jax.decoding import step_values
from specdec_jax.decoding.speculative import StepInfo
from specdec_jax.decoding.step_values import StepValues
from specdec_jax.theory import estimates

VERSION = 1

# A discarded draft token follows the rejected one; a truncated one lies beyond
# the EOS, the length limit or the NaN that ended the row.
DRAFT_VERDICTS = ('accepted', 'rejected', 'discarded', 'truncated')
# The target's own token: for a rejected one, after a whole draft, or alone.
NEXT_VERDICTS = ('correction', 'bonus', 'plain')

Record = dict[str, Any]
PiecesFn = Callable[[Sequence[int]], list[str]]

# Defaults of settings that a header states.
_SETTINGS: dict[str, float | str | None] = {
  **{'temperature': 1.0, 'top_k': None, 'top_p': None},
  **{'lenience': 1.0, 'seed': None, 'dtype': None},
}
# Enough tokens before an iteration to know how its first ones are written:
# spaces, and characters spread over several tokens.
_TAIL = 16
_REPLACEMENT = '\N{REPLACEMENT CHARACTER}'


@dataclasses.dataclass(frozen=True)
class TraceState:
  """Where a trace stands: its rows, their last tokens, and the iteration."""

  row_ids: tuple[int, ...]
  tails: tuple[tuple[int, ...], ...]
  iteration: int = 0


def header(
  *,
  target: str,
  drafter: str,
  verification: str,
  gamma: int,
  **settings: object,
) -> Record:
  """Makes the first record, with whatever `settings` JSON can say."""
  return {
    'type': 'header',
    'version': VERSION,
    'target': target,
    'drafter': drafter,
    'verification': verification,
    'gamma': gamma,
    **_SETTINGS,
    **settings,
  }


def init(prompt: Prompt) -> TraceState:
  """Makes the state before the first iteration on `prompt`."""
  prompt = jax.device_get(prompt)
  lengths = prompt.decoder_lengths
  return TraceState(
    row_ids=tuple(prompt.row_ids.tolist()),
    tails=tuple(
      tuple(tokens[max(0, length - _TAIL) : length].tolist())
      for tokens, length in zip(prompt.decoder_tokens, lengths, strict=True)
    ),
  )


def prompt_records(prompt: Prompt, texts: Sequence[str]) -> list[Record]:
  """Makes a record for each text, those of the first rows."""
  prompt = jax.device_get(prompt)
  records = []
  for b, text in enumerate(texts):
    sizes = {'num_tokens': int(prompt.decoder_lengths[b])}
    if prompt.encoder_tokens is not None:
      sizes['num_encoder_tokens'] = int((prompt.encoder_tokens[b] != 0).sum())
    row = int(prompt.row_ids[b])
    records.append({'type': 'prompt', 'row': row, 'text': text, **sizes})
  return records


def iteration_records(
  info: StepInfo | StepValues, state: TraceState, pieces: PiecesFn
) -> tuple[list[Record], TraceState]:
  """Makes a record for each row that committed something, and the next state.

  Joined, the texts of the committed tokens are the row's text; an unfinished
  character belongs to the token that completes it. `state` is `init(prompt)`,
  then what the last call returned.
  """
  values = jax.device_get(
    step_values.gather(info) if isinstance(info, StepInfo) else info
  )
  records, tails = [], []
  for b, tail in enumerate(state.tails):
    row = jax.tree.map(lambda leaf, b=b: leaf[b], values)
    if row.counts:
      record, tail = _iteration_record(row, tail, pieces)
      ids = {'row': state.row_ids[b], 'iteration': state.iteration}
      records.append({'type': 'iteration', **ids, **record})
    tails.append(tail)
  return records, dataclasses.replace(
    state, tails=tuple(tails), iteration=state.iteration + 1
  )


def tokens(record: Record) -> list[Record]:
  """Returns the tokens of an iteration: the draft, then the target's own."""
  return record['drafted'] + ([record['next']] if record['next'] else [])


def is_after_end(verdict: str) -> bool:
  """Tells whether a drafted token lies beyond the iteration's last one."""
  return verdict in ('discarded', 'truncated')


def as_read(record: Record) -> list[Record]:
  """Returns `tokens`, but with a correction right after what it corrects."""
  return sorted(tokens(record), key=lambda t: is_after_end(t['verdict']))


def committed(record: Record) -> list[Record]:
  """Returns the tokens that an iteration added to the row, in order."""
  added = ('accepted', *NEXT_VERDICTS)
  return [token for token in tokens(record) if token['verdict'] in added]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """Totals of a trace, counted as `decoding.statistics` counts. `num_rows`
  counts rows with an iteration; `num_tested` and `num_accepted` are by draft
  position; `num_drafted` counts the tokens shown, for a tree fewer than its
  nodes."""

  num_rows: int
  num_tokens: int
  num_target_runs: int
  num_drafted: int
  num_tested: tuple[int, ...]
  num_accepted: tuple[int, ...]

  @property
  def block_efficiency(self) -> float | None:
    """Tokens per target run; None without any run."""
    return estimates.quotient(self.num_tokens, self.num_target_runs)

  @property
  def alpha(self) -> float | None:
    """Accepted / tested tokens; None where none was tested."""
    return estimates.quotient(sum(self.num_accepted), sum(self.num_tested))

  @property
  def alpha_by_position(self) -> list[float | None]:
    """Alpha of each draft position; None where none was tested."""
    return list(map(estimates.quotient, self.num_accepted, self.num_tested))


def summarize(iterations: Iterable[Record], gamma: int) -> Summary:
  """Adds up iteration records, for `gamma` positions, or more if there are."""
  records = list(iterations)
  drafts = [
    [token['verdict'] for token in record['drafted']] for record in records
  ]
  # Of [accepted, rejected] and [accepted], (2, 1) are tested, (2, 0) accepted.
  positions = range(max([gamma, *map(len, drafts)]))
  count = lambda *verdicts: tuple(
    sum(draft[i] in verdicts for draft in drafts if i < len(draft))
    for i in positions
  )
  return Summary(
    num_rows=len({record['row'] for record in records}),
    num_tokens=sum(record['committed'] for record in records),
    num_target_runs=len(records),
    num_drafted=sum(v != 'truncated' for draft in drafts for v in draft),
    num_tested=count('accepted', 'rejected'),
    num_accepted=count('accepted'),
  )


def summary_record(summary: Summary) -> Record:
  """Makes the last record of a complete trace."""
  return {
    'type': 'summary',
    **dataclasses.asdict(summary),
    'num_tested': list(summary.num_tested),
    'num_accepted': list(summary.num_accepted),
    'block_efficiency': summary.block_efficiency,
    'alpha': summary.alpha,
  }


def _iteration_record(
  row: StepValues, tail: tuple[int, ...], pieces: PiecesFn
) -> tuple[Record, tuple[int, ...]]:
  """Makes the record of one row, without its names, and the row's new tail."""
  length, count = int(row.draft.lengths), int(row.counts)
  num_accepted = min(int(row.verification.num_accepted), count)
  is_whole = count > num_accepted
  after = ['rejected', *['discarded'] * length]
  # With 1 of 3 tokens accepted: accepted, rejected, discarded, and the token of
  # the target is the correction. If the accepted one is EOS, count is 1, and no
  # token of the target follows: accepted, truncated, truncated.
  verdicts = ['accepted'] * num_accepted
  verdicts += after if is_whole else ['truncated'] * length
  drafted = row.draft.tokens[:length].tolist()
  next_token = int(row.verification.next_token)
  added = drafted[:num_accepted] + [next_token] * is_whole
  texts = pieces([*tail, *added])[len(tail) :]
  # An incomplete character is left to the token that completes it.
  texts[-1] = texts[-1].rstrip(_REPLACEMENT)
  next_text = texts.pop() if is_whole else ''
  if len(texts) < len(drafted):
    texts += pieces([*tail, *drafted])[len(tail) + len(texts) :]
  uniforms = row.verification.uniforms
  accept_probs = row.verification.accept_probs
  tokens = [
    {
      'token': token,
      'text': texts[i],
      'p': _number(row.p[i]),
      'q': _number(row.q[i]),
      'u': None if uniforms is None else _number(uniforms[i]),
      'accept_prob': _number(accept_probs[i]),
      'verdict': verdicts[i],
    }
    for i, token in enumerate(drafted)
  ]
  following = None
  if is_whole:
    verdict = 'bonus' if num_accepted == length else 'correction'
    following = {
      'token': next_token,
      'text': next_text,
      'p': _number(row.next_p),
      'verdict': verdict if length else 'plain',
    }
  record = {'start': int(row.starts), 'drafted': tokens, 'next': following}
  return record | {'committed': count}, (tail + tuple(added))[-_TAIL:]


def _number(value: Array) -> float | None:
  """Returns the shortest decimal of this float32; None if not finite."""
  number = np.float32(value)
  return float(str(number)) if np.isfinite(number) else None
