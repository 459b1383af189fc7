"""Times steps by the capacity of rows, and by how much of it they use."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.report import Cells, Table
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.base import Prompt
from specdec_jax.measure import loops, stopwatch

# Positions of a call that verifies a draft.
_WIDTH = 8
_TIMED = ('plain step', 'verify call')


class Timed(NamedTuple):
  """A compiled program, and how many steps or calls it runs."""

  program: Callable[[], Any]
  num_steps: int = 1


def table(
  decoder: Decoder,
  prompts: Mapping[tuple[int, int], Prompt],
  capacities: Sequence[int],
  repeats: int,
) -> Table:
  """Makes a row for each batch, by size and length, and each capacity with room
  for it, timed in turns with the smallest."""
  rows: list[Cells] = []
  for (batch_size, length), prompt in prompts.items():
    room = [each for each in capacities if each > length + 2 * _WIDTH]
    made = {each: _programs(decoder, prompt, each) for each in room}
    programs: dict[Hashable, Callable[[], Any]] = {
      (name, capacity): timed.program
      for capacity, both in made.items()
      for name, timed in both.items()
    }
    seconds, _ = stopwatch.alternate(programs, repeats)
    for capacity in made:
      row: Cells = {'batch': batch_size, 'tokens': length, 'room': capacity}
      for name in _TIMED:
        each, least = (
          (seconds[name, c] - seconds['launch of a ' + name, c])
          / made[c][name].num_steps
          for c in (capacity, room[0])
        )
        row[f'{name}, ms'] = f'{1e3 * float(np.median(each)):.3f}'
        row[f'{name}, ratio'] = f'{float(np.median(each / least)):.3f}'
      rows.append(row)
  return Table(
    rows=rows,
    notes=[
      'Rows of the given tokens in caches with room for more: a plain step, '
      f'including the loop, and a call over {_WIDTH} positions by itself. '
      'Ratios are to the smallest room, medians over turns.',
    ],
  )


def _programs(
  decoder: Decoder, prompt: Prompt, capacity: int
) -> dict[str, Timed]:
  """Compiles plain decoding of some tokens, some verify calls, and the launches
  of both."""
  loop = loops.plain_loop(
    decoder.params,
    jax.random.key(0),
    [prompt],
    method=decoder.method,
    max_len=capacity - decoder.method.drafter.gamma - 1,
  )
  short, state = loops.shortened(loop), loop.states[0]
  verify = stopwatch.repeated(
    decoder.params, state, target=decoder.method.target, width=_WIDTH
  )
  num_tokens = short.states[0].max_lengths - state.context.lengths
  plain, call = _TIMED
  return {
    plain: Timed(short.decode, int(num_tokens.max())),
    'launch of a ' + plain: Timed(loops.finished(loop).decode),
    call: Timed(verify, verify.num_calls),
    'launch of a ' + call: Timed(verify.launch),
  }
