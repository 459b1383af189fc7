"""Grammars: a regular expression or a JSON schema becomes an automaton over the
tokens of a vocabulary, as arrays for `specdec_jax.grammars`.

`outlines-core` parses; of its automaton over bytes each token's bytes make
steps. Tokens that lead from every state to the same ones are one class (some
hundred for a large schema), which keeps the tables small.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from specdec_jax import base
from specdec_jax.files.require import require
from specdec_jax.text import json_schemas
from specdec_jax.text.vocabularies import AnyVocabulary, package_errors

# Of a row's tables; a cache of keys and values is as large.
MAX_BYTES = 32 * 2**20
_MOST = 2**16  # States or classes, in 16 bits.
_FREE, _START = 0, 1  # States; see `base.Grammar`.
# Tokens among which one text alone is looked for, and bytes of that text.
_FEW, _LONG = 64, 64


class Automaton(NamedTuple):
  """Tables of one grammar; `base.Grammar` has those of rows.

  Attributes:
    classes: uint16 `[V]`, of ids with a token.
    next: uint16 `[S, C]`; state 1 is where texts begin, class 0 comes nowhere.
    guesses: int32 `[S]`.
  """

  classes: np.ndarray
  next: np.ndarray
  guesses: np.ndarray

  @property
  def num_bytes(self) -> int:
    return sum(table.nbytes for table in self)


@functools.lru_cache(maxsize=64)
def of_json_schema(schema: str) -> str:
  """The regular expression of JSON texts that a schema, itself JSON, allows:
  without spaces, and with properties in the schema's order. ValueError for what
  would not be heeded, or not exactly."""
  core = _core()
  json_schemas.check(json.loads(schema), pattern_bytes=_bytes_of)
  with package_errors('this JSON schema cannot be compiled'):
    return core.json_schema.build_regex_from_schema(schema, '')


@functools.lru_cache(maxsize=64)
def compiled(pattern: str, vocabulary: AnyVocabulary) -> Automaton:
  """The automaton of the texts that a regular expression matches as a whole.

  Raises:
    ValueError: if it is none, its tables would be larger than `MAX_BYTES`, or
      no tokens spell any of its texts.
    ImportError: without `outlines-core`.
  """
  steps, is_end = _byte_automaton(pattern)
  texts = token_bytes(vocabulary)
  if not vocabulary.eos_ids:
    raise ValueError(
      'a grammar needs a vocabulary with a token that ends texts'
    )
  # SentencePiece drops the space that begins a text.
  drops_space = _drops_space(vocabulary, texts)
  first = [
    text[1:] if drops_space and text[:1] == b' ' else text for text in texts
  ]
  columns, (of_token, of_first) = _columns(steps, [texts, first])
  pairs, classes = np.unique(
    np.stack([of_token, of_first]), axis=1, return_inverse=True
  )
  num_classes = pairs.shape[1] + 2
  # States of bytes are one further on: `_START` is that of a text's first
  # token, and the last one that of an ended text.
  end = len(steps) + 1
  table = np.zeros((end + 1, num_classes), np.int32)
  shift = lambda states: np.where(states, states + 1, 0)
  table[2:end, 1:-1] = shift(columns[pairs[0], 1:]).T
  table[_START, 1:-1] = shift(columns[pairs[1], 1])
  table[[end, *np.flatnonzero(is_end) + 1], -1] = end
  table[_START, -1] = end * is_end[1]
  classes = classes.reshape(-1) + 1
  classes[list(vocabulary.eos_ids)] = num_classes - 1
  classes, table = _trimmed(classes, table, end)
  _check_size(*table.shape)
  guesses = _guesses(classes, table, texts, vocabulary)
  return Automaton(classes.astype(np.uint16), table.astype(np.uint16), guesses)


def rows(
  automata: Sequence[Automaton | None],
  *,
  num_rows: int,
  num_logits: int,
  among: Sequence[Automaton | None],
) -> base.Grammar | None:
  """What rows may say, as data; those beyond `automata`, and those of None, may
  say anything. None if all of `among` are, which are of all batches that share
  a program."""
  every = [each for each in among if each is not None]
  if not every:
    return None
  # A few sizes, so that programs are compiled for few.
  sizes = (_bucket(max(each.next.shape[i] for each in every)) for i in (0, 1))
  num_states, num_classes = sizes
  classes: base.Arrays = np.zeros((num_rows, num_logits), np.uint16)
  table: base.Arrays = np.zeros((num_rows, num_states, num_classes), np.uint16)
  guesses: base.Arrays = np.full((num_rows, num_states), -1, np.int32)
  states: base.Arrays = np.full(num_rows, _FREE, np.int32)
  for row, each in enumerate(automata):
    if each is None:
      continue
    states[row] = _START
    # Ids beyond those of the model are tokens of its larger siblings.
    own = each.classes[:num_logits]
    classes[row, : len(own)] = own
    table[row, : each.next.shape[0], : each.next.shape[1]] = each.next
    guesses[row, : len(each.guesses)] = each.guesses
  return base.Grammar(
    classes=classes, next=table, guesses=guesses, states=states
  )


def token_bytes(vocabulary: AnyVocabulary) -> list[bytes]:
  """The bytes that each token adds to a text; none for what is no text.

  Raises:
    ValueError: if the vocabulary does not say how its tokens are spelled.
  """
  spell = _speller(vocabulary)
  special = vocabulary.special_ids
  return [
    b'' if i in special or not token else spell(token)
    for i, token in enumerate(vocabulary.tokens())
  ]


def _speller(vocabulary: AnyVocabulary) -> Callable[[str], bytes]:
  tokenizer = getattr(vocabulary, 'tokenizer', None)
  added: dict[str, bytes] = {}
  decoder = '"ByteFallback" "Metaspace"'  # SentencePiece's own.
  if tokenizer is not None:
    parts = json.loads(tokenizer.to_str())
    decoder = json.dumps(parts.get('decoder'))
    added = {x['content']: x['content'].encode() for x in parts['added_tokens']}
  if '"ByteLevel"' in decoder:
    table = _byte_of_character()
    return lambda token: added.get(token) or bytes(table[c] for c in token)
  if not any(name in decoder for name in ('Metaspace', 'ByteFallback', '▁')):
    raise ValueError(
      'a grammar needs to know how tokens are spelled, and this vocabulary has '
      'neither byte-level nor SentencePiece tokens'
    )

  def spell(token: str) -> bytes:
    if len(token) == 6 and token.startswith('<0x') and token.endswith('>'):
      return bytes([int(token[3:5], 16)])
    if token == '<unk>' or token.startswith(('<extra_id_', '▁<extra_id_')):
      return b''
    return added.get(token) or token.replace('▁', ' ').encode()

  return spell


def _byte_of_character() -> Mapping[str, int]:
  """The bytes that byte-level vocabularies write as characters: those that can
  be seen as themselves, the others from U+0100 on."""
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [i for i in range(256) if i not in seen]
  return {chr(i): i for i in seen} | {
    chr(256 + n): i for n, i in enumerate(others)
  }


def _drops_space(vocabulary: AnyVocabulary, texts: Sequence[bytes]) -> bool:
  for i, text in enumerate(texts):
    if text[:1] == b' ' and text[1:].isalpha():
      return not vocabulary.decode([i]).startswith(' ')
  return False


def _core() -> ModuleType:
  return require('outlines_core', extra='grammar', purpose='a grammar')


def _byte_automaton(pattern: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps `[S, 256]` over bytes, 0 for none, from state 1 on, and where a text
  may end, bool `[S]`."""
  core = _core()
  eos = 256
  bytes_of = core.Vocabulary(eos, {bytes([i]): [i] for i in range(eos)})
  with package_errors('this grammar cannot be compiled'):
    index = core.Index(pattern, bytes_of)
  found = index.get_transitions()
  if len(found) >= _MOST:
    raise ValueError(
      f'this grammar has {len(found)} states, and {_MOST - 1} are the most'
    )
  names = [index.get_initial_state(), *found, *index.get_final_states()]
  ids = {name: i for i, name in enumerate(dict.fromkeys(names), start=1)}
  steps = np.zeros((len(ids) + 1, 256), np.int32)
  for state, each in found.items():
    for byte, behind in each.items():
      if byte != eos:
        steps[ids[state], byte] = ids[behind]
  is_end = np.zeros(len(steps), bool)
  is_end[[ids[name] for name in index.get_final_states()]] = True
  return steps, is_end


def _bytes_of(pattern: str) -> set[int]:
  """The bytes of all texts that match."""
  steps, _ = _byte_automaton(pattern)
  return {int(byte) for byte in np.flatnonzero(steps.any(axis=0))}


def _columns(
  steps: np.ndarray, spelled: Sequence[Sequence[bytes]]
) -> tuple[np.ndarray, list[np.ndarray]]:
  """Where each token leads from every state, `[N, S]`, each such column once,
  and the number of each token's, for several ways of spelling tokens.

  Of tokens 'a', 'ab' and 'b', column 'a' is found once, and 'ab' goes on from
  it; column 0 leads nowhere.
  """
  num_states = len(steps)
  known = [np.zeros_like(steps[:, 0]), np.arange(num_states, dtype=np.int32)]
  numbers = {column.tobytes(): i for i, column in enumerate(known)}
  behind: dict[tuple[int, int], int] = {}

  def go_on(before: int, byte: int) -> int:
    place = before, byte
    if place not in behind:
      column = steps[known[before], byte]
      name = column.tobytes()
      if name not in numbers:
        numbers[name] = len(known)
        known.append(column)
        # Many of them are only beginnings, or the same in the end.
        _check_size(num_states, len(known) // 4)
      behind[place] = numbers[name]
    return behind[place]

  found = []
  for texts in spelled:
    of_token = np.zeros(len(texts), np.int64)
    for i, text in enumerate(texts):
      column = 1 if text else 0
      for byte in text:
        column = column and go_on(column, byte)
      of_token[i] = column
    found.append(of_token)
  return np.stack(known), found


def _check_size(num_states: int, num_classes: int) -> None:
  size = 2 * num_states * num_classes
  if max(num_states, num_classes) >= _MOST or size > MAX_BYTES:
    raise ValueError(
      f'this grammar has {num_states:,} states and at least {num_classes:,} '
      f'classes of tokens, tables of {size / 2**20:.0f} MiB, and '
      f'{MAX_BYTES / 2**20:.0f} are the most: bound less, or name fewer fields'
    )


def _trimmed(
  classes: np.ndarray, table: np.ndarray, end: int
) -> tuple[np.ndarray, np.ndarray]:
  """Leaves out steps from which no text ends, states that none reaches, and
  what is there twice; ValueError if nothing is left."""
  is_alive = np.zeros(len(table), bool)
  is_alive[end] = True
  while (more := is_alive[table].any(axis=1) | is_alive).sum() > is_alive.sum():
    is_alive = more
  if not is_alive[_START]:
    raise ValueError(
      'no tokens of this vocabulary spell a text of this grammar'
    )
  table = np.where(is_alive[table], table, 0)
  is_reached = np.zeros(len(table), bool)
  edge = np.array([_FREE, _START])
  while edge.size:
    is_reached[edge] = True
    edge = np.unique(table[edge])
    edge = edge[~is_reached[edge]]
  ids = np.flatnonzero(is_reached)
  table = np.searchsorted(ids, table[ids])
  # States with the same steps are one; of their predecessors more may be then.
  while (of := _distinct(table)).max() + 1 < len(table):
    firsts = np.unique(of, return_index=True)[1]
    table = of[table[firsts]]
  of = _distinct(table.T)
  return of[classes], table[:, np.unique(of, return_index=True)[1]]


def _distinct(rows: np.ndarray) -> np.ndarray:
  """Numbers equal rows alike, in the order in which they come first."""
  numbers: dict[bytes, int] = {}
  rows = np.ascontiguousarray(rows)
  return np.array([numbers.setdefault(x.tobytes(), len(numbers)) for x in rows])


def _guesses(
  classes: np.ndarray,
  table: np.ndarray,
  texts: Sequence[bytes],
  vocabulary: AnyVocabulary,
) -> np.ndarray:
  """The token that is likeliest to come where one text alone may, -1 elsewhere.

  After '{"' the text `name":` may be spelled n|ame, name|":, and so on: the
  vocabulary's own spelling is the likeliest, else the longest token.
  """
  guesses = np.full(len(table), -1, np.int32)
  by_class = np.split(
    np.argsort(classes, kind='stable'),
    np.cumsum(np.bincount(classes, minlength=table.shape[1]))[:-1],
  )
  sizes = np.array([len(ids) for ids in by_class])
  num_tokens = (table != 0) @ sizes
  for state in np.flatnonzero((num_tokens > 0) & (num_tokens <= _FEW)):
    ids = [i for c in np.flatnonzero(table[state]) for i in by_class[c]]
    longest = max(ids, key=lambda i: len(texts[i]))
    text = texts[longest]
    # Texts that a longer one begins with are not another text; an end is.
    is_one = all(texts[i] and text.startswith(texts[i]) for i in ids)
    # Behind an end there is nothing but the end.
    is_last = table[state, classes[longest]] == state
    if (is_one or len(ids) == 1) and not is_last:
      guesses[state] = longest
  for state in np.flatnonzero(guesses >= 0):
    text, at = b'', state
    while len(text) < _LONG and guesses[at] >= 0 and texts[guesses[at]]:
      text += texts[guesses[at]]
      at = table[at, classes[guesses[at]]]
    try:
      own = vocabulary.encode(text.decode(), add_special_tokens=False)
    except UnicodeDecodeError:
      continue
    if own and table[state, classes[own[0]]]:
      guesses[state] = own[0]
  return guesses


def _bucket(size: int) -> int:
  """The next of 64, 96, 128, 192, ...: at most half as much again."""
  power = max(64, 2 ** (size - 1).bit_length())
  return power * 3 // 4 if size <= power * 3 // 4 and power > 64 else power
