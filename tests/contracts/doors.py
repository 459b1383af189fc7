"""Doors of the package, and what goes through them: every drafter and rule.

Each door decodes the same texts with the same choices. An extra that has a
drafter, a rule or a door of its own adds a row to the tables here.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest

import specdec_jax
from specdec_jax import lazy
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.assembly.rules import RULES
from specdec_jax.checkpoints import huggingface, safetensors_model
from specdec_jax.models import families
from specdec_jax.text import vocabulary_files
from tests import (
  toy,
  toy_assistant,
  toy_block,
  toy_blocks,
  toy_eagle,
  toy_gemma,
  toy_t5,
)
from tests.checkpoints.tiny_t5 import T5X
from tests.cli import tiny

TEXTS = (
  'live ten dog eight yes jumps then.',
  'two over echo.',
  'seas stars away birds sort live where.',
)
NUM_NEW = 8
PLAIN, LOSSLESS, WEAK, STREAMED = 'none', 'greedy', 'uniform', 'model'

# The options of a drafter, by the names of its fields; `{folder}` is where the
# models are. One for each row of DRAFTERS, but for those of extras.
DRAFTER_OPTIONS = {
  'prompt_lookup': {'gamma': 3, 'max_ngram': 2, 'min_ngram': 1},
  'suffix': {'gamma': 3, 'suffix_text': '{folder}/counted.txt'},
  'uniform': {'gamma': 2},
  'model': {'gamma': 3},
  'quantized': {'gamma': 3, 'bits': 4, 'layers': 1},
  'eagle': {'gamma': 3, 'lookup': True},
  'assistant': {'gamma': 3, 'lookup': True},
  'block': {'gamma': 3},
  'spec_drafter': {'gamma': 3},
  'none': {},
  'grammar': {'gamma': 2},
}
# Of drafters whose drafts can be trees.
TREE_OPTIONS = {
  'prompt_lookup': {'gamma': 2, 'num_continuations': 3, 'min_ngram': 1},
  'model': {'gamma': 3, 'tree': (0, 0, 0, 1, 1, 4)},
  'quantized': {'gamma': 2, 'tree': 4},
  'eagle': {'gamma': 2, 'tree': 5},
  'assistant': {'gamma': 2, 'tree': 5},
  'block': {'gamma': 2, 'tree': 5},
}
# Rules for trees alone.
TREE_RULES = 'traversal', 'target_sample_walk'
# Of a rule: options with which it is lossless, others to pass through every
# door, and the temperature for that. One for each other row of RULES.
RULE_OPTIONS = {
  'speculative_sampling': ({}, {'lenience': 0.01}, 1.0),
  'greedy': ({}, {'lenience': 0.001}, 0.0),
  'block': ({}, {}, 1.0),
}
# The rows of extras, which are among their tests.
for options in lazy.installed(
  'tests.contrib.ngram.contract_rows:DRAFTER_OPTIONS',
  'tests.contrib.block_heads.contract_rows:DRAFTER_OPTIONS',
):
  DRAFTER_OPTIONS |= options
for options in lazy.installed('tests.contrib.top_beta.contract_rows:OPTIONS'):
  RULE_OPTIONS |= options
# The sizes of the networks of drafters in extras.
EXTRA_NETWORKS = lazy.installed(
  'tests.contrib.block_heads.contract_rows:FAMILIES'
)
# The doors, of which each decodes the texts of a case. `infer` has one more.
DOORS: lazy.LazyTable[Callable[..., list['Decoded']]] = lazy.LazyTable(
  {
    'python': 'tests.contracts.doors:python',
    'stream': 'tests.contracts.doors:stream',
    'flags': 'tests.contracts.doors:flags',
    'gin': 'tests.infer.doors:gin',
  }
)
# Those that read the choices from strings, and decode all texts.
COMMANDS = [name for name in DOORS if name in ('flags', 'gin')]
# How logits are changed, by the names of every door. The first token can be
# forced, or some kept from it, and `min_new_tokens` hides `min_length`.
SETTINGS = {
  'usual': {},
  'processors': {
    'repetition_penalty': 1.2,
    'presence_penalty': -0.3,
    'frequency_penalty': -0.3,
    'no_repeat_ngram_size': 2,
    'encoder_repetition_penalty': 1.5,
    'encoder_no_repeat_ngram_size': 2,
    'min_new_tokens': 5,
    'logit_bias': {1: 2.5, 55: 2.0},
    'sequence_bias': [[[12, 34], -6.0], [[42], 4.0]],
    'suppress_tokens': [17],
    'begin_suppress_tokens': [34],
    'bad_words_ids': [[55, 38]],
    'forced_eos_token_id': 11,
    'forced_decoder_ids': [[3, 12]],
  },
  'forced': {'forced_bos_token_id': 9, 'min_length': 7, 'logit_bias': {1: 4.0}},
  'drawn': {'top_k': 10, 'top_p': 0.9, 'min_p': 0.08, 'typical_p': 0.6},
}


class Case(NamedTuple):
  """Choices, in Python's names, and the folder of the target."""

  target: str = 'target'
  drafter: str = WEAK
  rule: str = LOSSLESS
  options: tuple[tuple[str, object], ...] = ()
  temperature: float = 0.0
  settings: str = 'usual'


class Decoded(NamedTuple):
  """A text that came through a door; the door of gin files has no tokens."""

  text: str
  num_tokens: int
  num_runs: int
  num_drafted: int
  num_accepted: int
  tokens: tuple[int, ...] | None = None


def row_of(table, kind: str, name: str):
  """A row of the tables above; fails for a new drafter or rule without one."""
  if name not in table:
    pytest.fail(f'the {kind} {name} has no options in {__file__}: give it some')
  return table[name]


def case_of_drafter(name: str, table=None, **changes) -> Case:
  options = row_of(table or DRAFTER_OPTIONS, 'drafter', name)
  return Case(
    target=target_of(name),
    drafter=name,
    options=tuple(options.items()),
    **changes,
  )


def target_of(drafter: str) -> str:
  """The folder of a target for which there is such a drafter."""
  return {'eagle': 'llama', 'assistant': 'gemma'}.get(drafter, 'target')


def case_of_rule(name: str, options, temperature: float) -> Case:
  given = DRAFTER_OPTIONS[WEAK] | options
  return Case(rule=name, options=tuple(given.items()), temperature=temperature)


def write_models(folder: pathlib.Path) -> None:
  """Writes a T5 with T5X's vocabulary, a folder for each drafter with weights,
  and the texts."""
  # T5X has these buckets alone.
  config = toy_t5.config(128, relpos_num_buckets=32, relpos_max_distance=128)
  params = toy_t5.params(config, seed=0)
  noise = toy_t5.params(config, seed=1)
  # Padded further, with likely tokens: every door has to leave them out.
  other = dataclasses.replace(config, vocab_size=136)
  weak = jax.tree.map(lambda x, y: padded(x + 0.2 * y), params, noise)
  block = toy_block.config(
    128, num_encoder_layers=1, num_decoder_layers=1, max_positions=80
  )
  llama = toy.llama_config(128, max_positions=80)
  of_llama = toy.llama_params(llama, seed=0)
  eagle = toy_eagle.config(llama)
  gemma = toy_gemma.gemma_4_e2b(128, max_positions=80)
  assistant = toy_assistant.config(gemma)
  blocks = toy_blocks.config(config)
  for name, sizes, weights in (
    ('target', config, params),
    ('llama', llama, of_llama),
    ('eagle', eagle, toy_eagle.params(eagle, seed=1)),
    ('gemma', gemma, toy_gemma.params(gemma, seed=0)),
    ('assistant', assistant, toy_assistant.params(assistant, seed=2)),
    ('model', other, weak),
    ('spec_drafter', block, toy_block.params(block, seed=0)),
    ('block', blocks, toy_blocks.params(blocks, seed=1)),
    *(
      (name, sizes, random_params(sizes))
      for networks in EXTRA_NETWORKS
      for name, sizes in networks.items()
    ),
  ):
    # Published drafters of this kind are in Hugging Face's folders.
    in_its_folder = name in ('eagle', 'assistant')
    package = huggingface if in_its_folder else safetensors_model
    package.save(folder / name, sizes, weights)
  for name in ('target', 'model', 'llama', 'gemma'):
    path = folder / name / vocabulary_files.SENTENCEPIECE
    path.write_bytes((T5X / 'tiny_sp.model').read_bytes())
    path.with_name('tokenizer_config.json').write_text('{"extra_ids": 0}')
  (folder / 'counted.txt').write_text('\n'.join(TEXTS))
  (folder / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  lines = [json.dumps({'inputs': text, 'targets': text}) for text in TEXTS]
  (folder / 'task.jsonl').write_text('\n'.join(lines) + '\n')


def padded(leaf):
  """A parameter of 136 tokens in place of 128."""
  more = [(0, 8 if size == 128 else 0) for size in leaf.shape]
  return np.pad(leaf, more, constant_values=9.0)


def random_params(config):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype),
    families.param_shapes(config),
  )


def fields_of(folder: pathlib.Path, case: Case) -> dict:
  """The options with the folder in them."""
  return {
    name: value.format(folder=folder) if isinstance(value, str) else value
    for name, value in case.options
  }


def flags_of(folder: pathlib.Path, case: Case) -> list[str]:
  """The models, the drafter and the rule, as the command line names them."""
  given = {
    '--model': folder / case.target,
    '--drafter': case.drafter,
    '--verification': case.rule,
    '--temperature': case.temperature,
    '--max_new_tokens': NUM_NEW,
    '--batch_size': len(TEXTS),
    '--prompts': folder / 'texts.txt',
    '--json': '-',
  }
  if (folder / case.drafter).exists():
    given['--draft_model'] = folder / case.drafter
  options = fields_of(folder, case)
  for choice in (DRAFTERS[case.drafter], RULES[case.rule]):
    for name in options_of(choice):
      if name in options:
        given[f'--{name}'] = options[name]
  given |= {
    f'--{name}': value for name, value in SETTINGS[case.settings].items()
  }
  return [
    str(each)
    for flag, value in given.items()
    for each in ((flag,) if value is True else (flag, value))
  ]


class Doors:
  """Decodes the texts of a case, each case once per door.

  Attributes:
    folder: where `write_models` wrote.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._decoded: dict[tuple[str, Case], list[Decoded]] = {}
    self._decoders: dict[Case, Decoder] = {}

  def __call__(self, door: str, case: Case, capfd) -> list[Decoded]:
    key = (door, case)
    if key not in self._decoded:
      self._decoded[key] = DOORS[door](self, case, capfd)
    return self._decoded[key]

  def load(self, case: Case):
    """The decoder of a case."""
    if case not in self._decoders:
      model = self.folder / case.drafter
      self._decoders[case] = specdec_jax.load(
        str(self.folder / case.target),
        drafter=case.drafter,
        draft_model=str(model) if model.exists() else None,
        verification=case.rule,
        temperature=case.temperature,
        **fields_of(self.folder, case),
        **SETTINGS[case.settings],
      )
    return self._decoders[case]


def flags(doors: Doors, case: Case, capfd) -> list[Decoded]:
  """`specdec generate`."""
  result = tiny.run(capfd, 'generate', *flags_of(doors.folder, case))
  assert (result.status, result.err) == (0, ''), result.err
  return [
    decoded(record['text'], record['statistics'], record['tokens'])
    for record in result.records()
  ]


def python(doors: Doors, case: Case, capfd) -> list[Decoded]:
  """`specdec_jax.generate`."""
  del capfd
  return [
    decoded(each.text, each.statistics, each.tokens)
    for each in specdec_jax.generate(
      doors.load(case), TEXTS, max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
    )
  ]


def stream(doors: Doors, case: Case, capfd) -> list[Decoded]:
  """`specdec_jax.stream`, of the first text alone."""
  del capfd
  stream = specdec_jax.stream(
    doors.load(case), TEXTS[0], max_new_tokens=NUM_NEW
  )
  text, end = ''.join(stream), stream.completion
  assert text == end.text
  return [decoded(text, end.statistics, end.tokens)]


def decoded(text: str, statistics, tokens=None) -> Decoded:
  return Decoded(
    text,
    *(statistics[x] for x in ('tokens', 'target_runs', 'drafted', 'accepted')),
    tokens=None if tokens is None else tuple(tokens),
  )


def check_same(door: str, some: list[Decoded], others: list[Decoded]) -> None:
  """Raises AssertionError unless what both doors say is the same; `stream` says
  it of the first text alone."""
  assert len(some) == (1 if door == 'stream' else len(others)) > 0
  for one, other in zip(some, others, strict=door != 'stream'):
    if None in (one.tokens, other.tokens):
      one, other = one._replace(tokens=None), other._replace(tokens=None)
    assert one == other


def num_accepted(results: list[Decoded]) -> int:
  return sum(each.num_accepted for each in results)


def case_of_settings(settings: str, drafter: str) -> Case:
  drawn = {'rule': 'speculative_sampling', 'temperature': 1.0}
  changes = drawn if settings == 'drawn' else {}
  return case_of_drafter(drafter, settings=settings, **changes)
