"""T5X's own greedy sampler against the T5X plug-in, on the same weights.

The plug-in decodes plainly, with prompt lookup and with a draft model. An
encoder-decoder of T5 1.1 small's sizes with random weights, float32; every row
decodes the same number of tokens. The draft model is the first two layers of
each of the target's stacks, and the other layers are scaled down, so that the
two agree often: how often is printed, and is no figure of any trained model.
What carries over is the cost of an iteration, in runs of plain decoding: with
more tokens per iteration than that, drafting pays. Needs T5X (docs/t5x.md):

    PYTHONPATH=$T5X_DIR:. python experiments/t5x/decode_speed.py \
      --batch_sizes=1,4,16 --encoder_length=64 --num_new=64 --repeats=5

Programs are compiled first and then run in turns. Printed are medians, of
seconds and of processor seconds, and the medians of ratios within a turn.
"""

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding, models
from t5x.examples.t5 import network

from specdec_jax.integrations import t5x as plugin
from specdec_jax.integrations.t5x import t5_networks
from specdec_jax.launch import platforms
from specdec_jax.measure import stopwatch
from specdec_jax.models import families, presets, t5
from specdec_jax.theory import estimates

NO_EOS = -1
OWN, PLAIN = "T5X's sampler", 'none'
# Of what the layers after the second add to the residual stream.
DEEP_SCALE = 0.05


class Vocabulary:
  """T5X's models want one; nothing is encoded here."""

  eos_id = NO_EOS


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batch_sizes', default='1,4,16')
  parser.add_argument('--encoder_length', type=int, default=64)
  parser.add_argument('--num_new', type=int, default=64)
  parser.add_argument('--gamma', type=int, default=4)
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()

  config = presets.preset('t5_1_1_small')
  params = random_params(config)
  print(
    f'{args}\n{platforms.device_name()}, {jax.devices()}, jax {jax.__version__}'
  )
  for batch_size in map(int, args.batch_sizes.split(',')):
    compare(config, params, batch_size, args)


def compare(config, params, batch_size: int, args) -> None:
  """Times every way of decoding one batch, and prints a line for each."""
  rng = np.random.default_rng(0)
  shape = (batch_size, args.encoder_length)
  encoder_tokens = jnp.asarray(rng.integers(3, 32_000, shape), jnp.int32)
  cpu_seconds: dict[str, list[float]] = {}
  timed = {
    name: functools.partial(
      _count_cpu, program, cpu_seconds.setdefault(name, [])
    )
    for name, program in programs(config, params, encoder_tokens, args).items()
  }
  seconds, outputs = stopwatch.alternate(timed, args.repeats)
  print(f'\nbatch {batch_size}')
  # The first run of each compiles it and is not counted.
  cpu_seconds = {k: v[1:] for k, v in cpu_seconds.items()}
  report(seconds, cpu_seconds, outputs, batch_size * args.num_new)


def _count_cpu(program, cpu_seconds: list[float]):
  started = time.process_time()
  result = jax.block_until_ready(program())
  cpu_seconds.append(time.process_time() - started)
  return result


def random_params(config: t5.T5Config):
  """Weights of the target, and of its first layers at 'draft'."""
  rng = np.random.default_rng(1)

  def draw(path, leaf):
    names = [entry.key for entry in path]
    if names[-1] == 'scale':
      return jnp.ones(leaf.shape, leaf.dtype)
    fan_in = 1 if 'embedding' in names[-1] else leaf.shape[0]
    values = rng.standard_normal(leaf.shape, np.float32) / np.sqrt(fan_in)
    is_last = names[-2] in ('out', 'wo')
    if is_last and not {'layers_0', 'layers_1'} & set(names):
      values = values * DEEP_SCALE
    return jnp.asarray(values, leaf.dtype)

  params = jax.tree_util.tree_map_with_path(draw, families.param_shapes(config))
  keep = lambda name: (
    not name.startswith('layers_')
    or name
    in (
      'layers_0',
      'layers_1',
    )
  )
  draft = {
    part: {name: leaf for name, leaf in tree.items() if keep(name)}
    for part, tree in params.items()
  }
  return params | {t5_networks.DRAFT: draft}


def network_of(config: t5.T5Config) -> network.Transformer:
  """The same sizes as a network of T5X's."""
  return network.Transformer(
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


def programs(config, params, encoder_tokens, args):
  """What is compared, by name; each gives int32 `[B, num_new]`."""
  batch = {
    'encoder_input_tokens': encoder_tokens,
    'decoder_input_tokens': jnp.zeros(
      (encoder_tokens.shape[0], args.num_new), jnp.int32
    ),
  }
  module = network_of(config)
  draft_module = network_of(
    dataclasses.replace(config, num_encoder_layers=2, num_decoder_layers=2)
  )
  greedy = functools.partial(
    decoding.temperature_sample, temperature=0.0, topk=0
  )
  vocabularies = (Vocabulary(), Vocabulary(), None)
  speculative = functools.partial(
    plugin.SpeculativeEncoderDecoderModel,
    module,
    *vocabularies,
    gamma=args.gamma,
  )
  target = {k: v for k, v in params.items() if k != t5_networks.DRAFT}

  def predict(model, params):
    step = jax.jit(functools.partial(_predict, model))
    return lambda: step(params, batch)

  own = models.EncoderDecoderModel(module, *vocabularies, decode_fn=greedy)
  return {
    OWN: predict(own, target),
    PLAIN: predict(speculative(drafter='none'), target),
    'prompt_lookup': predict(speculative(drafter='prompt_lookup'), target),
    'model': predict(
      speculative(drafter='model', draft_module=draft_module), params
    ),
  }


def _predict(model, params, batch):
  return model.predict_batch_with_aux(
    params, batch, decoder_params={'eos_id': NO_EOS}
  )


def report(seconds, cpu_seconds, outputs, num_tokens: int) -> None:
  """Prints a line for each program."""
  num_iterations = {
    name: int(jnp.max(aux['num_target_runs']))
    for name, (_, aux) in outputs.items()
    if 'num_target_runs' in aux
  }
  for name, times in seconds.items():
    tokens, aux = outputs[name]
    cpu = np.asarray(cpu_seconds[name])
    cpu_ratio = np.median(np.asarray(cpu_seconds[OWN]) / cpu)
    is_same = np.array_equal(tokens, outputs[OWN][0])
    print(
      f'{name}: {np.median(times):.2f} s, {np.median(cpu):.2f} processor s, '
      f'{num_tokens / np.median(times):.1f} tokens/s; '
      f'{np.median(seconds[OWN] / times):.2f} times {OWN} '
      f'({cpu_ratio:.2f} by processor time); '
      f'tokens {"equal" if is_same else "DIFFER"}'
    )
    if name in num_iterations and name != PLAIN:
      ratio = num_iterations[PLAIN] / num_iterations[name]
      cost = ratio * np.median(times / seconds[PLAIN])
      cpu_cost = ratio * np.median(cpu / np.asarray(cpu_seconds[PLAIN]))
      runs = int(jnp.sum(aux['num_target_runs']))
      efficiency = estimates.quotient(num_tokens, runs)
      print(
        f'  {efficiency:.2f} tokens per target run, '
        f'{num_iterations[name]} iterations at {cost:.2f} plain ones '
        f'({cpu_cost:.2f} by processor time)'
      )


if __name__ == '__main__':
  main()
