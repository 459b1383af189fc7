"""Tiny decodes, iteration by iteration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import drafters, verification
from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families, llama
from specdec_jax.sampling import logits

VOCAB_SIZE = 11
EOS_ID = 2
MAX_LEN = 24
GAMMA = 3


def pieces(ids):
  """Every token is its number between colons, or a line break."""
  return ['\n' if i == 3 else f':{i}' for i in ids]


_CONFIG = llama.LlamaConfig(
  vocab_size=VOCAB_SIZE,
  embed_dim=8,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=8,
)
_MODEL = families.language_model(_CONFIG)
_LAW = logits.standardize()


@functools.cache
def _weights():
  """Of the target, and of a draft model that resembles it."""
  init = jax.jit(functools.partial(families.init_params, _CONFIG))
  target, other = (init(jax.random.key(seed)) for seed in range(2))
  drafter = jax.tree.map(lambda a, b: 0.8 * a + 0.4 * b, target, other)
  return target, drafter


def prompt(max_lengths=(MAX_LEN, MAX_LEN)):
  """Two rows, 40 and 7, of 3 and 5 tokens."""
  return Prompt(
    encoder_tokens=None,
    decoder_tokens=jnp.array([[1, 5, 6, 0, 0], [1, 4, 5, 4, 5]], jnp.int32),
    decoder_lengths=jnp.array([3, 5], jnp.int32),
    row_ids=jnp.array([40, 7], jnp.int32),
    max_lengths=jnp.array(max_lengths, jnp.int32),
  )


@functools.cache
def _functions(name, verify_fn, temperature):
  """Jitted `init` and `step`."""
  if name == 'model':
    drafter = drafters.autoregressive(_MODEL, gamma=GAMMA, logits_to_probs=_LAW)
  else:
    drafter = drafters.prompt_lookup(gamma=GAMMA, max_ngram=2, min_ngram=1)
  method = Method(
    target=_MODEL,
    drafter=drafter,
    verify_fn=verify_fn,
    logits_to_probs=logits.standardize(temperature=temperature),
    eos_id=EOS_ID,
  )
  init = functools.partial(speculative.init, method=method, max_len=MAX_LEN)
  step = functools.partial(speculative.step, method=method)
  # Compiling takes longer than running does.
  options = {'xla_backend_optimization_level': 0}
  jit = functools.partial(jax.jit, compiler_options=options)
  return jit(init), jit(step)


def decode(
  name,
  verify_fn=verification.speculative_sampling,
  *,
  temperature=1.0,
  seed=0,
  max_lengths=(MAX_LEN, MAX_LEN),
):
  """The infos of all iterations, and the output, as numpy arrays."""
  init, step = _functions(name, verify_fn, temperature)
  target, drafter = _weights()
  params = Params(target, drafter if name == 'model' else ())
  state = init(params, jax.random.key(seed), prompt(max_lengths))
  infos = []
  while not np.all(state.done):
    state, info = step(params, state)
    infos.append(jax.device_get(info))
  return infos, jax.device_get(speculative.output(state))
