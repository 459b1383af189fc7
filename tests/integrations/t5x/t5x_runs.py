"""Runs T5X's own `infer` many times in one process, for the tests of the
plug-in: `python -m tests.integrations.t5x.t5x_runs JOBS.json`.

JOBS.json is a list of dicts of keywords of `run`, or of `sample` where there is
a key `num_rows`.
"""

import functools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import seqio
from t5x import decoding, infer, models, partitioning, utils
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.t5 import network as encoder_decoder

from specdec_jax.integrations import t5x as plugin
from specdec_jax.integrations.t5x import t5_networks
from specdec_jax.models import kv_cache
from tests import toy_t5

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 't5x'
VOCABULARY = seqio.SentencePieceVocabulary(str(GOLDEN / 'tiny_sp.model'))
LENGTHS = {'inputs': 16, 'targets': 16}
SIZES = {
  'vocab_size': 128,
  'emb_dim': 64,
  'num_heads': 4,
  'head_dim': 16,
  'mlp_dim': 128,
  'mlp_activations': ('gelu', 'linear'),
  'dropout_rate': 0.0,
}
# Of `sample`: every short output can be enumerated.
TINY_SIZES = SIZES | {
  'vocab_size': 5,
  'emb_dim': 8,
  'num_heads': 2,
  'head_dim': 4,
  'mlp_dim': 12,
}
TINY_LEN = 3
TINY_ENCODER_ROW = (3, 4, 2, 1)


def sentences() -> list[str]:
  """The texts of the golden batch."""
  batch = np.load(GOLDEN / 'golden_encdec.npz')['encoder_input_tokens']
  return [VOCABULARY.decode(row[row > 1].tolist()) for row in batch]


def dataset(split, shuffle_files=False, seed=None):
  """What the task reads: every sentence, and a word of it as its target."""
  del split, shuffle_files, seed
  import tensorflow as tf

  texts = sentences()
  return tf.data.Dataset.from_tensor_slices(
    {
      'inputs': texts,
      'targets': [text.split()[0] for text in texts],
    }
  )


seqio.TaskRegistry.add(
  'golden_sentences',
  source=seqio.FunctionDataSource(
    dataset, splits=['test'], num_input_examples={'test': 16}
  ),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  output_features={
    'inputs': seqio.Feature(VOCABULARY),
    'targets': seqio.Feature(VOCABULARY),
  },
)


def network(kind: str, dtype: str, sizes=SIZES, num_layers: int = 2):
  """A T5X network."""
  sizes = sizes | {'dtype': jnp.dtype(dtype)}
  if kind == 'encoder_decoder':
    config = encoder_decoder.T5Config(
      num_encoder_layers=num_layers, num_decoder_layers=num_layers, **sizes
    )
    return encoder_decoder.Transformer(config=config)
  config = decoder_only.TransformerConfig(num_layers=num_layers, **sizes)
  return decoder_only.DecoderWrapper(config=config)


def model(
  module, *, settings=None, decode_fn=None, draft_module=None, **sampling
):
  """A T5X model of its own, with a sampler or a `decode_fn`, or the plug-in."""
  has_encoder = isinstance(module, encoder_decoder.Transformer)
  args = (module, *[VOCABULARY] * (2 if has_encoder else 1), None)
  if settings is not None:
    cls = (
      plugin.SpeculativeEncoderDecoderModel
      if has_encoder
      else plugin.SpeculativeDecoderOnlyModel
    )
    return cls(*args, draft_module=draft_module, **settings)
  cls = models.EncoderDecoderModel if has_encoder else models.DecoderOnlyModel
  if decode_fn is not None:
    own = functools.partial(plugin.speculative_decode, **decode_fn)
  else:
    own = functools.partial(decoding.temperature_sample, topk=0, **sampling)
  return cls(*args, decode_fn=own)


def run(
  out: str,
  *,
  kind: str,
  dtype: str,
  checkpoint: str,
  num_partitions: int = 1,
  settings: dict | None = None,
  decode_fn: dict | None = None,
  draft: str | None = None,
  is_additive: bool = False,
  crash_after: int | None = None,
  **infer_args,
) -> None:
  """One call of `t5x.infer.infer`, on batches of 8 and in chunks of one."""
  pathlib.Path(out).mkdir(parents=True, exist_ok=True)
  transforms = ()
  if draft:
    transforms = (functools.partial(plugin.load_draft, path=draft),)
  write_fn = infer.write_inferences_to_file
  if crash_after is not None:
    write_fn = functools.partial(_write_or_crash, crash_after, [])
  kv_cache.append = _append_by_adding if is_additive else _APPEND
  # Layers are traced once, and what was traced does not see the change.
  jax.clear_caches()
  module = network(kind, dtype)
  infer.infer(
    mode='predict_with_aux',
    model=model(
      module,
      settings=settings,
      decode_fn=decode_fn,
      draft_module=module if draft else None,
      temperature=0.0,
    ),
    dataset_cfg=utils.DatasetConfig(
      mixture_or_task_name='golden_sentences',
      task_feature_lengths=LENGTHS,
      split='test',
      batch_size=8,
      shuffle=False,
      seed=0,
      pack=False,
    ),
    restore_checkpoint_cfg=utils.RestoreCheckpointConfig(
      path=checkpoint,
      mode='specific',
      dtype=dtype,
      state_transformation_fns=transforms,
    ),
    partitioner=partitioning.PjitPartitioner(num_partitions=num_partitions),
    output_dir=out,
    write_fn=write_fn,
    summarize_config_fn=lambda **kwargs: None,
    checkpoint_period=1,
    checkpoint_ds_iter=False,
    **infer_args,
  )


def note(state_dict, target_state_dict, *, is_resuming=False, path: str):
  """A user's own transformation of a checkpoint: what it saw is at `path`."""
  del is_resuming
  pathlib.Path(path).write_text(' '.join(target_state_dict['target']))
  return state_dict


def sample(
  out: str, *, kind: str, num_rows: int, settings=None, key_impl=None
) -> None:
  """Many samples at temperature 1 from one prompt, as `.npy`."""
  module = network(kind, 'float32', TINY_SIZES, num_layers=1)
  params = toy_t5.params(t5_networks.config_of(module), seed=1)
  if settings and settings['drafter'] == 'model':
    params[t5_networks.DRAFT] = toy_t5.params(
      t5_networks.config_of(module), seed=2
    )
  batch = {
    'encoder_input_tokens': jnp.tile(
      jnp.array(TINY_ENCODER_ROW), (num_rows, 1)
    ),
    'decoder_input_tokens': jnp.zeros((num_rows, TINY_LEN), jnp.int32),
    'decoder_causal_attention': jnp.zeros((num_rows, TINY_LEN), jnp.int32),
  }
  made = model(
    module,
    settings=settings,
    draft_module=module if t5_networks.DRAFT in params else None,
    temperature=1.0,
  )
  with jax.default_prng_impl(key_impl or 'threefry2x32'):
    tokens = jax.jit(made.predict_batch)(params, batch, jax.random.PRNGKey(7))
  np.save(out, np.asarray(tokens))


_APPEND = kv_cache.append


def _append_by_adding(buffer, block, lengths):
  """T5X's own cache write: right for one token, wrong after a rollback."""
  positions = lengths[:, None] + jnp.arange(block.shape[2])
  one_hot = jax.nn.one_hot(positions, buffer.shape[2], dtype=buffer.dtype)
  return buffer + jnp.einsum('bts,bhtd->bhsd', one_hot, block)


def _write_or_crash(num_chunks, written, path, *args, **kwargs):
  """Ends the process in the place of a chunk after `num_chunks`."""
  if len(written) == num_chunks:
    os._exit(17)
  written.append(path)
  infer.write_inferences_to_file(path, *args, **kwargs)


def main() -> None:
  for job in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    (sample if 'num_rows' in job else run)(**job)


if __name__ == '__main__':
  main()
