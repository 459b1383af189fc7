"""Vocabularies: convert text to token ids and back."""

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from specdec_jax.files.require import require
from specdec_jax.text import chat_templates
from specdec_jax.text.chat_templates import Messages, Tools

SENTINEL = '<extra_id_'
_REPLACEMENT = '\N{REPLACEMENT CHARACTER}'
# The token of a byte, in vocabularies of SentencePiece and of `tokenizers`.
_BYTE_TOKEN = re.compile('<0x([0-9A-Fa-f]{2})>')


class AnyVocabulary(Protocol):
  """The interface of vocabularies: `Vocabulary` for those of `tokenizers`, and
  `SentencePieceVocabulary` for SentencePiece models.

  Both are frozen dataclasses; the methods are documented at `Vocabulary`.
  """

  __dataclass_fields__: ClassVar[dict[str, Any]]

  def __hash__(self) -> int: ...

  @property
  def eos_ids(self) -> tuple[int, ...]: ...
  @property
  def roles(self) -> Mapping[str, str]: ...
  @property
  def chat_template(self) -> str | None: ...
  @property
  def tool_template(self) -> str | None: ...
  @property
  def vocab_size(self) -> int: ...
  @property
  def special_ids(self) -> frozenset[int]: ...

  def encode(
    self, text: str, *, add_special_tokens: bool = True
  ) -> list[int]: ...
  def encode_chat(
    self,
    messages: str | Messages,
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] | None = None,
  ) -> list[int]: ...
  def decode(
    self, ids: Sequence[int], *, keep_special: bool = False
  ) -> str: ...
  def pieces(self, ids: Sequence[int]) -> list[str]: ...
  def token_to_id(self, token: str) -> int | None: ...
  def id_to_text(self, token_id: int) -> str: ...
  def tokens(self) -> list[str]: ...


def encode_chat(
  vocabulary: AnyVocabulary,
  messages: str | Messages,
  tools: Tools = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
  """Encodes a conversation that the model is to continue; see
  `apply_chat_template`."""
  text = apply_chat_template(vocabulary, messages, tools, template_kwargs)
  return vocabulary.encode(text, add_special_tokens=False)


def text_pieces(vocabulary: AnyVocabulary, ids: Sequence[int]) -> list[str]:
  """Returns the text that every token adds; joined, they are the whole text. A
  character of several tokens belongs to the last of them."""
  state = TextStream()
  # "é" of two byte tokens is ['', 'é'].
  pieces = []
  for token_id in ids:
    text, state = stream_text(vocabulary, state, [token_id], keep_special=True)
    pieces.append(text)
  if pieces:
    pieces[-1] += flush_text(vocabulary, state, keep_special=True)
  return pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
  """A `tokenizers.Tokenizer`, the ids that end a text, and a Jinja chat
  template as Hugging Face defines them, with the tokens that it may name by
  `roles` such as `bos_token`."""

  tokenizer: Any
  eos_ids: tuple[int, ...] = ()
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
  chat_template: str | None = None
  tool_template: str | None = None

  @functools.cached_property
  def vocab_size(self) -> int:
    """Returns the number of ids. A model's can be larger, with padding."""
    return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Returns the ids of special tokens, which have no text."""
    added = self.tokenizer.get_added_tokens_decoder()
    return frozenset(self.eos_ids) | {
      i for i, token in added.items() if token.special
    }

  def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Encodes a text, possibly empty; special tokens in it are recognised.

    `add_special_tokens` adds those that the tokenizer puts around every text,
    such as Llama's begin-of-text, which rendered chats already contain. Raises
    ValueError if the tokenizer cannot encode the text.
    """
    with package_errors('the tokenizer cannot encode this text'):
      return self.tokenizer.encode(
        text, add_special_tokens=add_special_tokens
      ).ids

  encode_chat = encode_chat
  pieces = text_pieces

  def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decodes token ids; bytes that are not UTF-8 become U+FFFD, and those
    around them keep their text."""
    ids = [int(i) for i in ids]
    with package_errors('the tokenizer cannot decode these ids'):
      text = self.tokenizer.decode(ids, skip_special_tokens=not keep_special)
      if _REPLACEMENT not in text or not self._has_byte_tokens:
        return text
      # `tokenizers` decodes all or none of a run of byte tokens: the bytes of
      # 'é' and the first of another 'é' become three U+FFFD, but 'é\ufffd' in
      # SentencePiece, whose tokens they are.
      tokens = [self.tokenizer.id_to_token(i) for i in ids]
      hidden = set() if keep_special else self._special_tokens
      shown = [token for token in tokens if token and token not in hidden]
      return self.tokenizer.decoder.decode(_without_broken_bytes(shown))

  @functools.cached_property
  def _has_byte_tokens(self) -> bool:
    """Tells whether tokens such as `<0x0A>` are bytes of a text."""
    decoder = self.tokenizer.decoder
    return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

  @functools.cached_property
  def _special_tokens(self) -> set[str]:
    added = self.tokenizer.get_added_tokens_decoder()
    return {token.content for token in added.values() if token.special}

  def token_to_id(self, token: str) -> int | None:
    """Returns the id of a token by its name; None if there is none."""
    return self.tokenizer.token_to_id(token)

  def id_to_text(self, token_id: int) -> str:
    """Returns the token's text, or its name if it has no text."""
    text = self.decode([token_id], keep_special=True)
    if text and _REPLACEMENT not in text:
      return text
    token = self.tokenizer.id_to_token(int(token_id))
    return f'<id {int(token_id)}>' if token is None else token

  def tokens(self) -> list[str]:
    """Lists the token of each id below `vocab_size`; '' where there is none."""
    # Ids may have gaps, as those of added tokens do in some models.
    tokens = [''] * self.vocab_size
    for token, token_id in self.tokenizer.get_vocab().items():
      tokens[token_id] = token
    return tokens


def _without_broken_bytes(tokens: Sequence[str]) -> list[str]:
  """Replaces byte tokens outside of UTF-8 characters by U+FFFD."""
  result: list[str] = []
  is_byte = lambda token: _BYTE_TOKEN.fullmatch(token) is not None
  for is_run, group in itertools.groupby(tokens, is_byte):
    run = list(group)
    if not is_run:
      result += run
      continue
    # Python decodes a byte outside of a character as a lone surrogate: the
    # three bytes of 'é' and of half an 'é' are 'é\udcc3'.
    values = bytes(int(token[3:5], 16) for token in run)
    start = 0
    for character in values.decode(errors='surrogateescape'):
      num_bytes = len(character.encode(errors='surrogateescape'))
      is_broken = '\udc80' <= character <= '\udcff'
      result += [_REPLACEMENT] if is_broken else run[start : start + num_bytes]
      start += num_bytes
  return result


@dataclasses.dataclass(frozen=True)
class TextStream:
  """The state of a streamed text.

  Attributes:
    shown: ids of the last text that was returned, which affect spacing.
    pending: ids whose text has not been returned completely.
    num_returned: characters of the text of `pending` that have been returned.
  """

  shown: tuple[int, ...] = ()
  pending: tuple[int, ...] = ()
  num_returned: int = 0


def stream_text(
  vocabulary: AnyVocabulary,
  state: TextStream,
  ids: Sequence[int],
  *,
  keep_special: bool = False,
) -> tuple[str, TextStream]:
  """Returns the text that new tokens add, perhaps empty, and the new state.

  An incomplete UTF-8 character is held back. `state` is `TextStream()` at the
  start, then the one that the last call returned.
  """
  # "é" is two bytes: after the token of the first, the text ends in U+FFFD, and
  # the character is returned with the token of the second.
  pending = state.pending + tuple(int(i) for i in ids)
  text = _text_of_pending(vocabulary, state.shown, pending, keep_special)
  complete = text.rstrip(_REPLACEMENT)
  new = complete[state.num_returned :]
  if not text or complete != text:
    num_returned = state.num_returned + len(new)
    return new, TextStream(state.shown, pending, num_returned)
  # SentencePiece drops a leading space: if `shown` were a lone space piece, it
  # would also drop that of the next word.
  is_text = vocabulary.decode(pending, keep_special=keep_special)
  return new, TextStream(pending if is_text else state.shown + pending)


def flush_text(
  vocabulary: AnyVocabulary, state: TextStream, *, keep_special: bool = False
) -> str:
  """Returns the text that `stream_text` held back, at the end of a stream."""
  shown, pending = state.shown, state.pending
  text = _text_of_pending(vocabulary, shown, pending, keep_special)
  return text[state.num_returned :]


def _text_of_pending(
  vocabulary: AnyVocabulary,
  shown: tuple[int, ...],
  pending: tuple[int, ...],
  keep_special: bool,
) -> str:
  """Returns the text that `pending` tokens add to `shown` ones."""
  # Decoders drop or add spaces between tokens, so that a text is not the sum of
  # the texts of its tokens: decode with and without the pending ones.
  before = vocabulary.decode(shown, keep_special=keep_special)
  after = vocabulary.decode(shown + pending, keep_special=keep_special)
  return after[len(before) :]


def turn_text(vocabulary: AnyVocabulary, ids: Sequence[int], shown: str) -> str:
  """Returns the text of an answer as a turn of a conversation.

  It is what was shown of the answer, together with the special tokens that the
  chat template names and that are not shown, so that the template can tell
  thoughts and tool calls from the rest: Gemma 4 writes its thoughts between
  `<|channel>` and `<channel|>`, and its template drops them from earlier turns.

  Args:
    vocabulary: with a chat template.
    ids: of the answer.
    shown: their text without special tokens, up to where it was broken off.
  """
  template = vocabulary.chat_template or ''
  turn, num_shown, state = '', 0, TextStream()
  for token_id in ids:
    is_special = token_id in vocabulary.special_ids
    if is_special and token_id not in vocabulary.eos_ids:
      name = vocabulary.id_to_text(token_id)
      turn += name if name in template else ''
      continue
    piece, state = stream_text(vocabulary, state, [token_id])
    turn += piece[: len(shown) - num_shown]
    num_shown += len(piece)
    if num_shown > len(shown):
      break
  # The last piece may be an unfinished character, which is shown in the end.
  return turn + shown[num_shown:]


def apply_chat_template(
  vocabulary: AnyVocabulary,
  messages: str | Messages,
  tools: Tools = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> str:
  """Renders a conversation with the chat template, up to the generation prompt;
  the text is to be encoded without special tokens.

  Messages are `{'role': ..., 'content': ...}`; a string is a user message.
  Tools are JSON schemas of functions, for which a model may have a separate
  template. Raises ValueError if there is no template, or as
  `chat_templates.apply`.
  """
  template = vocabulary.chat_template
  if template is None:
    raise ValueError(
      'this model has no chat template: it can only continue plain text'
    )
  if tools is not None and vocabulary.tool_template is not None:
    template = vocabulary.tool_template
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  return chat_templates.apply(
    template,
    messages,
    tools=tools,
    roles=vocabulary.roles,
    template_kwargs=template_kwargs or {},
  )


def check_same_vocabulary(target: AnyVocabulary, draft: AnyVocabulary) -> None:
  """Raises ValueError unless every id is the same token in both, with the
  numbers of tokens and the first difference."""
  if target == draft:  # To list the pieces of SentencePiece takes time.
    return
  # SentencePiece has a space in the names of sentinels, transformers does not.
  tokens_of = lambda vocabulary: [
    token.replace(f'▁{SENTINEL}', SENTINEL) for token in vocabulary.tokens()
  ]
  target_tokens = tokens_of(target)
  draft_tokens = tokens_of(draft)
  if target_tokens == draft_tokens:
    return
  # The shorter list is filled with ''.
  pairs = enumerate(
    itertools.zip_longest(target_tokens, draft_tokens, fillvalue='')
  )
  i, target_token, draft_token = next(
    (i, a, b) for i, (a, b) in pairs if a != b
  )
  raise ValueError(
    'target and draft model need one vocabulary: the target has '
    f'{len(target_tokens)} tokens, the draft model {len(draft_tokens)}, and id '
    f'{i} is the first that differs: {target_token!r} to the target and '
    f'{draft_token!r} to the draft model'
  )


@contextlib.contextmanager
def package_errors(message: str) -> Iterator[None]:
  """Converts what the `tokenizers` package raises to a ValueError: bare
  exceptions and, where its Rust code panics, a `BaseException`."""
  try:
    yield
  except BaseException as error:
    is_panic = type(error).__name__ == 'PanicException'
    if not is_panic and not isinstance(error, Exception):
      raise
    raise ValueError(f'{message}: {error}') from error


def import_tokenizers() -> Any:
  """Imports the `tokenizers` package, or the ImportError of `require`."""
  return require('tokenizers', extra='models', purpose='a vocabulary')
