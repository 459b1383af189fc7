"""Text shared by the renderings of a trace."""

from specdec_jax.assembly.recording import Record, Summary
from specdec_jax.launch.visible_text import visible

_EMPTY = '▯'

MEANINGS = {
  'accepted': 'drafted, and kept by the target',
  'rejected': 'drafted, and refused by the target',
  'correction': "the target's own token in place of a rejected one",
  'bonus': "the target's own token after a fully accepted draft",
  'plain': "the target's own token where nothing was drafted",
  'discarded': 'drafted after a rejected token, thrown away with it',
  'truncated': 'drafted beyond the end of the row',
}


def shown(text: str) -> str:
  """Returns a token's text on one line, `visible`, and never empty."""
  return visible(text) or _EMPTY


def ordinal(index: int) -> int:
  """Returns the number shown for a row or an iteration: counted from 1."""
  return index + 1


def models_line(header: Record) -> str:
  """Returns such as 'small drafts for large'."""
  return visible(f'{header["drafter"]} drafts for {header["target"]}')


def settings_line(header: Record) -> str:
  """Returns such as 'speculative_sampling, gamma 4, temperature 0'."""
  line = f'{header["verification"]}, gamma {header["gamma"]}'
  if header.get('temperature') is not None:
    line += f', temperature {header["temperature"]:g}'
  return visible(line)


def summary_line(summary: Summary) -> str:
  """Returns such as '38 tokens in 9 target runs (4.22 per run, alpha 0.87)'."""
  line = totals(summary)
  if summary.block_efficiency is not None:
    line += f' ({summary.block_efficiency:.2f} per run'
    if summary.alpha is not None:
      line += f', alpha {summary.alpha:.2f}'
    line += ')'
  return line


def totals(summary: Summary) -> str:
  """Returns such as '38 tokens in 9 target runs'."""
  tokens = count(summary.num_tokens, 'token')
  return f'{tokens} in {count(summary.num_target_runs, "target run")}'


def count(number: int, noun: str) -> str:
  """Returns such as '1 token' or '1,200 tokens'."""
  return f'{number:,} {noun}' + ('' if number == 1 else 's')
