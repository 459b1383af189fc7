"""Every door makes the same of the same choices: flags, gin files and Python.

All drafters are decoded with one lossless rule, and all rules with one drafter,
guesses at random, which are mostly wrong: a rule does not know which drafter it
is.
Flags, gin files and `specdec_jax.generate` decode each of these cases, and
`specdec_jax.stream` the draft model's. T5X's `decode_fn`, on stand-ins for
T5X's objects, decodes those that say how logits are changed.
"""

import dataclasses
import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

import gin

import specdec_jax
from specdec_jax.assembly import packing, running, sampling
from specdec_jax.assembly.constraints import Constraint
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.assembly.rules import RULES
from specdec_jax.checkpoints import formats, huggingface, safetensors_model
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.decoding import speculative
from specdec_jax.integrations import t5x
from specdec_jax.integrations.t5x import t5_networks
from specdec_jax.models import families
from specdec_jax.text import vocabulary_files
from tests import (
  slow,
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
from tests.infer import infer_runs
from tests.integrations.t5x.test_t5x_protocol import Model, Sizes

TEXTS = (
  'live ten dog eight yes jumps then.',
  'two over echo.',
  'seas stars away birds sort live where.',
)
NUM_NEW = 8
PLAIN, LOSSLESS, WEAK, STREAMED = 'none', 'greedy', 'uniform', 'model'

# The options of a drafter, by the names of its fields; `{folder}` is where the
# models are. One for each row of DRAFTERS.
DRAFTER_OPTIONS = {
  'prompt_lookup': {'gamma': 3, 'max_ngram': 2, 'min_ngram': 1},
  'suffix': {'gamma': 3, 'suffix_text': '{folder}/counted.txt'},
  'ngram': {'gamma': 2, 'ngram_text': '{folder}/counted.txt'},
  'uniform': {'gamma': 2},
  'model': {'gamma': 3},
  'quantized': {'gamma': 3, 'bits': 4, 'layers': 1},
  'eagle': {'gamma': 3, 'lookup': True},
  'assistant': {'gamma': 3},
  'block': {'gamma': 3},
  'spec_drafter': {'gamma': 3},
  'block_heads': {'gamma': 2},
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
  'top_beta': ({'beta': 1}, {'beta': 16, 'tau': 9.0}, 0.0),
}
# How logits are changed, by the names of every door. The first token can be
# forced, or some kept from it, and `min_new_tokens` hides `min_length`.
WAYS = {
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
T5X_IMPORTS = (
  'from __gin__ import dynamic_registration',
  'from specdec_jax.integrations import t5x',
)
T5X_FN = 't5x.speculative_decode'


class Case(NamedTuple):
  """Choices, in Python's names, and the folder of the target."""

  target: str = 'target'
  drafter: str = WEAK
  rule: str = LOSSLESS
  options: tuple[tuple[str, object], ...] = ()
  temperature: float = 0.0
  way: str = 'usual'


class Found(NamedTuple):
  """What a door made of a text. gin's writes no tokens, but their text."""

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


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  """A T5 with T5X's vocabulary, and a folder for each drafter with weights."""
  folder = tmp_path_factory.mktemp('doors')
  # T5X has these buckets alone.
  config = toy_t5.config(128, relpos_num_buckets=32, relpos_max_distance=128)
  params = toy_t5.params(config, seed=0)
  noise = toy_t5.params(config, seed=1)
  # Padded further, with likely tokens: every door has to leave them out.
  other = dataclasses.replace(config, vocab_size=136)
  weak = jax.tree.map(lambda x, y: padded(x + 0.2 * y), params, noise)
  heads = BlockHeadsConfig(embed_dim=8, gamma=3, mlp_dim=4)
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
    ('block_heads', heads, random_params(heads)),
    ('block', blocks, toy_blocks.params(blocks, seed=1)),
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
  return folder


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


def flags(folder: pathlib.Path, case: Case) -> list[str]:
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
  given |= {f'--{name}': value for name, value in WAYS[case.way].items()}
  return [
    str(each)
    for flag, value in given.items()
    for each in ((flag,) if value is True else (flag, value))
  ]


class Doors:
  """Decodes the texts of a case, each case once per door."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._found: dict[tuple[str, Case], list[Found]] = {}
    self._decoders: dict[Case, Decoder] = {}

  def __call__(self, door: str, case: Case, capfd) -> list[Found]:
    key = (door, case)
    if key not in self._found:
      self._found[key] = getattr(self, door)(case, capfd)
    return self._found[key]

  def flags(self, case: Case, capfd) -> list[Found]:
    """`specdec generate`."""
    result = tiny.run(capfd, 'generate', *flags(self.folder, case))
    assert (result.status, result.err) == (0, ''), result.err
    return [
      found(record['text'], record['statistics'], record['tokens'])
      for record in result.records()
    ]

  def gin(self, case: Case, capfd) -> list[Found]:
    """`specdec infer`, with the files of the drafter and of the rule."""
    options = fields_of(self.folder, case)
    bindings = {
      'TASK_FEATURE_LENGTHS': f"{{'inputs': 64, 'targets': {NUM_NEW}}}",
      'Decoding.batch_size': len(TEXTS),
      'Decoding.temperature': case.temperature,
    }
    bindings |= {f'Decoding.{n}': x for n, x in WAYS[case.way].items()}
    if 'ngram_text' in options:
      bindings['DRAFTER_TEXT'] = repr(options['ngram_text'])
    if (self.folder / case.drafter).exists():
      model = self.folder / case.drafter
      bindings['DRAFTER_CHECKPOINT_PATH'] = repr(str(model))
    for module, choice in (
      ('drafters', DRAFTERS[case.drafter]),
      ('rules', RULES[case.rule]),
    ):
      for field in dataclasses.fields(choice):
        if field.name in options and field.name != 'ngram_text':
          name = f'{module}.{choice.__name__}.{field.name}'
          value = options[field.name]
          bindings[name] = repr(value) if field.name == 'suffix_text' else value
    out = self.folder / f'out_{len(self._found)}'
    argv = infer_runs.argv(
      self.folder / case.target,
      self.folder / 'task.jsonl',
      out,
      infer_runs.gin_file(f'drafters/{case.drafter}.gin'),
      infer_runs.gin_file(f'verification/{case.rule}.gin'),
      **bindings,
    )
    result = tiny.run(capfd, *argv)
    assert result.status == 0, result.err
    return [
      found(record['prediction'], record['aux'])
      for record in infer_runs.records(infer_runs.result(out))
    ]

  def python(self, case: Case, capfd) -> list[Found]:
    """`specdec_jax.generate`."""
    del capfd
    return [
      found(each.text, each.statistics, each.tokens)
      for each in specdec_jax.generate(
        self.load(case), TEXTS, max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
      )
    ]

  def stream(self, case: Case, capfd) -> list[Found]:
    """`specdec_jax.stream`, of the first text alone."""
    del capfd
    stream = specdec_jax.stream(
      self.load(case), TEXTS[0], max_new_tokens=NUM_NEW
    )
    text, end = ''.join(stream), stream.completion
    assert text == end.text
    return [found(text, end.statistics, end.tokens)]

  def t5x(self, case: Case) -> list[tuple[int, ...]]:
    """The tokens of T5X's `decode_fn`, as gin binds it."""
    decoder = self.load(case)
    settings = running.DecodeSettings(
      max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
    )
    [batch] = packing.pack(decoder, TEXTS, settings)
    # The vocabulary is T5X's to know, where a network is padded beyond it.
    told, num_ids = WAYS[case.way], decoder.config.vocab_size
    padding = range(decoder.target_info.vocab_size, num_ids)
    bindings = {'drafter': case.drafter, 'temperature': case.temperature}
    bindings |= fields_of(self.folder, case) | told
    bindings['suppress_tokens'] = [*told.get('suppress_tokens', ()), *padding]
    lines = [f'{T5X_FN}.{name} = {x!r}' for name, x in bindings.items()]
    gin.clear_config(clear_constants=True)
    gin.parse_config([*T5X_IMPORTS, *lines])
    model = Model(Sizes(vocab_size=num_ids))
    params = toy_t5.params(t5_networks.config_of(model.module), seed=0)
    decode = jax.jit(
      lambda params, read: gin.get_configurable(t5x.speculative_decode)(
        jnp.zeros((len(TEXTS), NUM_NEW), jnp.int32),
        cache={},
        tokens_to_logits=model.step(params, read),
        eos_id=1,
      )[0]
    )
    read = batch.prompt.encoder_tokens[: len(TEXTS)]
    tokens = decode(params, read)[:, 0]
    return [tuple(row[row != 0].tolist()) for row in np.asarray(tokens)]

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
        **WAYS[case.way],
      )
    return self._decoders[case]


def found(text: str, statistics, tokens=None) -> Found:
  return Found(
    text,
    *(statistics[x] for x in ('tokens', 'target_runs', 'drafted', 'accepted')),
    tokens=None if tokens is None else tuple(tokens),
  )


def check_same(door: str, some: list[Found], others: list[Found]) -> None:
  """Raises AssertionError unless what both doors say is the same; `stream` says
  it of the first text alone."""
  assert len(some) == (1 if door == 'stream' else len(others)) > 0
  for one, other in zip(some, others, strict=door != 'stream'):
    if None in (one.tokens, other.tokens):
      one, other = one._replace(tokens=None), other._replace(tokens=None)
    assert one == other


def num_accepted(results: list[Found]) -> int:
  return sum(each.num_accepted for each in results)


@pytest.fixture(scope='module')
def doors(folder) -> Doors:
  return Doors(folder)


@pytest.fixture(autouse=True)
def _keep_small_programs(monkeypatch):
  """Doors share them; a command would keep only those that took long."""
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')


@slow.parametrize(
  'name',
  DRAFTERS,
  now=['none', 'model'],
)
def test_all_doors_decode_the_same_with_a_drafter(name, doors, capfd):
  case = case_of_drafter(name)
  expected = doors('python', case, capfd)
  for door in ('flags', 'gin', *(['stream'] if name == STREAMED else [])):
    check_same(door, doors(door, case, capfd), expected)
  # Lossless: the tokens are those of plain decoding.
  plain = case_of_drafter(PLAIN)._replace(target=case.target)
  plain = doors('python', plain, capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  assert bool(sum(each.num_drafted for each in expected)) == (
    name not in (PLAIN, 'grammar')
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', TREE_OPTIONS)
def test_all_doors_draft_the_same_trees(name, doors, capfd):
  case = case_of_drafter(name, TREE_OPTIONS)
  expected = doors('python', case, capfd)
  for door in ('flags', 'gin'):
    check_same(door, doors(door, case, capfd), expected)
  plain = case_of_drafter(PLAIN)._replace(target=case.target)
  plain = doors('python', plain, capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  num_nodes = doors.load(case).drafter.gamma
  for each in expected:
    assert not each.num_drafted % num_nodes
  assert sum(each.num_drafted for each in expected)
  assert num_accepted(expected)


@pytest.mark.slow
@pytest.mark.parametrize('name', TREE_RULES)
def test_all_doors_judge_trees_by_a_named_rule(name, doors, capfd):
  case = case_of_drafter('model', TREE_OPTIONS, rule=name)
  expected = doors('python', case, capfd)
  for door in ('flags', 'gin'):
    check_same(door, doors(door, case, capfd), expected)
  plain = doors('python', case_of_drafter(PLAIN), capfd)
  assert [each.tokens for each in expected] == [each.tokens for each in plain]
  assert num_accepted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  sorted({*RULES} - {*TREE_RULES}),
)
def test_all_doors_decode_the_same_with_a_rule(name, doors, capfd):
  lossless, options, temperature = row_of(RULE_OPTIONS, 'rule', name)
  strict = doors('python', case_of_rule(name, lossless, 0.0), capfd)
  plain = doors('python', case_of_drafter(PLAIN), capfd)
  assert [each.tokens for each in strict] == [each.tokens for each in plain]
  # Its options have to arrive, and at temperature 1 the same draws be made.
  case = case_of_rule(name, options, temperature)
  expected = doors('python', case, capfd)
  for door in ('flags', 'gin'):
    check_same(door, doors(door, case, capfd), expected)
  if options != lossless:
    strict = case_of_rule(name, lossless, temperature)
    assert num_accepted(expected) > num_accepted(doors('python', strict, capfd))
  if temperature:
    assert [each.tokens for each in expected] != [each.tokens for each in plain]


def case_of_way(way: str, drafter: str) -> Case:
  drawn = {'rule': 'speculative_sampling', 'temperature': 1.0}
  changes = drawn if way == 'drawn' else {}
  return case_of_drafter(drafter, way=way, **changes)


@slow.parametrize('way', sorted({*WAYS} - {'usual'}), now=['processors'])
def test_all_doors_change_logits_in_the_same_way(way, doors, capfd):
  case = case_of_way(way, STREAMED)
  expected = doors('python', case, capfd)
  for door in ('stream', 'flags', 'gin'):
    check_same(door, doors(door, case, capfd), expected)
  assert num_accepted(expected)
  tokens = [each.tokens for each in expected]
  if not case.temperature:
    plain = doors('python', case_of_way(way, PLAIN), capfd)
    assert tokens == [each.tokens for each in plain]
  # Those of a decoder that is told them with its texts. A door that drops one
  # would be seen: each changes a text.
  decoder, told = doors.load(case._replace(way='usual')), WAYS[way]
  usual = {'max_new_tokens': NUM_NEW, 'batch_size': len(TEXTS)}
  for name in (None, *told):
    kept = {key: value for key, value in told.items() if key != name}
    made = specdec_jax.generate(decoder, TEXTS, **usual, **kept)
    assert ([each.tokens for each in made] == tokens) == (name is None), name


def test_there_is_no_other_way():
  """A new setting of how tokens are drawn needs a place in `WAYS`."""
  grammars = {field.name for field in dataclasses.fields(Constraint)}
  told = {name for way in WAYS.values() for name in way}
  assert told == {*sampling.NAMES} - grammars - {'temperature'}


@slow.parametrize('way', sorted({*WAYS} - {'usual'}), now=['processors'])
def test_gin_tells_t5x_the_same_ways(way, doors, capfd):
  case = case_of_way(way, 'prompt_lookup')
  expected = doors('python', case, capfd)
  assert doors.t5x(case) == [each.tokens for each in expected]


@slow.parametrize(
  'name', sorted({*DRAFTERS} - {PLAIN}), now=['prompt_lookup', 'eagle']
)
def test_gamma_chooses_itself_with_every_drafter(name, doors):
  """Each gamma that is tried can be decoded with, and gamma 0 has no drafter,
  nor its weights."""
  case = case_of_drafter(name)
  options = tuple((dict(case.options) | {'gamma': 'auto'}).items())
  auto = doors.load(case._replace(options=options))
  gammas = auto.tried_gammas
  assert auto.is_auto
  assert auto.drafter.gamma == max(gammas) > 0
  assert len(gammas) >= 3
  assert not any((gammas[-1] + 1) % (gamma + 1) for gamma in gammas)
  settings = running.DecodeSettings(max_new_tokens=NUM_NEW)
  [batch] = packing.pack(auto, TEXTS[:1], settings)
  for gamma in gammas:
    decoder = auto.at(gamma)
    assert (decoder.drafter.gamma, decoder.is_auto) == (gamma, False)
    assert gamma or decoder.params.drafter == ()
    generate = functools.partial(
      speculative.generate,
      method=decoder.method,
      max_len=running.max_length(decoder, batch, NUM_NEW),
    )
    output = jax.eval_shape(
      generate, decoder.params, jax.random.key(0), batch.prompt
    )
    assert output.statistics.num_tested.shape == (1, gamma)


@pytest.mark.parametrize('name', ['model', 'eagle', 'spec_drafter'])
def test_a_dry_run_counts_a_drafter(name, folder, capfd, monkeypatch):
  """Its weights, and the state that it has in the loop."""
  monkeypatch.setenv('COLUMNS', '200')
  result = tiny.run(
    capfd,
    *infer_runs.argv(
      folder / target_of(name),
      folder / 'task.jsonl',
      folder / f'dry_{name}',
      infer_runs.gin_file(f'drafters/{name}.gin'),
      '--dry_run',
      DRAFTER_CHECKPOINT_PATH=repr(str(folder / name)),
    ),
  )
  assert result.status == 0, result
  [row] = [x for x in result.out.splitlines() if 'drafter parameters' in x]
  found = int(row.split('│')[2].strip().replace(',', ''))
  path = folder / name
  config = formats.read_config(path)
  shapes = jax.tree.leaves(families.param_shapes(config))
  assert found == sum(leaf.size for leaf in shapes)
  assert not (folder / f'dry_{name}').exists()


@pytest.mark.parametrize('name', ['eagle', 'spec_drafter', 'block_heads'])
def test_a_drafter_says_what_kind_it_is(name, folder, capfd):
  path, target = str(folder / name), str(folder / target_of(name))
  models = ('--model', target, '--draft_model', path, '--drafter', 'model')
  tiny.assert_refused(
    tiny.run(capfd, 'generate', *models, '--prompt', 'a'),
    path,
    f'draft_model, with drafter {name}',
  )
  with pytest.raises(ValueError, match=f'draft_model, with drafter {name}$'):
    specdec_jax.load(target, drafter='model', draft_model=path)


def test_a_door_that_drops_an_option_is_caught(doors, capfd, monkeypatch):
  """The control: a door that forgets how lenient the rule is."""
  case = case_of_rule('greedy', RULE_OPTIONS['greedy'][1], 0.0)
  expected = doors('python', case, capfd)

  class Forgetful(Doors):
    def load(self, case):
      kept = [item for item in case.options if item[0] != 'lenience']
      return super().load(case._replace(options=tuple(kept)))

  forgetful = Forgetful(doors.folder)
  with pytest.raises(AssertionError):
    check_same('python', forgetful('python', case, capfd), expected)


@pytest.mark.slow
@pytest.mark.parametrize('command', ['bench', 'calibrate'])
@pytest.mark.parametrize(
  'name', ['model', 'spec_drafter', 'block_heads', 'eagle']
)
def test_figures_of_drafters_with_weights(name, command, folder, capfd):
  case = case_of_drafter(name)
  more = ('--repeats', '1', '--plain_dtypes', 'float32')
  result = tiny.run(capfd, command, *flags(folder, case), *more)
  assert result.status == 0, result.err
  figures = json.loads(result.out)
  assert figures['gamma'] == dict(case.options)['gamma']
  assert 0 <= figures['alpha'] <= 1
  if command == 'bench':
    assert figures['identical'] is True


@pytest.mark.slow
@pytest.mark.parametrize('name', ['model', 'eagle'])
def test_figures_of_a_tree(name, folder, capfd):
  case = case_of_drafter(name, TREE_OPTIONS)
  more = ('--repeats', '1', '--plain_dtypes', 'float32')
  result = tiny.run(capfd, 'bench', *flags(folder, case), *more)
  assert result.status == 0, result.err
  figures = json.loads(result.out)
  assert figures['identical'] is True
  assert len(figures['tree']) == figures['gamma'] > 4
  assert figures['alpha_from_block_efficiency'] is None
  assert figures['theory_speedup'] is None
  assert figures['block_efficiency'] > 1
