"""Grammars: a regular expression or a JSON schema becomes an automaton over the
tokens of a vocabulary, as arrays for `specdec_jax.sampling.grammars`.

`outlines-core` parses; of its automaton over bytes each token's bytes make
steps. Tokens that lead from every state to the same ones are one class (some
hundred for a large schema), which keeps the tables small.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec_jax import base
from specdec_jax.files.require import require
from specdec_jax.text.vocabularies import AnyVocabulary, package_errors

# Of a row's tables; a cache of keys and values is as large.
MAX_BYTES = 32 * 2**20
_MOST = 2**16  # States or classes, in 16 bits.
_START = 1  # The state of an empty text; see `base.Grammar`.
# Bytes of a text that is looked for where it alone may come.
_LONG = 64
# Follows each text while its grammar is compiled: no character, and in none.
_END = '\U0010ffff'


@functools.lru_cache(maxsize=64)
def compiled(pattern: str, vocabulary: AnyVocabulary) -> base.Grammar:
  """The automaton of the texts that a regular expression matches as a whole, of
  one row, without an axis for it: `classes` has one entry per id of the
  vocabulary; tokens of class 0 are allowed in no state.

  Raises ValueError if it is none, its tables would be larger than `MAX_BYTES`,
  or no tokens spell any of its texts; ImportError without `outlines-core`.
  """
  steps, is_end = _byte_automaton(pattern)
  texts = token_bytes(vocabulary)
  if not vocabulary.eos_ids:
    raise ValueError(
      'a grammar needs a vocabulary with a token that ends texts'
    )
  drops_space = _drops_space(vocabulary, texts)
  if drops_space:
    # SentencePiece drops the space that begins a text. Texts begin in a copy of
    # the first state; its space leads to another copy, where no token ends.
    first = len(steps)
    steps[steps == _START] = first
    steps = np.vstack([steps, steps[_START], steps[_START]])
    steps[_START, ord(' ')] = first + 1
    is_end = np.append(is_end, [is_end[_START], False])
  columns, of_token = _columns(steps, texts)
  # Column 0, which leads nowhere, is always there.
  used = np.unique(np.append(0, of_token))
  classes = np.searchsorted(used, of_token)
  classes[list(vocabulary.eos_ids)] = len(used)
  end = len(steps)
  table = np.zeros((end + 1, len(used) + 1), np.int32)
  table[:end, :-1] = columns[used].T
  table[[*np.flatnonzero(is_end), end], -1] = end
  if drops_space:
    table[end - 1] = 0
  classes, table = _trimmed(classes, table)
  _check_size(*table.shape)
  guesses = _guesses(classes, table, steps, is_end, texts, vocabulary)
  made: base.Arrays = {
    'classes': classes.astype(np.uint16),
    'next': table.astype(np.uint16),
    'guesses': guesses,
    'states': np.int32(_START),
  }
  return base.Grammar(**made)


def token_bytes(vocabulary: AnyVocabulary) -> list[bytes]:
  """The bytes that each token adds to a text, none for what is no text;
  ValueError if the vocabulary does not say how its tokens are spelled."""
  spell = _speller(vocabulary)
  special = vocabulary.special_ids
  return [
    b'' if i in special else spell(token)
    for i, token in enumerate(vocabulary.tokens())
  ]


def _speller(vocabulary: AnyVocabulary) -> Callable[[str], bytes]:
  tokenizer = getattr(vocabulary, 'tokenizer', None)
  added: dict[str, bytes] = {}
  decoder = '"ByteFallback"'  # SentencePiece's own.
  if tokenizer is not None:
    # One of another package need not say how it spells.
    said = tokenizer.to_str() if hasattr(tokenizer, 'to_str') else '{}'
    parts = json.loads(said)
    decoder = json.dumps(parts.get('decoder'))
    tokens = [x['content'] for x in parts.get('added_tokens', ())]
    added = {token: token.encode() for token in tokens}
  if '"ByteLevel"' in decoder:
    table = _byte_of_character()
    return lambda token: added.get(token) or bytes(table[c] for c in token)
  if not ('"Metaspace"' in decoder or '"ByteFallback"' in decoder):
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


def _byte_automaton(pattern: str) -> tuple[np.ndarray, np.ndarray]:
  """Steps `[S, 256]` over bytes, 0 for none, from state 1 on, and where a text
  may end, bool `[S]`."""
  core = require('outlines_core', extra='grammar', purpose='a grammar')
  begin, eos = 256, 257
  tokens = {bytes([i]): [i] for i in range(256)} | {b'xyz': [begin]}
  bytes_of = core.Vocabulary(eos, tokens)
  advice = 'write it without anchors, word boundaries and look-around'
  with package_errors(f'this grammar cannot be compiled, {advice}'):
    # Behind x, a branch that begins with an anchor would just never match.
    if found := re.search(r'(?<!\\)(?:\\\\)*(\\A)', pattern):
      raise ValueError(f'it has the anchor {found[1]}')
    bare, before = re.sub(r'\\.', '', pattern), ''
    while bare != before:  # Classes may be within classes: [[:alpha:]^].
      before, bare = bare, re.sub(r'\[\^?\]?[^][]*\]', '', bare)
    if '^' in bare:
      raise ValueError('it has the anchor ^')
    depths = itertools.accumulate((c == '(') - (c == ')') for c in bare)
    if min(depths, default=0) < 0:
      core.Index(pattern, bytes_of)  # Of a)(b, it says what is wrong.
    # It searches: of `a|ab` it would leave out ab, having found a, and one that
    # may begin anywhere takes 2^n states of n characters. So an end follows,
    # and behind x, which is a match, no search begins.
    index = core.Index(f'x(?:yz(?:{pattern}){_END}|)', bytes_of)
  found, last = index.get_transitions(), index.get_final_states()
  _check_size(len(found), 1)
  start = found.pop(index.get_initial_state())[begin]
  names = dict.fromkeys([start, *found, *last])
  ids = {name: i for i, name in enumerate(names, start=_START)}
  steps = np.zeros((len(ids) + 1, 256), np.int32)
  for state, each in found.items():
    for byte, behind in each.items():
      if byte < begin:
        steps[ids[state], byte] = ids[behind]
  is_last = np.array([False, *(name in last for name in names)])
  ends: np.ndarray = np.arange(len(steps))
  for byte in _END.encode():
    ends = steps[ends, byte]
  is_end = is_last[ends]
  for _ in _END.encode():  # Leads nowhere else, byte by byte from the last on.
    steps[(~steps.any(axis=1) & ~is_end)[steps]] = 0
  return steps, is_end


def bytes_of(pattern: str) -> set[int]:
  """The bytes of all texts that match."""
  steps, _ = _byte_automaton(pattern)
  return {int(byte) for byte in np.flatnonzero(steps.any(axis=0))}


def _columns(
  steps: np.ndarray, texts: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Where tokens lead from every state, `[N, S]`, each such column once, and
  the number of each token's.

  Of tokens 'a', 'ab' and 'b', column 'a' is found once, and 'ab' goes on from
  it; column 0 leads nowhere.
  """
  num_states = len(steps)
  known = [np.zeros_like(steps[:, 0]), np.arange(num_states, dtype=np.int32)]
  numbers = {column.tobytes(): i for i, column in enumerate(known)}

  @functools.cache
  def go_on(before: int, byte: int) -> int:
    column = steps[known[before], byte]
    number = numbers.setdefault(column.tobytes(), len(known))
    if number == len(known):
      known.append(column)
      # Many of them are only beginnings, or the same in the end.
      _check_size(num_states, len(known) // 4)
    return number

  of_token = np.zeros(len(texts), np.int64)
  for i, text in enumerate(texts):
    # Column 1 is that of no bytes, which is no token.
    of_token[i] = functools.reduce(go_on, text, 1) if text else 0
  return np.stack(known), of_token


def _check_size(num_states: int, num_classes: int) -> None:
  size = 2 * num_states * num_classes
  if max(num_states, num_classes) >= _MOST or size > MAX_BYTES:
    raise ValueError(
      f'this grammar has {num_states:,} states and at least {num_classes:,} '
      f'classes of tokens, tables of {size / 2**20:.0f} MiB; at most '
      f'{_MOST - 1:,} of each and {MAX_BYTES / 2**20:.0f} MiB are possible: '
      'bound less, or name fewer fields'
    )


def _trimmed(
  classes: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Leaves out steps from which no text ends, and classes that are there twice;
  ValueError if nothing is left."""
  is_alive = np.zeros(len(table), bool)
  is_alive[-1] = True
  while (more := is_alive[table].any(axis=1) | is_alive).sum() > is_alive.sum():
    is_alive = more
  if not is_alive[_START]:
    raise ValueError(
      'no tokens of this vocabulary spell a text of this grammar'
    )
  table = np.where(is_alive[table], table, 0)
  # In order, so that what comes nowhere stays class 0.
  table, of = np.unique(table, axis=1, return_inverse=True)
  return of.reshape(-1)[classes], table


def _guesses(
  classes: np.ndarray,
  table: np.ndarray,
  steps: np.ndarray,
  is_end: np.ndarray,
  texts: Sequence[bytes],
  vocabulary: AnyVocabulary,
) -> np.ndarray:
  """Finds the likeliest token where all tokens begin one text; -1 elsewhere.

  After '{"' the text `name":` may be spelled n|ame, name|":, and so on: the
  vocabulary's own spelling is the likeliest, else the longest token.
  """
  lengths = np.array([*map(len, texts)])
  ids = np.argsort(lengths, kind='stable')
  longest = np.zeros(table.shape[1], np.int64)
  longest[classes[ids]] = ids  # Of each class, the last that is written.
  reach = np.where(table != 0, lengths[longest], -1)
  # States behind which one byte alone may come, or nothing but the end.
  is_forced = np.count_nonzero(steps, axis=1) + is_end == 1
  guesses = np.full(len(table), -1, np.int32)
  for state in np.flatnonzero(is_forced & (reach[:-1] >= 0).any(axis=1)):
    text, at = b'', state
    while len(text) < _LONG and is_forced[at] and not is_end[at]:
      byte = int(steps[at].argmax())
      text, at = text + bytes([byte]), steps[at, byte]
    token = longest[reach[state].argmax()]
    if lengths[token] <= len(text):
      readable = text.decode(errors='ignore')
      own = vocabulary.encode(readable, add_special_tokens=False)
      is_allowed = own and table[state, classes[own[0]]]
      guesses[state] = own[0] if is_allowed else token
  return guesses
