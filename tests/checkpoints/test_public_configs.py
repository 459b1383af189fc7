"""Every key of public models' config.json counts, is known to change nothing,
or is refused with its value.

`public_configs.json` has the keys and values of these files, that of umT5 also
the `model_type` that transformers adds; those of EAGLE-3 are as the programs of
their makers write them.
"""

import dataclasses
import json
import pathlib
import shutil

import pytest

from specdec_jax.checkpoints import huggingface
from specdec_jax.models import presets

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
CONFIGS = json.loads(
  pathlib.Path(__file__).with_name('public_configs.json').read_text()
)
# What transformers ignores where other keys are as they are.
_BESIDE = {
  'max_window_layers': lambda contents: not contents['use_sliding_window'],
  'sliding_window': lambda contents: not contents.get('use_sliding_window', 1),
  # A window that no context outgrows.
  'use_sliding_window': lambda contents: (
    contents['sliding_window'] == contents['max_position_embeddings']
  ),
  'tie_word_embeddings': lambda contents: (
    is_eagle(contents) or contents['model_type'] in ('mt5', 'umt5')
  ),
  # One network, whatever the target is.
  'model_type': lambda contents: is_eagle(contents),
  '_sliding_window_pattern': lambda contents: 'layer_types' in contents,
  # An encoder has no logits.
  'encoder.final_logit_softcapping': lambda contents: True,
}


def is_eagle(contents):
  return 'draft_vocab_size' in contents


def read(folder, contents):
  if is_eagle(contents) and not any(folder.iterdir()):
    # Its sizes are also in the names of its tensors.
    is_nested = 'speculators_version' in contents
    spelling = 'speculators' if is_nested else 'safeailab'
    name = f'tiny_eagle_{spelling}/model.safetensors'
    shutil.copy(GOLDEN / name, folder)
  (folder / 'config.json').write_text(json.dumps(contents))
  return huggingface.read_config(folder)


def refusal(folder, contents):
  """The message with which a file is refused, or else its sizes."""
  try:
    return read(folder, contents)
  except ValueError as error:
    return str(error)


def known(contents):
  """Keys that change nothing in a network of this kind."""
  found = huggingface.WITHOUT_EFFECT
  if is_eagle(contents):
    return found | huggingface.eagle.WITHOUT_EFFECT
  for network in (huggingface.gemma, huggingface.t5gemma):
    if contents['model_type'] in network.MODEL_TYPES:
      found = found | network.WITHOUT_EFFECT
  return found


def changed(value):
  """Another value of the same type; an object in place of null."""
  match value:
    case None:
      return {'other': 1}
    case bool():
      return not value
    case int() | float():
      return 2 * value or 1
    case str():
      return 'other'
    case list():
      return ['other']
    case _:
      return value | {'other': 1}


def walk(contents):
  """The path of each key, its value when changed, and the contents with it."""
  for key, value in contents.items():
    new = changed(value)
    yield key, new, contents | {key: new}
    if isinstance(value, dict):
      for name, new, each in walk(value):
        yield f'{key}.{name}', new, contents | {key: each}


@pytest.mark.parametrize(
  'name', [name for name in CONFIGS if not is_eagle(CONFIGS[name])]
)
def test_a_public_config_has_the_sizes_of_its_preset(name, tmp_path):
  found = read(tmp_path, CONFIGS[name])
  if 'flan' in name:  # T5 1.1's sizes.
    name = name.replace('flan_t5', 't5_1_1')
  expected = presets.preset(name)
  if hasattr(expected, 'dropout_rate'):
    found = dataclasses.replace(found, dropout_rate=0.0)
  assert found == expected


@pytest.mark.parametrize('name', CONFIGS)
def test_no_key_is_ignored_silently(name, tmp_path):
  contents = CONFIGS[name]
  expected = read(tmp_path, contents)
  for path, new, other in walk(contents):
    key = path.split('.')[-1]
    found = refusal(tmp_path, other)
    if isinstance(found, str):
      named = (f'{key} is', f'{key}.other is 1', repr(new))
      assert any(each in found for each in named), path
      continue
    is_known = path.startswith('transformers.') or {*path.split('.')} & known(
      contents
    )
    is_beside = path in _BESIDE and _BESIDE[path](contents)
    assert (found == expected) == bool(is_known or is_beside), path


@pytest.mark.parametrize('name', CONFIGS)
def test_an_unknown_key_is_refused(name, tmp_path):
  with pytest.raises(ValueError, match=r'config\.json.*twist is 0\.5'):
    read(tmp_path, CONFIGS[name] | {'twist': 0.5})
  read(tmp_path, CONFIGS[name] | {'twist': None})
