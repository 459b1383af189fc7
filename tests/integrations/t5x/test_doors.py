"""The door of T5X's `decode_fn`, on stand-ins for T5X's objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('gin')
pytest.importorskip('safetensors')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

import gin

from specdec_jax.assembly import packing, running
from specdec_jax.integrations import t5x
from specdec_jax.integrations.t5x import t5_networks
from tests import slow, toy_t5
from tests.contracts.doors import (
  NUM_NEW,
  SETTINGS,
  TEXTS,
  Case,
  Doors,
  case_of_settings,
  fields_of,
  write_models,
)
from tests.integrations.t5x.test_t5x_protocol import Model, Sizes

IMPORTS = (
  'from __gin__ import dynamic_registration',
  'from specdec_jax.integrations import t5x',
)
FUNCTION = 't5x.speculative_decode'


@pytest.fixture(scope='module')
def doors(tmp_path_factory) -> Doors:
  folder = tmp_path_factory.mktemp('doors')
  write_models(folder)
  return Doors(folder)


def decode_in_t5x(doors: Doors, case: Case) -> list[tuple[int, ...]]:
  """The tokens of T5X's `decode_fn`, as gin binds it."""
  decoder = doors.load(case)
  lengths = running.DecodeSettings(
    max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
  )
  [batch] = packing.pack(decoder, TEXTS, lengths)
  # The vocabulary is T5X's to know, where a network is padded beyond it.
  settings, num_ids = SETTINGS[case.settings], decoder.config.vocab_size
  padding = range(decoder.parts.target_info.vocab_size, num_ids)
  bindings = {'drafter': case.drafter, 'temperature': case.temperature}
  bindings |= fields_of(doors.folder, case) | settings
  bindings['suppress_tokens'] = [*settings.get('suppress_tokens', ()), *padding]
  lines = [f'{FUNCTION}.{name} = {x!r}' for name, x in bindings.items()]
  gin.clear_config(clear_constants=True)
  gin.parse_config([*IMPORTS, *lines])
  model = Model(Sizes(vocab_size=num_ids))
  params = toy_t5.params(t5_networks.config_of(model.module), seed=0)
  decode = jax.jit(
    lambda params, read: gin.get_configurable(t5x.speculative_decode)(
      jnp.zeros((len(TEXTS), NUM_NEW), jnp.int32),
      cache={},
      tokens_to_logits=model.step(params, read),
      eos_id=1,
    )[0]
  )
  read = batch.prompt.encoder_tokens[: len(TEXTS)]
  tokens = decode(params, read)[:, 0]
  return [tuple(row[row != 0].tolist()) for row in np.asarray(tokens)]


@slow.parametrize(
  'settings', sorted({*SETTINGS} - {'usual'}), now=['processors']
)
def test_gin_tells_t5x_the_same_ways(settings, doors, capfd):
  case = case_of_settings(settings, 'prompt_lookup')
  expected = doors('python', case, capfd)
  assert decode_in_t5x(doors, case) == [each.tokens for each in expected]
