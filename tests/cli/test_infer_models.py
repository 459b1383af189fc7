"""Drafters as gin files name them."""

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import logits
from specdec_jax.base import Context
from specdec_jax.infer import infer_models
from specdec_jax.infer.infer_models import Model, Target
from tests import toy
from tests.cli import tiny


def target_of(model: Model, *, is_dry: bool = False) -> Target:
  config = infer_models.read_config(model)
  return Target(
    config=config,
    vocabulary=None if is_dry else infer_models.read_vocabulary(model, config),
    sampled=lambda vocab_size: logits.standardize(vocab_size=vocab_size),
  )


@pytest.mark.parametrize('is_dry', [False, True])
def test_a_draft_model_gets_logits_of_its_targets_size(make_model, is_dry):
  num_tokens = len(tiny.make_tokens())
  wide = make_model('wide', vocab_size=num_tokens + 7)
  wider = make_model('wider', vocab_size=num_tokens + 9)
  target = target_of(Model(checkpoint=wide), is_dry=is_dry)
  drafting = infer_models.draft_model(target, model=Model(checkpoint=wider))
  assert drafting.config.vocab_size == num_tokens + 9

  def draft(params, keys, context):
    state = drafting.drafter.init(params, toy.prompt([[3, 4]]), 16)
    return drafting.drafter.propose(params, keys, context, state)[0]

  shape = jax.eval_shape(
    draft,
    infer_models.param_shapes(drafting.config),
    jax.random.split(jax.random.key(0), 1),
    Context(tokens=jnp.zeros((1, 16), jnp.int32), lengths=jnp.full(1, 2)),
  )
  assert shape.probs.shape == (1, 4, num_tokens + 7)


def test_a_dry_run_knows_padding_from_another_vocabulary():
  target = target_of(Model(checkpoint='', sizes='t5_1_1_small'), is_dry=True)
  with pytest.raises(ValueError, match='32128 logits, the draft model 250112'):
    infer_models.draft_model(
      target, model=Model(checkpoint='', sizes='mt5_small')
    )


@pytest.mark.parametrize('num_devices', [0, -1, '1'])
def test_a_mesh_has_devices(num_devices):
  with pytest.raises(ValueError, match=f'num_devices {num_devices!r}: there'):
    infer_models.device_mesh(num_devices=num_devices)
