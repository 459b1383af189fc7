"""Chat templates: what they get of messages, and what users may add."""

import json
import pathlib

import pytest

from specdec_jax.text import chat_templates
from tests import gemma4_template

pytest.importorskip('jinja2')

ROLES = {'bos_token': '<s>', 'eos_token': '</s>'}
PARTS = [{'type': 'text', 'text': 'one'}, {'type': 'text', 'text': 'two'}]
CALL = {'name': 'weather', 'arguments': {'city': 'Zürich', 'days': [1, 2]}}
# The ways in which templates take the content of a message.
PRINTING = '{% for m in messages %}{{ m.content }}{% endfor %}'
ADDING = '{% for m in messages %}{{ m.content + eos_token }}{% endfor %}'
STRINGS = (
  '{% for m in messages %}{% if m.content is string %}{{ m.content }}'
  '{% endif %}{% endfor %}'
)
FIRST = (
  '{% for m in messages %}{% if m.content is string %}{{ m.content }}'
  '{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}'
)
LOOPING = (
  '{% for m in messages %}{% if m.content is string %}{{ m.content }}'
  "{% else %}{% for part in m.content %}<{{ part['text'] }}>{% endfor %}"
  '{% endif %}{% endfor %}'
)
AS_JSON = (
  '{% for m in messages %}{% if m.content is string %}{{ m.content }}'
  '{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}'
)


def apply(template, messages, tools=None, **template_kwargs):
  if not isinstance(messages, list):
    messages = [messages]
  return chat_templates.apply(
    template,
    messages,
    tools=tools,
    roles=ROLES,
    template_kwargs=template_kwargs,
  )


def user(content):
  return {'role': 'user', 'content': content}


@pytest.mark.parametrize(
  ('template', 'text'),
  [
    (PRINTING, 'one\ntwo'),
    (ADDING, 'one\ntwo</s>'),
    (STRINGS, 'one\ntwo'),
    (FIRST, 'one\ntwo'),
    (LOOPING, '<one><two>'),
  ],
)
def test_parts_of_text(template, text):
  """Templates that take parts get them, and others their text."""
  others = [
    ['one', 'two'],
    [{'text': 'one'}, {'type': 'input_text', 'text': 'two'}],
  ]
  for content in (PARTS, *others):
    assert apply(template, user(content)) == text
  assert apply(template, user([])) == apply(template, user(''))
  # Among messages that are texts, and not seen by the template.
  if template is not ADDING:
    assert apply(template, [user('a'), user(PARTS)]) == f'a{text}'
  assert PARTS[0] == {'type': 'text', 'text': 'one'}


@pytest.mark.parametrize(
  'template', [PRINTING, ADDING, STRINGS, LOOPING, AS_JSON]
)
def test_objects_are_json(template):
  end = '</s>' if template is ADDING else ''
  content = {'sky': 'blau, ü', 'all': True}
  text = '{"sky": "blau, ü", "all": true}'
  if template is not LOOPING:
    assert apply(template, user(content)) == text + end
  for number, shown in ((5, '5'), (0.5, '0.5'), (True, 'true')):
    assert apply(template, user(number)) == shown + end


CALLS = '{% for m in messages %}{% for call in m.tool_calls %}' + (
  '{% set call = call.function %}'
)
END = '{% endfor %}{% endfor %}'
ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'


@pytest.mark.parametrize(
  ('shown', 'text'),
  [
    ('{{ call.arguments | tojson }}', ARGUMENTS),
    ('{{ call | tojson }}', f'{{"name": "weather", "arguments": {ARGUMENTS}}}'),
    ('{{ call.arguments }}', ARGUMENTS),
    ("{{ 'a' + call.arguments }}", f'a{ARGUMENTS}'),
    (
      '{% if call.arguments is string %}{{ call.arguments }}{% else %}'
      '{{ call.arguments | tojson }}{% endif %}',
      ARGUMENTS,
    ),
    (
      '{% if call.arguments is string %}{{ call.arguments }}{% endif %}',
      ARGUMENTS,
    ),
    (
      '{% for k, v in call.arguments.items() %}{{ k }}={{ v }};{% endfor %}',
      'city=Zürich;days=[1, 2];',
    ),
  ],
)
def test_arguments_of_calls_are_encoded_once(shown, text):
  for arguments in (CALL['arguments'], ARGUMENTS):
    function = {**CALL, 'arguments': arguments}
    message = {'role': 'assistant', 'tool_calls': [{'function': function}]}
    assert apply(CALLS + shown + END, message) == text


def test_no_arguments():
  for arguments in ({}, '{}'):
    function = {'name': 'now', 'arguments': arguments}
    message = {'role': 'assistant', 'tool_calls': [{'function': function}]}
    template = CALLS + '{{ call.arguments | tojson }}' + END
    assert apply(template, message) == '{}'


def test_one_form_for_each_message():
  """A content that is an object is text where the template fails on it, and
  arguments of a call stay an object."""
  template = (
    '{% for m in messages %}{% for call in m.tool_calls %}'
    '{{ call.function.arguments.city }}{% endfor %}'
    "{{ m.content + ';' }}{% endfor %}"
  )
  call = {
    'role': 'assistant',
    'content': '',
    'tool_calls': [{'function': CALL}],
  }
  result = {'role': 'tool', 'content': {'sky': 'blue'}}
  assert apply(template, [call, result]) == 'Zürich;{"sky": "blue"};'


# What transformers 5.24 renders of a message with thoughts under one name.
THOUGHTS = (
  '{% for m in messages %}{{ m.reasoning_content }};{{ m.thinking }};'
  '{{ m.reasoning is defined }}{% endfor %}'
)


@pytest.mark.parametrize(
  ('names', 'text'),
  [
    (['reasoning_content'], 'A;A;False'),
    (['thinking'], 'A;A;False'),
    (['reasoning'], 'A;A;True'),
    (['thinking', 'reasoning_content'], 'B;A;False'),
    (['reasoning', 'thinking'], 'B;B;True'),
  ],
)
def test_thoughts_have_each_name(names, text):
  thoughts = dict(zip(names, 'AB', strict=False))
  assert apply(THOUGHTS, {'role': 'assistant', **thoughts}) == text
  empty = dict.fromkeys(names)
  assert apply('{{ messages[0] | tojson }}', {'role': 'a', **empty}) == (
    '{"role": "a"}'
  )


def test_to_json_takes_arguments_by_position():
  value = {'b': 'ü', 'a': 1}
  shown = lambda arguments: apply(
    f'{{{{ tools[0] | tojson({arguments}) }}}}', user('a'), [value]
  )
  assert shown('true') == '{"b": "\\u00fc", "a": 1}'
  assert shown('false, 1') == '{\n "b": "ü",\n "a": 1\n}'
  assert shown("false, none, (',', ':'), true") == '{"a":1,"b":"ü"}'


def test_variables(caplog):
  template = (
    '{% if enable_thinking is defined and not enable_thinking %}<think>'
    '</think>{% endif %}{{ bos_token }}{{ effort }}'
  )
  assert apply(template, user('a'), enable_thinking=False) == (
    '<think></think><s>'
  )
  # As in transformers, they come before the names of special tokens.
  assert apply(template, user('a'), bos_token='', effort='low') == 'low'
  assert not caplog.messages
  for _ in range(2):
    apply(template, user('a'), enable_thinkin=False)
  [line] = caplog.messages
  assert "no variable 'enable_thinkin'" in line


RAISING = "{{ messages[0].content + 'a' }}{{ raise_exception('no') }}"
IMAGE = {'type': 'image'}
IMAGE_URL = {'type': 'image_url', 'image_url': {'url': 'a.png'}}
AUDIO = {'type': 'input_audio', 'input_audio': {}}


@pytest.mark.parametrize(
  ('template', 'content', 'variables', 'message'),
  [
    (LOOPING, [PARTS[0], IMAGE], {}, 'image.*only text'),
    (LOOPING, [PARTS[0], IMAGE_URL], {}, 'image_url.*only text'),
    (LOOPING, [PARTS[0], AUDIO], {}, 'input_audio.*only text'),
    (PRINTING, 'a', {'messages': []}, 'messages'),
    (PRINTING, 'a', {'tools': []}, 'tools'),
    (RAISING, 'a', {}, 'failed: no'),
    # A failure is told as it came first.
    (RAISING, PARTS, {}, 'failed: can only concatenate'),
  ],
)
def test_what_is_not_rendered_is_refused(template, content, variables, message):
  with pytest.raises(ValueError, match=message):
    chat_templates.apply(
      template, [user(content)], roles=ROLES, template_kwargs=variables
    )


def test_gemma_4_is_rendered_as_transformers_renders_it():
  """Thinking on and off, thoughts in earlier turns, tools and their answers;
  `make_gemma4_chats.py` makes the texts."""
  path = pathlib.Path(__file__).parents[1] / 'golden/gemma4_chats.json'
  chats = json.loads(path.read_text())
  assert len(chats) == 78
  for chat in chats:
    text = chat_templates.apply(
      gemma4_template.TEMPLATE,
      chat['messages'],
      tools=chat['tools'],
      roles={'bos_token': '<bos>'},
      template_kwargs=chat['variables'],
    )
    assert text == chat['text']
