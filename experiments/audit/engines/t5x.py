"""T5X's sampler, which has no speculation, as a control: its `decoding.py` over
a table of logits by the last token."""

import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import report
from experiments.audit import ways
from experiments.audit.ways import Way


def engine(clone: str | None) -> Iterator[Way]:
  """Its ways; `clone` is a folder with T5X's repository."""
  sample = _decoding(clone).temperature_sample
  for setting, top_k in ways.SETTINGS.items():
    for prompts in (ways.ONE, ways.FOUR):
      draw = functools.partial(_draw, sample, prompts)
      yield Way(
        f'plain, {setting}, batch {len(prompts)}',
        ways.by_prompt(functools.partial(draw, 1.0, top_k or 0), prompts),
        ways.of_table(top_k),
        prompts,
        20_000,
        lambda prompt, draw=draw, prompts=prompts: draw(0.0, 1, 1, 0)[
          0, prompts.index(prompt)
        ],
      )


def version(clone: str | None) -> str:
  """The commit that is run; T5X is on no registry."""
  if clone is None:
    raise ValueError(
      'T5X needs --t5x and a clone of its repository: give it, or --engines '
      'without T5X'
    )
  command = ['git', '-C', str(clone), 'log', '-1', '--format=%h']
  found = subprocess.run(command, capture_output=True, text=True, check=True)
  return f'T5X {found.stdout.strip()}, {report.versions("jax")}'


def _decoding(clone: str | None) -> Any:
  # The whole of T5X needs TensorFlow and SeqIO; its samplers do not.
  package = types.ModuleType('t5x')
  package.__path__ = [f'{clone}/t5x']
  sys.modules['t5x'] = package
  return importlib.import_module('t5x.decoding')


def _draw(
  temperature_sample: Any,
  prompts: tuple[ways.Tokens, ...],
  temperature: float,
  top_k: int,
  num: int,
  seed: int,
) -> np.ndarray:
  """`num` decodes of each prompt: `[num, B, L]`."""
  import jax
  import jax.numpy as jnp

  lengths = np.array([*map(len, prompts)])
  width = 1 + lengths.max() + ways.NUM_TOKENS
  # T5X's texts begin with id 0.
  tokens = [(0, *ids, *[0] * (width - 1 - len(ids))) for ids in prompts]
  table = jnp.asarray(ways.tables()[0])
  found, _ = temperature_sample(
    jnp.array(tokens, jnp.int32),
    {},
    lambda state: (table[state.cur_token[:, 0]], state.cache),
    eos_id=-1,
    decode_rng=jax.random.key(seed),
    num_decodes=num,
    temperature=temperature,
    topk=top_k,
    initial_index=jnp.asarray(lengths),
    max_decode_steps=ways.NUM_TOKENS,
  )
  places = lengths[:, None] + np.arange(ways.NUM_TOKENS)
  found = np.swapaxes(np.asarray(found), 0, 1)
  return np.take_along_axis(found, places[None], axis=2)
