"""Reads prompts, and packs them into batches of one shape."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from specdec_jax.base import Prompt
from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.models import families
from specdec_jax.models.families import Config, has_encoder
from specdec_jax.text import chat_templates
from specdec_jax.text.chat_templates import Messages, Tools
from specdec_jax.text.vocabularies import AnyVocabulary

# Prompt buffers are padded to a multiple of this, so that similar prompts share
# compiled programs.
_BUCKET = 64
# The key of a chat template's variables, as in vLLM.
TEMPLATE_KWARGS = 'chat_template_kwargs'
# A text to continue, or a conversation to answer.
Text = Union[str, 'Dialogue']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """A batch of prompts.

  Attributes:
    prompt: the packed prompts. Rows beyond `texts` only fill the batch, and are
      finished from the start.
    texts: the prompts as text.
    stops: the stop strings of every row.
    is_plain: whether a prompt is continued without a chat template.
    keys: random keys `[B]`, if prompts have their own settings.
  """

  prompt: Prompt
  texts: tuple[str, ...]
  stops: tuple[Sequence[str], ...] = ()
  is_plain: tuple[bool, ...] = ()
  keys: Any = None


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """A conversation to answer: messages for the chat template, tools that the
  answer may call, as JSON schemas, and variables of the template. `str` returns
  the last message."""

  messages: Messages
  tools: Tools = None
  template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    return chat_templates.content_text(self.messages[-1].get('content'))


def dialogue(
  messages: Any, tools: Any, place: str, template_kwargs: Any = None
) -> Dialogue:
  """Checks the types of messages, tools and variables, and that messages have
  a role; ValueError with the place in the input otherwise."""
  for name, objects in (('messages', messages), ('tools', tools or [{}])):
    is_list = isinstance(objects, list | tuple) and objects
    if not is_list or not all(isinstance(item, Mapping) for item in objects):
      raise ValueError(f'{place}: {name} should be a list of objects')
  for message in messages:
    if not isinstance(message.get('role'), str):
      raise ValueError(f'{place}: a message has no "role": {message!r:.80}')
  template_kwargs = {} if template_kwargs is None else template_kwargs
  check_template_kwargs(template_kwargs, place)
  _check_json([messages, tools], place)
  return Dialogue(messages, tools, template_kwargs)


def check_template_kwargs(values: Any, place: str) -> None:
  """Raises ValueError, with the place, unless names map to `values`."""
  is_named = isinstance(values, Mapping) and all(
    isinstance(name, str) for name in values
  )
  if not is_named:
    raise ValueError(
      f'{place}: {TEMPLATE_KWARGS} should be an object such as '
      f'{{"enable_thinking": false}}, got {values!r:.80}'
    )
  _check_json(values, place)


def _check_json(value: Any, place: str) -> None:
  """Raises ValueError for values without JSON, which a template may print."""
  try:
    text = json.dumps(value, ensure_ascii=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{place}: {error}') from error
  text_lines.check_encodable(text, place)


def with_template_kwargs(
  text: Text, template_kwargs: Mapping[str, Any]
) -> Dialogue:
  """Returns a conversation with further template variables, which its own
  override; a string becomes a user message."""
  if isinstance(text, str):
    text = Dialogue([{'role': 'user', 'content': text}])
  values = {**template_kwargs, **text.template_kwargs}
  return dataclasses.replace(text, template_kwargs=values)


class Line(NamedTuple):
  """A prompt, its place in the input, and other fields of its JSON line."""

  text: Text
  place: str
  fields: Mapping[str, Any] = {}


def read(prompt: str | None, path: str | None) -> list[Line]:
  """Reads the prompts of `--prompt` or `--prompts`.

  A file is JSONL if its name ends in .jsonl or its first line is a JSON object,
  with "prompt", or with "messages" and "tools"; otherwise it has one prompt per
  line. A line with "chat_template_kwargs" uses the chat template. Blank lines
  are skipped. Raises ValueError if a prompt is empty, there is none, or the
  file is malformed.
  """
  if prompt is not None:
    if not prompt.strip():
      raise ValueError('the prompt is empty')
    text_lines.check_encodable(prompt, 'the prompt')
    return [Line(prompt, 'the prompt')]
  assert path is not None
  lines = [(place, line) for place, line in _lines_of(path) if line.strip()]
  if not lines:
    raise ValueError(f'{path} has no prompt')
  if path.endswith('.jsonl') or _is_object(lines[0][1]):
    return [_prompt_of(line, place) for place, line in lines]
  return [Line(line, place) for place, line in lines]


def _lines_of(path: str) -> Iterator[tuple[str, str]]:
  """Yields the lines of a file, or of standard input, each after its place."""
  if path != '-':
    return text_lines.read(user_path(path))
  if sys.stdin is None:
    raise ValueError('standard input is closed, and --prompts - reads it')
  return text_lines.decoded(sys.stdin.buffer, 'standard input')


def _is_object(line: str) -> bool:
  try:
    return isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):
    return False


def _prompt_of(line: str, place: str) -> Line:
  """Reads the key "prompt" of a line, or else "messages" and "tools", and the
  variables of a chat template."""
  try:
    record = text_lines.parse_object(line, place)
  except ValueError as error:
    raise ValueError(
      f'{error}, as the file is JSONL by its name or its first line: write '
      '{"prompt": "..."} on each line; text prompts go into a .txt file'
    ) from error
  template_kwargs = record.pop(TEMPLATE_KWARGS, None)
  if 'messages' in record and 'prompt' not in record:
    messages, tools = record.pop('messages'), record.pop('tools', None)
    text = dialogue(messages, tools, place, template_kwargs)
    return Line(text, place, record)
  prompt = text_lines.text_under(record, 'prompt', place)
  if not prompt.strip():
    raise ValueError(f'{place}: the prompt is empty')
  del record['prompt']
  if template_kwargs is None:
    return Line(prompt, place, record)
  check_template_kwargs(template_kwargs, place)
  return Line(with_template_kwargs(prompt, template_kwargs), place, record)


def encode(
  vocabulary: AnyVocabulary,
  texts: Sequence[Text],
  *,
  config: Config,
  is_chat: bool,
  system: str | None = None,
) -> list[list[int]]:
  """Encodes every prompt, with special tokens if the family expects them;
  conversations always use the chat template. ValueError if a prompt has no
  tokens, or one without an embedding, or the model has no chat template."""
  begin = [] if system is None else [{'role': 'system', 'content': system}]
  add_special = families.of(config).adds_special_tokens(config)
  rows = []
  for i, text in enumerate(texts, start=1):
    if is_chat and isinstance(text, str):
      text = Dialogue([{'role': 'user', 'content': text}])
    try:
      if isinstance(text, str):
        row = vocabulary.encode(text, add_special_tokens=add_special)
      else:
        messages = [*begin, *text.messages]
        row = vocabulary.encode_chat(messages, text.tools, text.template_kwargs)
    except ValueError as error:
      raise ValueError(f'prompt {i}: {error}') from error
    rows.append(row)
    if not row:
      raise ValueError(f'prompt {i} is empty: it has no tokens')
    if max(row) >= config.vocab_size:
      token = vocabulary.id_to_text(max(row))
      raise ValueError(
        f'prompt {i} has token {token!r}, for which the model has no embedding'
      )
  return rows


def batches(
  texts: Sequence[Text],
  rows: Sequence[Sequence[int]],
  *,
  config: Config,
  batch_size: int,
  max_new_tokens: Sequence[int],
  num_rows: int,
) -> list[Batch]:
  """Packs all prompts, `batch_size` at a time, into batches of `num_rows`; see
  `pack`. Row ids number the whole list, so that a row's random draws do not
  depend on its batch."""
  # Of 100 ids the width is 128: -100 % 64 is 28.
  width = max(len(row) for row in rows)
  width += -width % _BUCKET
  result = []
  for start in range(0, len(rows), batch_size):
    part = rows[start : start + batch_size]
    prompt = pack(
      [*part, *[None] * (num_rows - len(part))],
      config=config,
      width=width,
      max_new_tokens=max_new_tokens[start : start + batch_size],
      row_ids=range(start, start + num_rows),
    )
    names = tuple(map(str, texts[start : start + batch_size]))
    result.append(Batch(prompt=prompt, texts=names))
  return result


def pack(
  rows: Sequence[Sequence[int] | None],
  *,
  config: Config,
  max_new_tokens: int | Sequence[int],
  width: int | None = None,
  row_ids: Sequence[int] | None = None,
) -> Prompt:
  """Packs lists of token ids, None for a row that only fills the batch, into
  one prompt of numpy arrays, right-padded with 0.

  The decoder's tokens, `[B, decoder_width(config, width)]`, are the start
  tokens of its family and, without an encoder, the ids. `max_new_tokens` is one
  number, or one for every row that is not None. `width` defaults to the longest
  row; `row_ids` select the rows' random streams, by default from 0 on. Raises
  ValueError if there are no rows, one exceeds `width`, or a decoder would have
  no first token.
  """
  if not rows:
    raise ValueError('no rows to pack')
  starts = families.of(config).starts
  is_encoded = has_encoder(config)
  if width is None:
    width = max(len(row or ()) for row in rows)
  # Numpy arrays, to be filled row by row.
  zeros: Any = lambda *shape: np.zeros((len(rows), *shape), np.int32)
  encoder_tokens = zeros(width)
  tokens = zeros(decoder_width(config, width))
  lengths = zeros() + 1
  max_lengths = zeros() + 1
  ids_of_rows = zeros()
  ids_of_rows[:] = range(len(rows)) if row_ids is None else row_ids
  # A T5's row of ids [5, 6] has them for the encoder, and [0] for the decoder;
  # a Llama's has [5, 6], or [bos, 5, 6], for the decoder.
  for i, row in enumerate(rows):
    if row is None:
      continue
    if len(row) > width:
      raise ValueError(
        f'row {i + 1} has {len(row)} tokens, the buffer has room for {width}'
      )
    encoder_tokens[i, : len(row)] = row
    ids = starts if is_encoded else (*starts, *row)
    if not ids:
      raise ValueError(f'row {i + 1} is empty')
    tokens[i, : len(ids)] = ids
    lengths[i] = len(ids)
    if isinstance(max_new_tokens, int):
      max_lengths[i] = len(ids) + max_new_tokens
    else:
      max_lengths[i] = len(ids) + max_new_tokens[i]
  return Prompt(
    encoder_tokens=encoder_tokens if is_encoded else None,
    decoder_tokens=tokens,
    decoder_lengths=lengths,
    row_ids=ids_of_rows,
    max_lengths=max_lengths,
  )


def num_positions(config: Config, num_ids: int, max_new_tokens: int) -> int:
  """Counts the positions of a model's longer stack, for a row of `num_ids` ids
  and `max_new_tokens` new tokens."""
  num_starts = len(families.of(config).starts)
  if has_encoder(config):
    return max(num_ids, num_starts + max_new_tokens)
  return num_starts + num_ids + max_new_tokens


def decoder_width(config: Config, width: int) -> int:
  """Counts the columns of the decoder's prompt buffer, for rows of `width`."""
  num_starts = len(families.of(config).starts)
  return num_starts if has_encoder(config) else num_starts + width
