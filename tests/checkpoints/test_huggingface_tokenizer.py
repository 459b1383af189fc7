"""Tokenizers of Hugging Face folders, and their chat templates."""

import pytest

from specdec_jax.text import huggingface_tokenizer
from tests.checkpoints.huggingface_folders import change_json
from tests.checkpoints.tiny_models import CHAT_TEMPLATE

pytest.importorskip('safetensors')
tokenizers = pytest.importorskip('tokenizers')


def test_a_broken_tokenizer_is_refused(folder):
  (folder / 'tokenizer.json').write_text('{}')
  with pytest.raises(ValueError, match=r'tokenizer\.json cannot'):
    huggingface_tokenizer.read_vocabulary(folder)


def test_truncation_and_padding_are_off(folder):
  """A tokenizer that was saved after training still has both on."""
  text = 'the in 12 ' * 30
  whole = huggingface_tokenizer.read_vocabulary(folder).encode(text)
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  tokenizer.enable_truncation(8)
  tokenizer.enable_padding(length=16, pad_id=0, pad_token='<|endoftext|>')
  tokenizer.save(str(folder / 'tokenizer.json'))
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert len(whole) > 100
  assert vocabulary.encode(text) == whole
  assert len(vocabulary.encode('in')) == 1


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'eos_token': 5}, 'eos_token is 5, expected a string'),
    ({'eos_token': {'content': 5}}, r'eos_token\.content is 5, expected'),
    ({'chat_template': 5}, 'chat_template is 5, expected a string'),
    ({'chat_template': [5]}, 'chat_template is .5., expected'),
    ({'chat_template': [{'name': 5}]}, r'chat_template\.name is 5, expected'),
  ],
)
def test_tokenizer_settings_of_another_type(folder, changes, message):
  change_json(folder / 'tokenizer_config.json', **changes)
  with pytest.raises(ValueError, match=rf'tokenizer_config\.json: {message}'):
    huggingface_tokenizer.read_vocabulary(folder)


def test_where_the_chat_template_comes_from(folder):
  read = lambda: huggingface_tokenizer.read_vocabulary(folder).chat_template
  assert read() is None
  settings = folder / 'tokenizer_config.json'
  change_json(settings, chat_template='single', bos_token='<|im_start|>')
  assert read() == 'single'
  change_json(
    settings,
    chat_template=[
      {'name': 'tool_use', 'template': 'tools'},
      {'name': 'default', 'template': CHAT_TEMPLATE},
    ],
  )
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert vocabulary.chat_template == CHAT_TEMPLATE
  assert vocabulary.roles['bos_token'] == '<|im_start|>'
  assert vocabulary.tool_template == 'tools'
  (folder / 'chat_template.jinja').write_text('file')
  assert read() == 'file'
  # As transformers saves several.
  more = folder / 'additional_chat_templates'
  more.mkdir()
  (more / 'tool_use.jinja').write_text('tools of a file')
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  assert vocabulary.chat_template == 'file'
  assert vocabulary.tool_template == 'tools of a file'
