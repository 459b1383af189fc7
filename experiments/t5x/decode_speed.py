"""T5X's own greedy sampler against this package, on the same weights.

Plain against plain (T5X's `temperature_sample` at temperature 0 and
`decoding.autoregressive.generate`), and the T5X plug-in with prompt lookup. An
encoder-decoder of T5 1.1 small's sizes with random weights, float32; every row
decodes the same number of tokens. Needs T5X (docs/t5x.md):

    PYTHONPATH=$T5X_DIR:. python experiments/t5x/decode_speed.py \
      --batch_size=16 --encoder_length=128 --num_new=64 --repeats=5

Programs are compiled first and then run in turns; the medians and the median of
the pairs' ratios are printed.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding, models
from t5x.examples.t5 import network

from specdec_jax import logits
from specdec_jax.base import Params, Prompt
from specdec_jax.costs import measure
from specdec_jax.decoding import autoregressive
from specdec_jax.integrations import t5x as plugin
from specdec_jax.models import adapters, presets, t5

NO_EOS = -1


class Vocabulary:
  """T5X's models want one; nothing is encoded here."""

  eos_id = NO_EOS


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batch_size', type=int, default=16)
  parser.add_argument('--encoder_length', type=int, default=128)
  parser.add_argument('--num_new', type=int, default=64)
  parser.add_argument('--gamma', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()

  config = presets.preset('t5_1_1_small')
  params = random_params(config)
  rng = np.random.default_rng(0)
  shape = (args.batch_size, args.encoder_length)
  encoder_tokens = jnp.asarray(rng.integers(3, 32_000, shape), jnp.int32)
  seconds, outputs = measure.alternate(
    programs(config, params, encoder_tokens, args), args.repeats
  )
  report(seconds, outputs, args)


def random_params(config: t5.T5Config):
  """Weights whose greedy texts go round in circles, as random ones do."""
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    if path[-1].key == 'scale':
      return jnp.ones(leaf.shape, leaf.dtype)
    fan_in = 1 if 'embedding' in path[-1].key else leaf.shape[0]
    values = rng.standard_normal(leaf.shape, np.float32) / np.sqrt(fan_in)
    return jnp.asarray(values, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, t5.param_shapes(config))


def programs(config, params, encoder_tokens, args):
  """What is compared, by name; each gives int32 `[B, num_new]`."""
  batch = {
    'encoder_input_tokens': encoder_tokens,
    'decoder_input_tokens': jnp.zeros(
      (args.batch_size, args.num_new), jnp.int32
    ),
  }
  module = network.Transformer(
    config=network.T5Config(
      vocab_size=config.vocab_size,
      dtype=config.dtype,
      emb_dim=config.embed_dim,
      num_heads=config.num_heads,
      num_encoder_layers=config.num_encoder_layers,
      num_decoder_layers=config.num_decoder_layers,
      head_dim=config.head_dim,
      mlp_dim=config.mlp_dim,
      mlp_activations=config.mlp_activations,
      dropout_rate=0.0,
    )
  )
  greedy = functools.partial(
    decoding.temperature_sample, temperature=0.0, topk=0
  )
  vocabularies = (Vocabulary(), Vocabulary(), None)
  own = models.EncoderDecoderModel(module, *vocabularies, decode_fn=greedy)
  speculative = plugin.SpeculativeEncoderDecoderModel(
    module, *vocabularies, drafter='prompt_lookup', gamma=args.gamma
  )

  def predict(model):
    step = jax.jit(functools.partial(_predict, model))
    return lambda: step(params, batch)

  prompt = Prompt(
    encoder_tokens=encoder_tokens,
    decoder_tokens=jnp.zeros((args.batch_size, 1), jnp.int32),
    decoder_lengths=jnp.ones(args.batch_size, jnp.int32),
    row_ids=jnp.arange(args.batch_size, dtype=jnp.int32),
  )
  generate = jax.jit(
    functools.partial(
      autoregressive.generate,
      target=adapters.t5(config),
      logits_to_probs=logits.standardize(temperature=0.0),
      max_len=args.num_new + 1,
      eos_id=NO_EOS,
    )
  )
  plain = lambda: generate(Params(params), jax.random.key(0), prompt)
  return {
    'T5X, temperature_sample': predict(own),
    'specdec_jax, plain': lambda: (plain().tokens[:, 1:], {}),
    'T5X with the plug-in, prompt lookup': predict(speculative),
  }


def _predict(model, params, batch):
  return model.predict_batch_with_aux(
    params, batch, decoder_params={'eos_id': NO_EOS}
  )


def report(seconds, outputs, args) -> None:
  """Prints a line for each program."""
  first = next(iter(seconds))
  num_tokens = args.batch_size * args.num_new
  print(f'{args}\n{jax.devices()}, jax {jax.__version__}')
  for name, times in seconds.items():
    tokens, aux = outputs[name]
    ratio = np.median(seconds[first] / times)
    is_same = np.array_equal(tokens, outputs[first][0])
    print(
      f'{name}: {np.median(times):.3f} s, '
      f'{num_tokens / np.median(times):.1f} tokens/s, '
      f'{ratio:.2f} times {first}; tokens '
      f'{"equal" if is_same else "DIFFER"}'
    )
    if 'num_target_runs' in aux:
      runs = int(jnp.sum(aux['num_target_runs']))
      print(f'  {num_tokens / runs:.2f} tokens a target run')


if __name__ == '__main__':
  main()
