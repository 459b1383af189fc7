"""Layers of a stack are alike, and lowered as one."""

import jax
import pytest

from specdec_jax.models import families, networks
from tests import toy, toy_families

ROWS = [[1, 2, 3], [4, 1, 2]]


def lowered(name: str, num_layers: int) -> str:
  """The text of a prefill and a step."""
  model, params = toy_families.make(name, 12, num_layers=num_layers)
  has_encoder = toy_families.has_encoder(name)
  prompt = toy.prompt(ROWS, encoder_rows=ROWS if has_encoder else None)

  def step(params):
    cache = model.init(params, prompt, 16)
    return model.extend(params, prompt.decoder_tokens, cache)[0]

  return jax.jit(step).lower(params).as_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', toy_families.NAMES)
def test_more_layers_hardly_lengthen_a_program(name, monkeypatch):
  count = lambda num_layers: lowered(name, num_layers).count('dot_general')
  # Keys and values of an encoder's output are made apart, layer by layer.
  per_layer = 2 * toy_families.has_encoder(name)
  few, many = count(4), count(8)
  assert many == few + 4 * per_layer
  monkeypatch.setattr(networks, '_jitted', lambda layer: layer)
  assert count(8) - count(4) >= 4 * (per_layer + 6)


@pytest.mark.slow
def test_parameters_of_a_seed_are_those_of_separate_layers(monkeypatch):
  def refuse(layer):
    raise AssertionError(f'{layer} is compiled, and splits keys otherwise')

  monkeypatch.setattr(networks, '_jitted', refuse)
  families.init_params(toy.llama_config(12), jax.random.key(3))
  with pytest.raises(AssertionError, match='splits keys'):
    lowered('Llama', 1)
