"""Text to ids and back, streamed text, chats."""

import dataclasses
import json
import random

import pytest

from specdec_jax.checkpoints import pretrained
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import (
  TextStream,
  Vocabulary,
  apply_chat_template,
  check_same_vocabulary,
  flush_text,
  stream_text,
)

tokenizers = pytest.importorskip('tokenizers')

SPECIAL_TOKENS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
TEXTS = [
  '',
  ' ',
  'Hello, world!',
  '  two  spaces   three\t\ttabs\r\n\r\n\nlines ',
  '0123456789 3.14159 1,000,000 0x1F 10⁻³ ½ ²',
  'naïve café Ångström — “quotes” … €',
  'Привет, мир! 日本語のテキスト。 مرحبا 한국어 ไทย',
  '👍🏽 👨‍👩‍👧‍👦 🇨🇭 ☀️ e\u0301',
  "don't I'LL we've",
  'def f(x):\n    return x ** 2  # ünïcode\n',
  '\x00\x01\x7f\ufeff\u200b\ufffd',
  '<|im_start|>user\n<|im_end|><|endoftext|> <|im_ <|notatoken|>',
]


def make_vocabulary(merges=(('i', 'n'), ('Ġ', 't')), **changes) -> Vocabulary:
  """A byte-level vocabulary of 259 tokens and the merges."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = SPECIAL_TOKENS + alphabet + [a + b for a, b in merges]
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(SPECIAL_TOKENS)
  return Vocabulary(tokenizer=tokenizer, eos_ids=(2,), **changes)


def smollm2() -> Vocabulary:
  pytest.importorskip('gguf')
  from specdec_jax.checkpoints import gguf

  try:
    path = pretrained.packaged_file('smollm2-135m')
  except ValueError as error:
    pytest.skip(str(error))
  return gguf.read_vocabulary(path)


@pytest.fixture(
  scope='module',
  params=['tiny', pytest.param('smollm2', marks=pytest.mark.smollm2)],
)
def vocabulary(request):
  return make_vocabulary() if request.param == 'tiny' else smollm2()


@pytest.mark.parametrize('text', TEXTS)
def test_decoding_inverts_encoding(vocabulary, text):
  ids = vocabulary.encode(text)
  assert vocabulary.decode(ids, keep_special=True) == text
  without = text
  for token in SPECIAL_TOKENS:
    without = without.replace(token, '')
  assert vocabulary.decode(ids) == without
  assert all(0 <= i < vocabulary.vocab_size for i in ids)


@pytest.mark.parametrize('text', TEXTS)
def test_pieces_add_up_to_the_text(vocabulary, text):
  ids = vocabulary.encode(text)
  pieces = vocabulary.pieces(ids)
  assert len(pieces) == len(ids)
  assert ''.join(pieces) == text


def test_special_tokens_in_text_are_single_ids(vocabulary):
  ids = vocabulary.encode('<|im_start|>in<|im_end|>')
  assert (ids[0], ids[-1]) == (1, 2)
  assert vocabulary.tokens()[:3] == SPECIAL_TOKENS


def test_text_of_single_ids(vocabulary):
  (token_id,) = vocabulary.encode(' t')
  assert vocabulary.id_to_text(token_id) == ' t'
  assert vocabulary.id_to_text(2) == '<|im_end|>'
  # A byte within a character has no text of its own: its name is shown.
  first_byte = vocabulary.encode('👍')[0]
  assert '\ufffd' not in vocabulary.id_to_text(first_byte)
  assert vocabulary.id_to_text(999_999) == '<id 999999>'
  for token_id in range(vocabulary.vocab_size):
    assert vocabulary.id_to_text(token_id)


def test_ids_of_a_padded_model_have_no_text(vocabulary):
  beyond = vocabulary.vocab_size + 5
  ids = [*vocabulary.encode('a'), beyond, *vocabulary.encode('b')]
  assert vocabulary.decode(ids) == 'ab'
  assert vocabulary.pieces(ids) == ['a', '', 'b']


def test_numpy_ids_decode(vocabulary):
  import numpy as np

  ids = np.array(vocabulary.encode('in'), np.int32)
  assert vocabulary.decode(ids) == 'in'
  assert vocabulary.id_to_text(ids[0])


@pytest.mark.parametrize('text', TEXTS)
def test_streamed_text_is_stable_and_whole(vocabulary, text):
  ids = vocabulary.encode(text)
  rng = random.Random(0)
  for _ in range(5):
    state, shown, i = TextStream(), '', 0
    while i < len(ids):
      n = rng.choice([0, 1, 1, 2, 5])
      new, state = stream_text(
        vocabulary, state, ids[i : i + n], keep_special=True
      )
      shown, i = shown + new, i + n
      assert text.startswith(shown)
    shown += flush_text(vocabulary, state, keep_special=True)
    assert shown == text


def test_half_a_character_is_held_back(vocabulary):
  ids = vocabulary.encode('👍')
  assert len(ids) > 1
  new, state = stream_text(vocabulary, TextStream(), ids[:-1])
  assert new == ''
  assert '\ufffd' in flush_text(vocabulary, state)
  new, state = stream_text(vocabulary, state, ids[-1:])
  assert new == '👍'
  assert flush_text(vocabulary, state) == ''


def test_special_tokens_are_not_streamed_unless_asked(vocabulary):
  ids = vocabulary.encode('<|im_start|>in<|im_end|>')
  new, state = stream_text(vocabulary, TextStream(), ids)
  assert new + flush_text(vocabulary, state) == 'in'


def test_tokens_with_gaps():
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({'a': 0, 'b': 3}, unk_token='a')
  )
  vocabulary = Vocabulary(tokenizer=tokenizer)
  assert vocabulary.tokens() == ['a', '', '', 'b']
  assert vocabulary.vocab_size == 4


def test_missing_tokenizers_says_what_to_install(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'tokenizers', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[models\]'"):
    vocabularies.import_tokenizers()


def test_equal_vocabularies_pass():
  check_same_vocabulary(make_vocabulary(), make_vocabulary(chat_template='x'))


IN, T = ('i', 'n'), ('Ġ', 't')


@pytest.mark.parametrize(
  ('merges', 'message'),
  [
    (
      [('o', 'n'), T],
      r"id 259.*'in' to the target and 'on' to the draft model",
    ),
    ([IN], r"261 .*260, and id 260 .*'Ġt' to the target and ''"),
    ([IN, T, ('a', 'b')], r'id 261 .*to the draft model'),
  ],
)
def test_different_vocabularies_are_told_apart(merges, message):
  with pytest.raises(ValueError, match=message):
    check_same_vocabulary(make_vocabulary(), make_vocabulary(merges=merges))


TEMPLATE = """{%- if messages[0].role == 'system' %}
    {{- bos_token + 'S:' + messages[0].content }}
    {%- set messages = messages[1:] %}
{%- else %}
    {{- bos_token }}
{%- endif %}
{% for message in messages %}
    {% if message['role'] not in ['user', 'assistant'] %}
{{ raise_exception('no role ' ~ message.role) }}
    {% endif %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
{{ message.role }}: {{ message.content | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{%- endif %}"""


@pytest.fixture
def chatty():
  pytest.importorskip('jinja2')
  return make_vocabulary(
    chat_template=TEMPLATE,
    roles={'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>'},
  )


def test_chat_template(chatty):
  messages = [
    {'role': 'system', 'content': 'be brief'},
    {'role': 'user', 'content': 'é "<b>"'},
    {'role': 'assistant', 'content': 'skip'},
  ]
  text = apply_chat_template(chatty, messages)
  assert text == (
    '<|im_start|>S:be briefuser: "é \\"<b>\\""<|im_end|>\nassistant:'
  )


def test_a_prompt_is_a_message_of_the_user(chatty):
  text = apply_chat_template(chatty, 'in')
  assert text == '<|im_start|>user: "in"<|im_end|>\nassistant:'
  assert text == apply_chat_template(
    chatty, [{'role': 'user', 'content': 'in'}]
  )
  ids = chatty.encode_chat('in')
  assert (ids[0], ids.count(2)) == (1, 1)
  assert chatty.decode(ids, keep_special=True) == text


WEATHER = {
  'type': 'function',
  'function': {
    'name': 'weather',
    'description': 'today’s <weather>',
    'parameters': {'type': 'object', 'properties': {'b': {}, 'a': {}}},
  },
}
TURNS = [
  {'role': 'user', 'content': 'Zürich?'},
  {
    'role': 'assistant',
    'content': None,
    'tool_calls': [{'name': 'weather', 'arguments': {'a': 'Zürich'}}],
  },
  {'role': 'tool', 'content': '{"sky": "blue"}'},
]
# Templates, and what transformers 5.23 makes of TURNS and WEATHER with them.
OF_TRANSFORMERS = {
  '{{ tools | tojson(indent=2) }}{{ pad_token }}': json.dumps(
    [WEATHER], ensure_ascii=False, indent=2
  )
  + '<|endoftext|>',
  '{% for m in messages %}{% generation %}\n{% set x = m.role %}{{ x }}'
  '{% endgeneration %}\n{{ x }};{% endfor %}': 'user;assistant;tool;',
  "{{ tools[0].function | tojson(separators=(',', ':'), sort_keys=True) }}"
  "{{ 'ü' | tojson(ensure_ascii=True) }}": '{"description":'
  '"today’s <weather>","name":"weather",'
  '"parameters":{"properties":{"a":{},"b":{}},"type":"object"}}"\\u00fc"',
  "{% for m in messages %}{{ 'content' in m }}"
  '{% for c in m.tool_calls %}{{ c.arguments | tojson }}{% endfor %}'
  '{% endfor %}{{ unk_token is defined }}': 'TrueFalse{"a": "Zürich"}TrueFalse',
}


@pytest.mark.parametrize('template', OF_TRANSFORMERS)
def test_templates_render_as_in_transformers(chatty, template):
  vocabulary = dataclasses.replace(
    chatty,
    chat_template=template,
    roles={**chatty.roles, 'pad_token': '<|endoftext|>'},
  )
  found = apply_chat_template(vocabulary, TURNS, [WEATHER])
  assert found == OF_TRANSFORMERS[template]


def test_a_template_knows_the_date(chatty):
  now = '{% if strftime_now is defined %}{{ strftime_now("%Y") }}{% endif %}'
  vocabulary = dataclasses.replace(chatty, chat_template=now)
  assert int(apply_chat_template(vocabulary, 'in')) >= 2026


def test_tools_have_a_template_of_their_own(chatty):
  vocabulary = dataclasses.replace(chatty, tool_template='tools')
  assert apply_chat_template(vocabulary, TURNS, [WEATHER]) == 'tools'
  assert apply_chat_template(vocabulary, 'in') != 'tools'


@pytest.mark.parametrize(
  ('template', 'prompt', 'message'),
  [
    (TEMPLATE, [{'role': 'tool', 'content': ''}], r'template.*role tool'),
    (None, 'in', 'no chat template'),
    ('{% if %}', 'in', 'chat template failed'),
    ('{{ messages.x.y }}', 'in', 'chat template failed'),
    ('{{ messages.append(1) }}', 'in', 'chat template failed'),
    ("{{ ''.__class__.__mro__ }}", 'in', 'chat template failed'),
    ('{{ messages[0].content + 1 }}', 'in', 'chat template failed'),
  ],
)
def test_what_no_template_renders_is_refused(chatty, template, prompt, message):
  vocabulary = dataclasses.replace(chatty, chat_template=template)
  with pytest.raises(ValueError, match=message):
    apply_chat_template(vocabulary, prompt)


def test_what_a_tokenizer_cannot_encode_is_refused():
  """It would add a token that it has not, and panics."""
  tokenizers = pytest.importorskip('tokenizers')
  vocabulary = make_vocabulary()
  contents = json.loads(vocabulary.tokenizer.to_str())
  contents['post_processor'] = {
    'type': 'TemplateProcessing',
    'single': [{'SpecialToken': {'id': 'none', 'type_id': 0}}],
    'pair': [],
    'special_tokens': {},
  }
  tokenizer = tokenizers.Tokenizer.from_str(json.dumps(contents))
  vocabulary = dataclasses.replace(vocabulary, tokenizer=tokenizer)
  with pytest.raises(ValueError, match=r'encode.*no entry'):
    vocabulary.encode('in')


@pytest.mark.smollm2
@pytest.mark.parametrize(
  ('text', 'tokens'),
  [
    ('  12', ['ĠĠ', '1', '2']),
    ('x=12\n    3', ['x', '=', '1', '2', 'ĊĠĠĠĠ', '3']),
    ('Hello world', ['Hello', 'Ġworld']),
    ('<|im_start|>user\n', ['<|im_start|>', 'user', 'Ċ']),
  ],
)
def test_smollm2_splits_digits_off_first(text, tokens):
  vocabulary = smollm2()
  assert [vocabulary.tokens()[i] for i in vocabulary.encode(text)] == tokens
