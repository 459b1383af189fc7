"""Grammars on the host: masks, completed drafts, and what is refused."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('llguidance')
pytest.importorskip('sentencepiece')
pytest.importorskip('tokenizers')


import specdec_jax
from specdec_jax import trees
from specdec_jax.base import Context, Draft, Grammar, Tree
from specdec_jax.text import grammars, token_bytes
from specdec_jax.text.vocabularies import Vocabulary
from tests import children, toy_grammar

GAMMA = 4
SCHEMA = {
  'type': 'object',
  'properties': {
    'full_name': {'type': 'string', 'maxLength': 6},
    'is_new': {'type': 'boolean'},
    'many': {'type': 'array', 'items': {'enum': ['a', 'ab', 7]}},
  },
  'required': ['full_name'],
  'additionalProperties': False,
}
REGEX = r'(yes|no), because [a-zé ]{1,30}\.|[0-9]{1,2}( Uhr)?'
LARK = """
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: /[0-9]+/ | "(" sum ")"
"""


_regex = functools.partial(grammars.of_option, 'regex')
_json_schema = functools.partial(grammars.of_option, 'json_schema')


@functools.cache
def _sentencepiece():
  return specdec_jax.load('ende-mini', drafter='none').vocabulary


@functools.cache
def _reader(vocabulary):
  return grammars.Reader(vocabulary, vocabulary.vocab_size)


def _number(reader, text: str, **limits) -> int:
  return reader.number_of(text, limits)


def _read_rows(reader, numbers, texts, drafts, **options):
  """A call, all of whose prompts are one token."""
  num_rows = len(numbers)
  tokens = np.zeros((num_rows, 100), np.int32)
  drafted = np.zeros((num_rows, GAMMA), np.int32)
  for row, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
    tokens[row, 1 : 1 + len(text)] = text
    drafted[row, : len(draft)] = draft
  chain = np.arange(GAMMA + 1)[None]
  options = {'paths': chain, 'completes': False, 'is_certain': False} | options
  return reader(
    np.arange(num_rows, dtype=np.int32),
    Context(
      tokens=tokens,
      lengths=np.array([1 + len(text) for text in texts], np.int32),
      starts=np.ones(num_rows, np.int32),
      grammar=Grammar(numbers=np.array(numbers, np.int32), read=reader),
    ),
    Draft(
      tokens=drafted,
      probs=None,
      lengths=np.array([*map(len, drafts)], np.int32),
    ),
    **options,
  )


def _read(reader, number, text, draft=(), **options):
  """A call of one row."""
  masks, drafted, lengths, is_forced = _read_rows(
    reader, [number], [text], [draft], **options
  )
  length = int(lengths[0])
  chain = drafted[0, :length].tolist()
  return masks[0], chain, is_forced[0, :length].tolist()


def _allowed(mask) -> np.ndarray:
  bits = np.unpackbits(mask.view(np.uint8), bitorder='little')
  return np.flatnonzero(bits)


def _fresh_mask(reader, number: int, text) -> np.ndarray:
  """The mask of a matcher that has read nothing but a text."""
  matcher = reader._matcher(*reader._sources[number - 1])
  matcher.try_consume_tokens(list(map(int, text)))
  words = np.frombuffer(matcher.compute_bitmask(), np.int32)
  return words[: -(-reader._tokenizer.vocab_size // 32)]


@pytest.mark.parametrize('make', [toy_grammar.pairs, _sentencepiece])
def test_masks_are_those_of_texts_that_were_never_drafted(make):
  """Whatever was drafted, completed, or read between."""
  vocabulary = make()
  reader, rng = _reader(vocabulary), np.random.default_rng(0)
  sources = {
    toy_grammar.pairs: [_regex('a[ab]{0,12}b'), 'start: "a" start?'],
    _sentencepiece: [
      _regex(REGEX),
      _json_schema(json.dumps(SCHEMA)),
      LARK,
    ],
  }[make]
  numbers = [_number(reader, source) for source in sources]
  texts = {number: [] for number in numbers}
  num_masks = 0
  for turn in range(60):
    number = numbers[turn % len(numbers)]
    text = texts[number]
    masks, chain, _ = _read(
      *(reader, number, text),
      rng.integers(vocabulary.vocab_size, size=rng.integers(GAMMA + 1)),
      completes=bool(turn % 2),
    )
    matched = []
    for mask, token in zip(masks, [*chain, None], strict=False):
      expected = _fresh_mask(reader, number, [*text, *matched])
      np.testing.assert_array_equal(mask, expected)
      num_masks += 1
      if token not in _allowed(mask) or token in vocabulary.eos_ids:
        break
      matched.append(token)
    text.append(int(rng.choice(_allowed(masks[0]))))
    if text[-1] in vocabulary.eos_ids:
      texts[number] = []
  assert num_masks > 80


@pytest.mark.parametrize('num_logits', [7000, 9000])
def test_masks_have_a_bit_for_each_logit(num_logits):
  """A vocabulary has more ids than a small model, or a model has padding."""
  vocabulary = _sentencepiece()
  reader = grammars.Reader(vocabulary, num_logits)
  number = _number(reader, _regex('[a-z ]+'))
  masks, *_ = _read(reader, number, [])
  assert masks.shape == (GAMMA + 1, -(-num_logits // 32))
  whole = _reader(vocabulary)
  masks_of_all, *_ = _read(whole, _number(whole, _regex('[a-z ]+')), [])
  expected = _allowed(masks_of_all[0])
  assert _allowed(masks[0]).tolist() == expected[expected < num_logits].tolist()


def test_masks_of_a_tree_are_those_of_its_paths():
  reader = _reader(toy_grammar.pairs())
  number = _number(reader, _regex('(ab)*b'))
  # Node 1 is a, 2 is ab, 3 is no token, 4 b after a, 5 ab after ab.
  tree, drafted = Tree((0, 0, 0, 1)), [0, 2, -1, 1]
  masks, *_ = _read(
    *(reader, number, [], drafted), paths=trees.leaf_paths(tree)
  )
  paths = {0: [], 1: [0], 2: [2], 4: [0, 1]}
  for node, path in paths.items():
    expected = _fresh_mask(reader, number, path)
    np.testing.assert_array_equal(masks[node], expected)


@pytest.mark.parametrize('forgets', [False, True])
def test_masks_do_not_depend_on_what_was_read_before(forgets):
  reader = grammars.Reader(toy_grammar.pairs(), toy_grammar.V)
  number = _number(reader, _regex('(ab?){30}'))
  text = [0, 2, 0, 1, 2] * 3
  for length in (15, 3, 14, 0, 15):
    masks, *_ = _read(reader, number, text[:length])
    expected = _fresh_mask(reader, number, text[:length])
    np.testing.assert_array_equal(masks[0], expected)
    if forgets:
      reader._of_rows.clear()


def test_a_row_keeps_the_matcher_of_its_last_text():
  reader = grammars.Reader(toy_grammar.pairs(), toy_grammar.V)
  number = _number(reader, _regex('[ab]{0,60}'))
  rng = np.random.default_rng(0)
  for _ in range(5):
    _read(reader, number, rng.integers(3, size=9).tolist())
  assert len(reader._of_rows) == 1


def test_a_chain_has_what_the_grammar_leaves_no_choice_of():
  vocabulary = _sentencepiece()
  reader = _reader(vocabulary)
  number = _number(reader, _regex('(yes|no), because it is'))
  no = vocabulary.encode('no', add_special_tokens=False)
  rest = vocabulary.encode('no, because it is', add_special_tokens=False)
  rest = rest[len(no) :]
  other = int(vocabulary.encode('Haus')[0])
  for is_certain in (False, True):
    # What a drafter says after 'no' is replaced; nothing is known of 'no'.
    _, chain, is_forced = _read(
      *(reader, number, [], [*no, other]),
      completes=True,
      is_certain=is_certain,
    )
    assert chain == [*no, *rest][:GAMMA]
    assert is_forced == [False] * len(no) + [True] * (GAMMA - len(no))
  # A token that may not come ends a chain that was not drawn.
  _, chain, _ = _read(
    *(reader, number, [], [other, *no]), completes=True, is_certain=True
  )
  assert other not in chain
  _, chain, _ = _read(reader, number, [], [other, *no], completes=True)
  assert chain == [other, *no]


def test_texts_of_sentencepiece_begin_with_the_space_that_it_drops():
  vocabulary = _sentencepiece()
  reader = _reader(vocabulary)
  for text, pattern in (('no', 'yes|no'), ('{"a":1}', None)):
    source = (
      _regex(pattern) if pattern else _json_schema('{"enum": [{"a": 1}]}')
    )
    number, ids = _number(reader, source), []
    while True:
      masks, *_ = _read(reader, number, ids)
      ends = set(_allowed(masks[0])) & set(vocabulary.eos_ids)
      if ends:
        break
      # Of spellings the longest token.
      allowed = [int(i) for i in _allowed(masks[0])]
      ids.append(max(allowed, key=lambda i: len(vocabulary.tokens()[i])))
    assert vocabulary.decode(ids) == text


@pytest.mark.parametrize('has_bytes', [False, True])
def test_bytes_are_tokens_only_where_a_vocabulary_has_them(has_bytes):
  import tokenizers

  model = tokenizers.models.BPE(
    vocab={'<0x0A>': 0, '▁a': 1, '</s>': 2},
    merges=[],
    byte_fallback=has_bytes,
  )
  tokenizer = tokenizers.Tokenizer(model)
  parts = [tokenizers.decoders.ByteFallback()] if has_bytes else []
  tokenizer.decoder = tokenizers.decoders.Sequence(
    [*parts, tokenizers.decoders.Metaspace()]
  )
  tokenizer.add_special_tokens(['</s>'])
  vocabulary = Vocabulary(tokenizer=tokenizer, eos_ids=(2,))
  spelled = token_bytes.token_bytes(vocabulary)
  assert spelled == [b'\n' if has_bytes else b'<0x0A>', b' a', b'']


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (lambda: _regex('a(?=b)'), 'look-ahead'),
    (lambda: _regex('a^b'), 'lookarounds not supported'),
    (lambda: _regex('c'), 'no tokens of this vocabulary spell'),
    (lambda: _json_schema('{"type": "x"}'), 'Invalid type: x'),
    (lambda: _json_schema('{"not": {}}'), 'Unimplemented keys'),
    (lambda: 'start: x', 'unknown name: "x"'),
    (lambda: 'begin: "a"', 'start'),
  ],
)
def test_what_is_no_grammar_is_refused(text, message):
  with pytest.raises(ValueError, match=message) as error:
    _number(_reader(toy_grammar.pairs()), text())
  assert '\n' not in str(error.value)


def test_limits_are_llguidances_own():
  reader = _reader(toy_grammar.pairs())
  source = _regex('(a|b){200}')
  assert _number(reader, source)
  with pytest.raises(ValueError, match='limit for this grammar: 10'):
    _number(reader, source, initial_lexer_fuel=10)
  with pytest.raises(ValueError, match='no_limit'):
    _number(reader, source, no_limit=1)


# Each token that is read adds a state or two, but for a text of b alone.
_MANY_STATES = _regex('(a|b)*a(a|b){3}|b(a|b)*a(a|b){60}')


def test_a_limit_that_is_met_later_leaves_no_token(caplog):
  reader = grammars.Reader(toy_grammar.pairs(), toy_grammar.V)
  number = _number(reader, _MANY_STATES, max_lexer_states=30)
  text = np.random.default_rng(0).integers(2, size=40).tolist()
  for length in range(len(text) - GAMMA):
    draft = text[length : length + GAMMA]
    masks, *_ = _read(reader, number, text[:length], draft)
    has_tokens = masks.any(axis=1)
    if not has_tokens.all():
      break
  assert 1 < length < len(text) - GAMMA - 1
  assert has_tokens.tolist() == sorted(has_tokens, reverse=True)
  assert 'ended a text: lexer error: too many states' in caplog.text
  # Nor does the row have one, or another token, afterwards.
  masks, *_ = _read(reader, number, text[: length + GAMMA])
  assert not masks[0].any()


def test_a_limit_that_a_row_meets_is_of_that_row_alone():
  """Others keep their masks, though they have the same grammar."""
  reader = grammars.Reader(toy_grammar.pairs(), toy_grammar.V)
  limited = _number(reader, _MANY_STATES, max_lexer_states=30)
  numbers = [limited, limited, _number(reader, _regex('(ab?){60}')), 0]
  texts = [
    np.random.default_rng(0).integers(2, size=60).tolist(),
    [1] * 60,
    [0, 2, 0, 1, 2] * 12,
    [2] * 60,
  ]
  num_ended = 0
  for length in range(40):
    drafts = [text[length : length + GAMMA] for text in texts]
    masks, *_ = _read_rows(
      reader, numbers, [text[:length] for text in texts], drafts
    )
    num_ended += not masks[0, 0].any()
    assert (masks[3] == -1).all()
    for row in (1, 2):
      for i, mask in enumerate(masks[row]):
        expected = _fresh_mask(reader, numbers[row], texts[row][: length + i])
        np.testing.assert_array_equal(mask, expected)
  assert 3 < num_ended < 40


_HOSTILE = {
  'many choices': lambda: {'enum': [f'{i:09}' for i in range(300_000)]},
  'many optional properties': lambda: {
    'type': 'object',
    'properties': {f'p{i}': {'type': 'integer'} for i in range(20_000)},
  },
  'a long pattern': lambda: {
    'type': 'string',
    'pattern': '^(a|(b|bb){1000}){1000}$',
  },
  'patterns that meet': lambda: {
    'allOf': [{'type': 'string', 'pattern': f'(a|b){{{i}}}c'} for i in (90, 91)]
  },
  'nested counts': lambda: {
    'type': 'array',
    'minItems': 10_000,
    'items': {'type': 'array', 'minItems': 10_000, 'items': {}},
  },
  'references': lambda: {
    '$ref': '#/$defs/0',
    '$defs': {
      str(i): {'allOf': [{'$ref': f'#/$defs/{i + 1}'}] * 2} for i in range(40)
    }
    | {'40': {'type': 'integer'}},
  },
  'a large number': lambda: {'type': 'integer', 'multipleOf': 7**20},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', _HOSTILE)
def test_hostile_schemas_end_soon(name):
  """Within 2 s and 500 MB they are refused, or compiled."""
  code = f"""
import json, resource, time
from tests.text import test_grammars as t
reader = t._reader(t._sentencepiece())
text = json.dumps(t._HOSTILE[{name!r}]())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
try:
  number = t._number(reader, t._json_schema(text))
  ended = 'compiled'
except ValueError as error:
  ended = str(error)[:100]
seconds = time.process_time() - began
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([ended, seconds, more / 1024]))
"""
  done = subprocess.run(
    [sys.executable, '-c', code],
    env=children.environment(),
    capture_output=True,
    check=True,
    timeout=120,
  )
  ended, seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
  print(ended, seconds, megabytes)
  assert seconds < 2
  assert megabytes < 500
