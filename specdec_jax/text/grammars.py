"""Grammars of texts: `llguidance` says on the host which tokens may come next.

https://github.com/guidance-ai/llguidance reads JSON schemas, regular
expressions and context-free grammars. `sampling.grammars` calls a `Reader`
between a draft and the target's call.

A matcher of llguidance is the state of a grammar after a text. It is changed by
what it reads, and goes back by as many tokens (`rollback`).
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.base import Context, Draft
from specdec_jax.files.require import require
from specdec_jax.text import token_bytes
from specdec_jax.text.vocabularies import AnyVocabulary

_log = logging.getLogger(__name__)
# Words of a mask: all of 32 tokens may come, or none.
_ALL, _NONE = -1, 0
# JSON has no spaces between its parts, unless a schema asks for them by
# llguidance's keyword `x-guidance`.
_JSON_OPTIONS = {'whitespace_flexible': False}


class _Spelling(NamedTuple):
  """A vocabulary as `llguidance.TokenizerWrapper` asks for it."""

  eos_token_id: int
  tokens: Sequence[bytes]
  special_token_ids: Sequence[int]
  encode: Callable[[str], list[int]]
  bos_token_id: int | None = None

  def __call__(self, text: str) -> list[int]:
    return self.encode(text)


class _Row(NamedTuple):
  """A row of a call: its text, int32 `[N]`, the matcher of that, the drafted
  tokens that count, and masks, int32 `[G + 1, W]`, which are to be filled."""

  name: int
  number: int
  text: np.ndarray
  matcher: Any
  draft: np.ndarray
  masks: np.ndarray


def of_option(name: str, text: str) -> str:
  """A grammar in llguidance's own form: of a `regex`, which matches a text as a
  whole, a `json_schema` as JSON, or a `grammar` in its form of Lark."""
  matcher = _llguidance().LLMatcher
  if name == 'json_schema':
    return matcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
  if name == 'regex':
    return matcher.grammar_from_regex(text)
  return matcher.grammar_from_lark(text)


class Reader:
  """Tells which tokens may follow texts.

  What a call returns depends on its arguments alone: the matchers that it keeps
  only save it from reading a text again at each iteration.

  Args:
    vocabulary: says how tokens are spelled; else ValueError, as if it has no
      token that ends texts.
    num_logits: ids of the model, some of them perhaps padding.
  """

  def __init__(self, vocabulary: AnyVocabulary, num_logits: int):
    if not vocabulary.eos_ids:
      raise ValueError(
        'a grammar needs a vocabulary with a token that ends texts'
      )
    spelled = token_bytes.token_bytes(vocabulary)
    self._drops_space = token_bytes.drops_first_space(vocabulary, spelled)
    if self._drops_space:
      # Not of a token that is the byte: no text begins with that.
      names = vocabulary.tokens()
      is_byte = lambda i: spelled[i] == b' ' and names[i] != '▁'
      spelled = [b'' if is_byte(i) else text for i, text in enumerate(spelled)]
    self._tokenizer = _tokenizer(vocabulary, spelled, num_logits)
    self._executor = _llguidance().LLExecutor()
    # Each grammar's text and limits, as JSON; their numbers count from 1 on.
    self._sources: list[tuple[str, str]] = []
    self._numbers: dict[tuple[str, str], int] = {}
    # By a row's name: its grammar's number, its last text, and the matcher.
    # No matcher is a copy: copies share the states that limits count.
    self._of_rows: dict[int, tuple[int, np.ndarray, Any]] = {}

  def number_of(
    self, text: str, limits: Mapping[str, Any] | None = None
  ) -> int:
    """Returns the number, from 1 on, of a grammar in llguidance's own JSON or
    its form of Lark. Raises ValueError, with llguidance's own sentence, if it
    is none or exceeds its limits, values of `llguidance.LLParserLimits`."""
    source = text, json.dumps(limits or {})
    if source in self._numbers:
      return self._numbers[source]
    # Not that of texts: a mask counts against the limits of what follows.
    matcher = self._matcher(*source)
    matcher.compute_bitmask()
    error = matcher.get_error().removesuffix('<non-verbose/>')
    if error.startswith('NoExtension'):
      raise ValueError(
        'no tokens of this vocabulary spell a text of this grammar'
      )
    if error:
      raise ValueError(_sentence(error))
    for warning in matcher.get_grammar_warnings():
      _log.warning('%s', warning)
    self._sources.append(source)
    return self._numbers.setdefault(source, len(self._sources))

  def __call__(
    self,
    rows: np.ndarray,
    context: Context,
    draft: Draft,
    *,
    paths: np.ndarray,
    completes: bool,
    is_certain: bool,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Completes drafts, and makes the masks of their positions.

    Args:
      rows: int32 `[B]`, names of the rows, by which matchers are kept.
      context: texts behind their prompts, and their grammars, all as numpy's
        arrays.
      draft: what follows the texts, without probabilities.
      paths: int32 `[L, D + 1]`, the draft's `trees.leaf_paths`.
      completes: whether a draft, then a chain, is completed.
      is_certain: whether no drafted token was drawn.

    Returns:
      Masks, int32 `[B, G + 1, W]`, 32 tokens a word, the first one lowest;
      the draft's tokens and lengths; and bool `[B, G]`, which of the tokens are
      the grammar's.
    """
    assert context.grammar is not None
    numbers = np.asarray(context.grammar.numbers)
    tokens, lengths = np.asarray(context.tokens), np.asarray(context.lengths)
    starts = np.asarray(context.starts)
    num_rows, gamma = draft.tokens.shape
    num_words = -(-self._tokenizer.vocab_size // 32)
    masks = np.full((num_rows, gamma + 1, num_words), _ALL, np.int32)
    drafted, draft_lengths = np.array(draft.tokens), np.array(draft.lengths)
    is_forced = np.zeros(drafted.shape, np.bool_)
    texts: list[_Row] = []
    for i in np.flatnonzero(numbers):
      name, number = int(rows[i]), int(numbers[i])
      text = tokens[i, starts[i] : lengths[i]]
      matcher = self._after(name, number, text)
      if matcher is None:  # The text has left its grammar.
        continue
      if completes:
        drafted_chain = drafted[i, : draft_lengths[i]].tolist()
        chain, is_forced_token = self._completed(
          matcher, drafted_chain, gamma=gamma, is_certain=is_certain
        )
        draft_lengths[i] = len(chain)
        drafted[i, : len(chain)] = chain
        is_forced[i, : len(chain)] = is_forced_token
      row_draft = drafted[i, : draft_lengths[i]]
      texts.append(_Row(name, number, text, matcher, row_draft, masks[i]))
    for path in paths:
      self._fill(texts, path)
    for row in texts:
      if not row.matcher.is_error():
        self._of_rows[row.name] = row.number, row.text.copy(), row.matcher
    return masks, drafted, draft_lengths, is_forced

  def _after(self, name: int, number: int, text: np.ndarray) -> Any | None:
    """Returns the matcher after a row's text, which reads only what the row's
    last text lacks. None if no text of the grammar begins so; an error, such as
    a limit, is the matcher's state."""
    # Several devices of a process call at once: what is taken is not there.
    last_number, last, matcher = self._of_rows.pop(name, (0, text, None))
    num_read = len(last)
    if number != last_number:
      matcher, num_read = self._matcher(*self._sources[number - 1]), 0
    elif not np.array_equal(last, text[:num_read]):
      matcher.reset()
      num_read = 0
    unread = text[num_read:].tolist()
    count = matcher.try_consume_tokens(unread) if unread else 0
    return matcher if count == len(unread) or matcher.is_error() else None

  def _completed(
    self,
    matcher: Any,
    drafted: Sequence[int],
    *,
    gamma: int,
    is_certain: bool,
  ) -> tuple[list[int], list[bool]]:
    """Completes a chain by the tokens that the grammar leaves no choice of.

    They take the place of what was drafted. Where a drafter has nothing to say,
    and only one text may follow, the chain has the likeliest spelling of that.
    Only if `is_certain` may it depend on a drafted token itself whether it is
    left out, as those that may not come.

    Returns at most `gamma` tokens, and whether each is the grammar's own. The
    matcher, of the text before the chain, is the same afterwards.
    """
    chain: list[int] = []
    is_forced: list[bool] = []
    # What the drafter says after the chain.
    rest = [*drafted]
    num_read = 0
    while len(chain) < gamma:
      forced = self._forced(matcher)
      if not forced and is_certain and not matcher.validate_tokens(rest[:1]):
        rest = []
      if not forced and not rest:
        forced = self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes())[:1]
        if not forced:
          break
      token = forced[0] if forced else rest[0]
      rest = rest[1:] if rest[:1] == [token] else []
      chain.append(token)
      is_forced.append(bool(forced))
      if not matcher.try_consume_tokens([token]):
        # What was drawn has to stay, though it may not come.
        break
      num_read += 1
    matcher.rollback(num_read)
    return chain + rest, is_forced + [False] * len(rest)

  def _forced(self, matcher: Any) -> list[int]:
    """The tokens that alone may come next, none if there is a choice."""
    if matcher.is_error():
      return []
    if matcher.is_stopped():
      # The text is complete; its end may have been read as well.
      has_ended = matcher.stop_reason() == 'EndOfSentence'
      return [] if has_ended else [self._tokenizer.eos_token]
    return matcher.compute_ff_tokens()[:1]

  def _fill(self, rows: Sequence[_Row], path: np.ndarray) -> None:
    """Makes the masks of texts and of their drafts along a path, in parallel
    for all rows."""
    if not rows:
      return
    nodes = [_nodes(row.draft, path) for row in rows]
    # llguidance asks for at least one drafted token.
    width = max(len(path), 2)
    masks = np.full((len(rows), width, rows[0].masks.shape[1]), _ALL, np.int32)
    drafts = [
      row.draft[nodes_of_row[1:] - 1].tolist() or [self._tokenizer.eos_token]
      for row, nodes_of_row in zip(rows, nodes, strict=True)
    ]
    llguidance = require(
      'llguidance.numpy', extra='grammar', purpose='a grammar'
    )
    llguidance.fill_next_token_bitmask_par_with_draft_tokens(
      self._executor,
      [
        (row.matcher, i * width, draft)
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True))
      ],
      masks.reshape(-1, masks.shape[2]),
    )
    for row, nodes_of_row, masks_of_row in zip(rows, nodes, masks, strict=True):
      if row.matcher.is_error():
        self._fill_until_error(row, nodes_of_row)
      else:
        row.masks[nodes_of_row] = masks_of_row[: len(nodes_of_row)]

  def _fill_until_error(self, row: _Row, nodes: np.ndarray) -> None:
    """Makes masks one by one, each by a matcher that has read nothing else, as
    that of plain decoding. At an error, such as a limit, no token may come."""
    row.masks[nodes] = _NONE
    for depth, node in enumerate(nodes):
      text = np.append(row.text, row.draft[nodes[1 : depth + 1] - 1])
      matcher = self._after(row.name, row.number, text)
      if matcher is None:
        row.masks[nodes[depth:]] = _ALL
        return
      words = np.frombuffer(matcher.compute_bitmask(), np.int32)
      if matcher.is_error():
        error = _sentence(matcher.get_error())
        _log.warning('a grammar ended a text: %s', error)
        return
      row.masks[node] = words[: row.masks.shape[1]]

  def _matcher(self, text: str, limits: str) -> Any:
    """Makes the matcher of no text."""
    llguidance = _llguidance()
    try:
      limits_of_size = llguidance.LLParserLimits(
        **{'verbose_errors': False, **json.loads(limits)}
      )
    except (TypeError, OverflowError) as error:
      raise ValueError(f'grammar_limits: {error}') from error
    return llguidance.LLMatcher(
      self._tokenizer,
      _after_space(text) if self._drops_space else text,
      limits=limits_of_size,
      log_level=0,
    )


# Readers are shared by all who ask for the same vocabulary and logits.
reader_of = functools.lru_cache(maxsize=8)(Reader)


def _nodes(draft: np.ndarray, path: np.ndarray) -> np.ndarray:
  """The nodes of a path, from its root down to the last that a draft has."""
  # Node n is the drafted token n - 1; one that is no token ends a path.
  below = path[(path > 0) & (path <= len(draft))]
  is_token = draft[below - 1] >= 0
  return np.append(0, below[: np.argmin([*is_token, False])])


def _tokenizer(
  vocabulary: AnyVocabulary, spelled: Sequence[bytes], num_logits: int
) -> Any:
  """Makes llguidance's view of a vocabulary, with as many ids as logits."""
  names = vocabulary.tokens()
  special = sorted(i for i in vocabulary.special_ids if i < num_logits)
  # A vocabulary may have further ids, for larger models of its family.
  tokens = [*spelled, *[b''] * num_logits][:num_logits]
  for token_id in special:  # A grammar may name them, as `<|im_end|>`.
    tokens[token_id] = names[token_id].encode()

  def encode(text: str) -> list[int]:
    # Most vocabularies of SentencePiece put a space before a text.
    for candidate in (text, text.removeprefix(' ')):
      ids = vocabulary.encode(candidate, add_special_tokens=False)
      is_known = all(i < num_logits for i in ids)
      if is_known and b''.join(spelled[i] for i in ids) == text.encode():
        return ids
    return tokenizer.greedy_tokenize(text)

  llguidance = _llguidance()
  spelling = _Spelling(vocabulary.eos_ids[0], tokens, special, encode)
  tokenizer = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(spelling), eos_token=list(vocabulary.eos_ids)
  )
  return tokenizer


def _after_space(text: str) -> str:
  """The grammar of the same texts after a space, which a SentencePiece
  vocabulary puts before each text and takes away again."""
  is_json = text.lstrip().startswith('{')
  inner = json.loads(text)['grammars'] if is_json else [{'lark_grammar': text}]
  named = {**inner[0], 'name': 'text'}
  start = {'lark_grammar': 'start: " " @text'}
  return json.dumps({'grammars': [start, named, *inner[1:]]})


def _sentence(error: str) -> str:
  """An error of llguidance in one line, without pictures of the place."""
  lines = (line.strip() for line in error.splitlines())
  is_picture = re.compile(r'\^*|\d+ \|.*').fullmatch
  return ' '.join(line for line in lines if not is_picture(line))


def _llguidance() -> Any:
  return require('llguidance', extra='grammar', purpose='a grammar')
