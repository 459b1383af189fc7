"""The n-gram drafter draws where the target does, whichever door it is from."""

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.assembly import drafters, models
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Context

pytest.importorskip('tokenizers')


@pytest.mark.parametrize(('temperature', 'draws'), [(0.0, False), (1.0, True)])
def test_an_ngram_table_is_sampled_where_the_target_is(
  tmp_path, temperature, draws
):
  (tmp_path / 'text.txt').write_text('one two three')
  model = Model(checkpoint='random:lm_nano')
  config = models.read_config(model)
  target = drafters.choice.Target(
    name='target',
    config=config,
    vocabulary=models.read_vocabulary(model, config),
    sampling=TextSettings(temperature=temperature),
  )
  choice = drafters.NGram(ngram_text=str(tmp_path / 'text.txt'), gamma=4)
  drafter = choice.make(target, choice.length).drafter
  context = Context(tokens=jnp.ones((1, 4), jnp.int32), lengths=jnp.array([2]))
  draft, _ = jax.eval_shape(
    drafter.propose, (), jax.random.split(jax.random.key(0), 1), context, ()
  )
  assert (draft.probs is not None) == draws
