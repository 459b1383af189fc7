"""Chat templates: conversations in the format that models were trained on."""

import copy
import datetime
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.files.require import require

# The messages of a conversation; each has a role, and usually content.
Messages = Sequence[Mapping[str, Any]]
# JSON schemas of functions that an answer may call.
Tools = Messages | None

# A message as it is passed to templates; it may be changed.
Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

# The names of reasoning content in a message; most templates use the first.
_REASONING = 'reasoning_content', 'thinking', 'reasoning'
# Types of content parts other than text.
_MEDIA = 'image', 'video', 'audio', 'file'
# Variables that are passed as separate arguments.
_RESERVED = 'messages', 'tools'
# A text that no message contains: a character of private use.
_PLACEHOLDER = '\ue000'
_log = logging.getLogger('specdec_jax')


def apply(
  template: str,
  messages: Messages,
  *,
  tools: Tools = None,
  roles: Mapping[str, str],
  template_kwargs: Mapping[str, Any],
) -> str:
  """Renders a conversation as text, up to the turn of the assistant.

  Renders in a Jinja sandbox with the variables, filters and whitespace rules of
  Hugging Face's chat templates
  (https://huggingface.co/docs/transformers/chat_templating). Departures:
  content that a template fails on, leaves out, or prints as Python does, is
  passed as text instead: of a list of text parts their texts, joined by line
  ends, of an object its JSON. Likewise arguments of tool calls are passed as an
  object or as JSON, whichever the template supports.

  Args:
    template: the source of a Jinja template.
    messages: as `Messages`.
    tools: functions, as JSON schemas.
    roles: special tokens by name, such as `bos_token`.
    template_kwargs: further variables of the template, such as
      `enable_thinking`; the logger `specdec_jax` warns of one that it does not
      use.

  Raises:
    ValueError: if the template or a variable is wrong, the template raises an
      exception, or a message has an image or audio.
    ImportError: without jinja2.
  """
  require('jinja2', extra='models', purpose='a chat template')
  for name in template_kwargs:
    if name in _RESERVED:
      raise ValueError(f'chat_template_kwargs must not contain {name}')
    _warn_unused(template, name)
  normalized = [_normalized(message) for message in messages]
  render = functools.partial(
    _render,
    template,
    **{
      'add_generation_prompt': True,
      'bos_token': '',
      'eos_token': '',
      'documents': None,
      **roles,
      **template_kwargs,
    },
    tools=tools,
  )
  return _rendered(render, normalized)


def _rendered(render: Render, messages: Sequence[Message]) -> str:
  """Renders messages with contents and arguments of calls as objects, or as
  text where the template does not support objects."""
  keys = [key for _, key in _places(messages)]
  contents = tuple(i for i, key in enumerate(keys) if key == 'content')
  arguments = tuple(i for i, key in enumerate(keys) if key != 'content')
  # Many templates do not support lists: `message.content + eos_token`.
  attempts = dict.fromkeys(((), contents, arguments, tuple(range(len(keys)))))
  failures = []
  for as_text in attempts:
    try:
      rendered = render(_with_text(messages, as_text))
      break
    except ValueError as error:
      failures.append(error)
  else:
    raise failures[0]
  misread = [
    i
    for i in range(len(keys))
    if i not in as_text and _is_misread(messages, as_text, i, rendered, render)
  ]
  if not misread:
    return rendered
  return render(_with_text(messages, [*as_text, *misread]))


def _normalized(message: Mapping[str, Any]) -> Message:
  """Returns a message as templates expect it: without null values, numbers as
  text, and reasoning content under all names that templates use."""
  result = {key: x for key, x in message.items() if x is not None}
  content = result.get('content')
  if isinstance(content, bool | int | float):
    result['content'] = json.dumps(content)
  elif content == []:
    result['content'] = ''
  elif isinstance(content, list | tuple):
    result['content'] = [_normalized_part(part) for part in content]
  for name in _REASONING:
    if name in result:
      # Templates of gpt-oss use `thinking`, which may have another value.
      reasoning = result[name]
      return {'thinking': reasoning, **result, 'reasoning_content': reasoning}
  return result


def _normalized_part(part: Any) -> Any:
  """Returns a content part, text as `{'type': 'text', 'text': ...}`; ValueError
  for images and audio."""
  if isinstance(part, str):
    return {'type': 'text', 'text': part}
  if not isinstance(part, Mapping):
    return part
  part_type = str(part.get('type', 'text'))
  if any(name in part_type for name in _MEDIA):
    raise ValueError(
      f'a message has a part of type {part_type!r}, and only text is supported'
    )
  # OpenAI's names for the text of prompts and of answers.
  is_text = part_type in ('text', 'input_text', 'output_text')
  return {**part, 'type': 'text'} if is_text and 'text' in part else part


def _places(messages: Sequence[Message]) -> list[tuple[dict[str, Any], str]]:
  """Lists the values that may be passed as objects or as text: the dict that
  holds a value, and its key."""
  places = []
  for message in messages:
    if isinstance(message.get('content'), Mapping | list | tuple):
      places.append((message, 'content'))
    for call in _tool_calls(message):
      arguments = call.get('arguments')
      is_parsed = isinstance(arguments, Mapping)
      if is_parsed or _parsed_object(arguments) is not None:
        places.append((call, 'arguments'))
  return places


def _with_text(
  messages: Sequence[Message], as_text: Sequence[int]
) -> list[Message]:
  """Returns messages with the values of the places `as_text` as text, and all
  others as objects."""
  result = copy.deepcopy(list(messages))
  for i, (holder, key) in enumerate(_places(result)):
    value = holder[key]
    parsed = _parsed_object(value)
    if i in as_text:
      holder[key] = content_text(value)
    elif parsed is not None:
      holder[key] = parsed
  return result


def _is_misread(
  messages: Sequence[Message],
  as_text: Sequence[int],
  number: int,
  rendered: str,
  render: Render,
) -> bool:
  """Tells whether a rendered text has the value of a place as Python prints it,
  or leaves it out."""
  changed = _with_text(messages, as_text)
  holder, key = _places(changed)[number]
  value = holder[key]
  # Python prints {'a': 1} with other quotes than JSON; [1, 2] is the same.
  if str(value) != _json(value) and str(value) in rendered:
    return True
  # Many templates treat content other than strings as empty: a value is left
  # out if a replacement renders as the same text.
  replacements: list[Any] = [{_PLACEHOLDER: _PLACEHOLDER}]
  texts = _texts_of_parts(value)
  if texts is not None:
    part = {'type': 'text', 'text': _PLACEHOLDER}
    replacements = [
      [*value[:i], part, *value[i + 1 :]] for i in range(len(texts))
    ]
  for replacement in replacements:
    holder[key] = replacement
    try:
      if render(changed) == rendered:
        return True
    except ValueError:
      pass
  return False


def content_text(content: Any) -> str:
  """Returns the content of a message as text: that of its parts, a line each,
  or JSON."""
  if isinstance(content, str):
    return content
  texts = _texts_of_parts(content)
  return _json(content) if texts is None else '\n'.join(texts)


def _texts_of_parts(content: Any) -> list[str] | None:
  """Returns the texts of content parts; None if some are not text."""
  if not isinstance(content, list | tuple):
    return None
  texts = []
  for part in content:
    text = part.get('text') if isinstance(part, Mapping) else part
    if not isinstance(text, str):
      return None
    texts.append(text)
  return texts


def _tool_calls(message: Message) -> list[dict[str, Any]]:
  """Lists the tool calls of a message."""
  calls = message.get('tool_calls')
  objects = [
    call
    for call in (calls if isinstance(calls, list | tuple) else ())
    if isinstance(call, dict)
  ]
  # OpenAI's form is {'type': 'function', 'function': {'name': ...}}.
  return [
    call['function'] if isinstance(call.get('function'), dict) else call
    for call in objects
  ]


def _parsed_object(text: Any) -> dict[str, Any] | None:
  """Parses a JSON object; None for anything else."""
  if not isinstance(text, str):
    return None
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


@functools.lru_cache(maxsize=64)
def _warn_unused(template: str, name: str) -> None:
  """Logs once that a template does not use a variable."""
  if not re.search(rf'\b{re.escape(name)}\b', template):
    _log.warning('the chat template has no variable %r: it is ignored', name)


def _render(template: str, messages: Any, **variables: Any) -> str:
  try:
    return _compiled(template).render(messages=messages, **variables)
  except Exception as error:  # A template is a program: it can raise anything.
    raise ValueError(f'the chat template failed: {error}') from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
  import jinja2.ext
  import jinja2.sandbox

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  # Jinja's own filter escapes HTML, and sorts keys.
  def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  class Generation(jinja2.ext.Extension):
    """Renders the text between {% generation %} and {% endgeneration %}, tags
    that only matter in training."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, 'jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = tojson
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: (
    datetime.datetime.now().strftime(form)
  )
  return environment.from_string(template)
