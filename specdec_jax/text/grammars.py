"""Grammars of texts: `llguidance` says on the host which tokens may come next.

https://github.com/guidance-ai/llguidance reads JSON schemas, regular
expressions and context-free grammars. `sampling.grammars` calls a `Reader`
between a draft and the target's call.
"""

import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.files.require import require
from specdec_jax.text import matchers, token_bytes
from specdec_jax.text.vocabularies import AnyVocabulary

_log = logging.getLogger(__name__)
# Words of a mask: all of 32 tokens may come, or none.
_ALL, _NONE = -1, 0
# How many matchers are kept for each row of a call. Other devices of this
# process call with rows of their own.
_KEPT_PER_ROW = 16
# JSON has no spaces between its parts, unless a schema asks for them by
# llguidance's keyword `x-guidance`.
_JSON_OPTIONS = {'whitespace_flexible': False}


@dataclasses.dataclass(frozen=True)
class Source:
  """A grammar as text.

  Attributes:
    text: in llguidance's own JSON, or in its form of Lark.
    limits: names and values of `llguidance.LLParserLimits`.
  """

  text: str
  limits: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Spelling:
  """A vocabulary as `llguidance.TokenizerWrapper` asks for it."""

  eos_token_id: int
  tokens: Sequence[bytes]
  special_token_ids: Sequence[int]
  encode: Callable[[str], list[int]]
  bos_token_id: int | None = None

  def __call__(self, text: str) -> list[int]:
    return self.encode(text)


class _Job(NamedTuple):
  """What `Reader._fill` is to do.

  Attributes:
    text: the number of its grammar, and its tokens, int32 `[N]`.
    matcher: of the text.
    draft: tokens behind the text.
    nodes: int `[D + 1]`, the places of text and draft among the row's masks.
    masks: int32 `[G + 1, W]`, the row's.
  """

  text: tuple[int, np.ndarray]
  matcher: Any
  draft: list[int]
  nodes: np.ndarray
  masks: np.ndarray


def of_regex(pattern: str) -> str:
  """The grammar of the texts that a regular expression matches as a whole."""
  return _llguidance().LLMatcher.grammar_from_regex(pattern)


def of_json_schema(schema: str) -> str:
  """The grammar of a JSON schema, itself given as JSON."""
  matcher = _llguidance().LLMatcher
  return matcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)


def of_lark(text: str) -> str:
  """The grammar of a text in llguidance's form of Lark."""
  return _llguidance().LLMatcher.grammar_from_lark(text)


@functools.lru_cache(maxsize=8)
def reader_of(vocabulary: AnyVocabulary, num_logits: int) -> 'Reader':
  """The reader of a vocabulary and a model of `num_logits` ids, some of them
  perhaps padding. Raises ImportError without llguidance, and ValueError if the
  vocabulary has no token that ends texts, or does not say how its tokens are
  spelled."""
  return Reader(vocabulary, num_logits)


class Reader:
  """Tells which tokens may follow texts.

  What a call returns depends on its arguments alone: the matchers that it keeps
  only save it from reading a text again at each iteration.
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
    self._numbers: dict[Source, int] = {}
    self._sources: list[Source] = []
    self._first = functools.lru_cache(maxsize=256)(self._matcher)
    self._matchers = matchers.Matchers(
      lambda number: self._first(self._sources[number - 1]).deep_copy()
    )

  def number_of(self, source: Source) -> int:
    """Returns the number of a grammar, from 1 on. Raises ValueError, with
    llguidance's own sentence, if it is none or exceeds its limits."""
    if source in self._numbers:
      return self._numbers[source]
    matcher = self._matcher(source)
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
    self._numbers[source] = len(self._sources)
    return len(self._sources)

  def __call__(
    self,
    numbers: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    drafted: np.ndarray,
    draft_lengths: np.ndarray,
    *,
    paths: np.ndarray | None,
    completes: bool,
    is_certain: bool,
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Completes drafts, and makes the masks of their positions.

    Args:
      numbers: int32 `[B]`, the rows' grammars; 0 allows all tokens.
      starts: int32 `[B]`, where texts begin, behind their prompts.
      lengths: int32 `[B]`, where they end.
      tokens: int32 `[B, S]`.
      drafted: int32 `[B, G]`, what follows the texts.
      draft_lengths: int32 `[B]`, how many of these count.
      paths: int32 `[L, D + 1]`, of `trees.leaf_paths`; None for a chain.
      completes: whether chains are completed by `matchers.completed`.
      is_certain: see there.

    Returns:
      Masks, int32 `[B, G + 1, W]`, 32 tokens a word, the first one lowest;
      the drafts, int32 `[B, G]` and `[B]`; and bool `[B, G]`, which of their
      tokens are the grammar's.
    """
    num_rows, gamma = drafted.shape
    num_words = -(-self._tokenizer.vocab_size // 32)
    masks = np.full((num_rows, gamma + 1, num_words), _ALL, np.int32)
    drafted, draft_lengths = drafted.copy(), draft_lengths.copy()
    is_forced = np.zeros(drafted.shape, np.bool_)
    jobs: list[_Job] = []
    read = []
    for row in np.flatnonzero(numbers):
      text = int(numbers[row]), tokens[row, starts[row] : lengths[row]]
      matcher = self._matchers.take(*text, width=gamma + 1)
      if matcher is None:  # The text has left its grammar.
        continue
      read.append((text, matcher))
      if paths is not None:
        jobs += _of_tree(text, matcher, drafted[row], paths, masks[row])
        continue
      chain = drafted[row, : draft_lengths[row]].tolist()
      if completes:
        chain, is_forced[row, : len(chain)] = matchers.completed(
          *(matcher, self._tokenizer, chain),
          gamma=gamma,
          is_certain=is_certain,
        )
        drafted[row, : len(chain)] = chain
        draft_lengths[row] = len(chain)
      nodes = np.arange(len(chain) + 1)
      jobs.append(_Job(text, matcher, chain, nodes, masks[row]))
    self._fill(jobs)
    for text, matcher in read:
      if not matcher.is_error():
        self._matchers.keep(*text, matcher, most=_KEPT_PER_ROW * num_rows)
    return masks, drafted, draft_lengths, is_forced

  def _fill(self, jobs: Sequence[_Job]) -> None:
    """Makes the masks of jobs, in parallel."""
    if not jobs:
      return
    # llguidance asks for at least one drafted token.
    drafts = [job.draft or [self._tokenizer.eos_token] for job in jobs]
    width = 1 + max(map(len, drafts))
    num_words = jobs[0].masks.shape[1]
    found = np.full((len(jobs) * width, num_words), _ALL, np.int32)
    llguidance = require(
      'llguidance.numpy', extra='grammar', purpose='a grammar'
    )
    fill = llguidance.fill_next_token_bitmask_par_with_draft_tokens
    places = range(0, len(found), width)
    matchers_of_jobs = [job.matcher for job in jobs]
    fill(
      self._executor,
      [*zip(matchers_of_jobs, places, drafts, strict=True)],
      found,
    )
    for i, job in enumerate(jobs):
      if job.matcher.is_error():
        self._fill_until_error(job)
      else:
        job.masks[job.nodes] = found[i * width :][: len(job.nodes)]

  def _fill_until_error(self, job: _Job) -> None:
    """Makes the masks of a job one by one. At an error, such as a limit, no
    token may come; masks before it are those of plain decoding."""
    job.masks[job.nodes] = _NONE
    matcher = self._matchers.take(*job.text, width=0) or job.matcher
    for node, token in zip(job.nodes, [*job.draft, None], strict=True):
      copy = matcher.deep_copy()
      words = np.frombuffer(copy.compute_bitmask(), np.int32)
      if copy.is_error():
        _log.warning('a grammar ended a text: %s', _sentence(copy.get_error()))
        return
      job.masks[node] = words[: job.masks.shape[1]]
      if token is None or not matcher.try_consume_tokens([token]):
        job.masks[job.nodes[job.nodes > node]] = _ALL
        return

  def _matcher(self, source: Source) -> Any:
    """Makes the matcher of no text."""
    llguidance = _llguidance()
    text = _after_space(source.text) if self._drops_space else source.text
    try:
      limits = llguidance.LLParserLimits(
        **{'verbose_errors': False, **dict(source.limits)}
      )
    except (TypeError, OverflowError) as error:
      raise ValueError(f'grammar_limits: {error}') from error
    return llguidance.LLMatcher(
      self._tokenizer, text, limits=limits, log_level=0
    )


def _of_tree(
  text: tuple[int, np.ndarray],
  matcher: Any,
  drafted: np.ndarray,
  paths: np.ndarray,
  masks: np.ndarray,
) -> Iterator[_Job]:
  """Lists the jobs of a tree, one for each path to a leaf."""
  for i, path in enumerate(paths):
    # Node n is the drafted token n - 1; those that are no token end a path.
    below = path[1:][path[1:] > 0]
    is_token = drafted[below - 1] >= 0
    below = below[: np.argmin([*is_token, False])]
    own = matcher if i == 0 else matcher.deep_copy()
    nodes = np.array([0, *below])
    yield _Job(text, own, drafted[below - 1].tolist(), nodes, masks)


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
