"""Chat templates: conversations as the texts that models were trained on."""

import copy
import datetime
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.files.require import require

# Of a conversation; each has a role, and mostly content.
Messages = Sequence[Mapping[str, Any]]
# JSON schemas of functions that an answer may call.
Tools = Messages | None

# As templates get one, which may change.
Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]

# Names under which a message may have what a model thought before its answer,
# the first being that of most templates.
_REASONING = 'reasoning_content', 'thinking', 'reasoning'
# Types of parts of a content that are no text.
_MEDIA = 'image', 'video', 'audio', 'file'
# Variables that have arguments of their own.
_RESERVED = 'messages', 'tools'
# What no message says: a character of private use.
_OTHER = '\ue000'
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
  (https://huggingface.co/docs/transformers/chat_templating). Departures: a
  content that a template fails on, leaves out, or prints as Python does, is
  given to it as text: of a list of text parts their texts, joined by line ends,
  of an object its JSON. Likewise arguments of tool calls are given as an object
  or as its JSON, whichever the template takes.

  Args:
    template: the source of a Jinja template.
    messages: as `Messages`.
    tools: functions, as JSON schemas.
    roles: special tokens by name, such as `bos_token`.
    template_kwargs: further variables of the template, such as
      `enable_thinking`; one that it does not use is told to the logger
      `specdec_jax`.

  Raises:
    ValueError: if the template or a variable is wrong, the template refuses the
      messages, or one has a picture or sound.
    ImportError: without jinja2.
  """
  require('jinja2', extra='models', purpose='a chat template')
  for name in template_kwargs:
    if name in _RESERVED:
      raise ValueError(f'chat_template_kwargs: {name} are given otherwise')
    _tell_unused(template, name)
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
  text where the template cannot take them so."""
  keys = [key for _, key in _places(messages)]
  contents = tuple(i for i, key in enumerate(keys) if key == 'content')
  arguments = tuple(i for i, key in enumerate(keys) if key != 'content')
  # Many templates take no lists, say: `message.content + eos_token`.
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
  """Returns a message as templates expect it: without keys of no value, numbers
  as text, and thoughts under each name that templates read."""
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
      # Templates of gpt-oss read `thinking`, which may say something else.
      thoughts = result[name]
      return {'thinking': thoughts, **result, 'reasoning_content': thoughts}
  return result


def _normalized_part(part: Any) -> Any:
  """Returns a part of a content, of text as `{'type': 'text', 'text': ...}`;
  ValueError for a picture or sound."""
  if isinstance(part, str):
    return {'type': 'text', 'text': part}
  if not isinstance(part, Mapping):
    return part
  stated = str(part.get('type', 'text'))
  if any(name in stated for name in _MEDIA):
    raise ValueError(
      f'a message has a part of type {stated!r}, and models here read text '
      'alone'
    )
  # OpenAI has names of its own for what goes in and comes out.
  is_text = stated in ('text', 'input_text', 'output_text')
  return {**part, 'type': 'text'} if is_text and 'text' in part else part


def _places(messages: Sequence[Message]) -> list[tuple[dict[str, Any], str]]:
  """Lists the objects in messages, each with the key of what has two forms."""
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
  """Returns messages with the values of these places as text, and those of
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
  """Tells whether a rendered text shows the value of a place as Python prints
  it, or leaves it out."""
  changed = _with_text(messages, as_text)
  holder, key = _places(changed)[number]
  value = holder[key]
  # Of {'a': 1}, Python prints quotes that JSON does not have; [1, 2] is the
  # same to both.
  if str(value) != _json(value) and str(value) in rendered:
    return True
  # Many templates take a content that is no string for an empty one: what they
  # leave out can be another, and the text is the same.
  others: list[Any] = [{_OTHER: _OTHER}]
  if (texts := _texts_of_parts(value)) is not None:
    part = {'type': 'text', 'text': _OTHER}
    others = [[*value[:i], part, *value[i + 1 :]] for i in range(len(texts))]
  for other in others:
    holder[key] = other
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
  """Returns the texts of a content's parts; None if it has other ones."""
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
  """Lists the objects of a message that may have arguments of a call."""
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
  """Parses a text that is an object of JSON; None if it is none."""
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
def _tell_unused(template: str, name: str) -> None:
  """Says once that a template has no variable of a name."""
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

  # Jinja's own escapes HTML, and sorts keys.
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
    """Renders what stands between {% generation %} and {% endgeneration %} as
    it is: only training asks what the assistant said."""

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
