"""Runs T5X's own `infer` many times in one process, for the tests of the
plug-in: `python -m tests.integrations.t5x_runs JOBS.json`.

JOBS.json is a list of dicts: `out`, where to write, and the keywords of `run`.
"""

import functools
import json
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

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 't5x'
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
NUM_LAYERS = {
  'encoder_decoder': {'num_encoder_layers': 2, 'num_decoder_layers': 2},
  'decoder_only': {'num_layers': 2},
}


def sentences() -> list[str]:
  """The texts of the golden batch."""
  batch = np.load(GOLDEN / 'golden_encdec.npz')['encoder_input_tokens']
  return [VOCABULARY.decode(row[row > 1].tolist()) for row in batch]


def dataset(split, shuffle_files=False, seed=None):
  """What the task reads: every sentence, and a word of it as its target."""
  del split, shuffle_files, seed
  import tensorflow as tf

  texts = sentences()
  return tf.data.Dataset.from_tensor_slices({
    'inputs': texts,
    'targets': [text.split()[0] for text in texts],
  })


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


def network(kind: str, dtype: str):
  if kind == 'encoder_decoder':
    return encoder_decoder.Transformer(
      config=encoder_decoder.T5Config(
        dtype=jnp.dtype(dtype), **SIZES, **NUM_LAYERS[kind]
      )
    )
  return decoder_only.DecoderWrapper(
    config=decoder_only.TransformerConfig(
      dtype=jnp.dtype(dtype), **SIZES, **NUM_LAYERS[kind]
    )
  )


def model(kind: str, dtype: str, *, settings=None, decode_fn=None):
  """A T5X model: its own greedy sampler, the plug-in, or a `decode_fn`."""
  vocabularies = [VOCABULARY] * (2 if kind == 'encoder_decoder' else 1)
  args = (network(kind, dtype), *vocabularies, None)
  if settings is None:
    own = (
      functools.partial(plugin.speculative_decode, **decode_fn)
      if decode_fn
      else functools.partial(
        decoding.temperature_sample, temperature=0.0, topk=0
      )
    )
    cls = {
      'encoder_decoder': models.EncoderDecoderModel,
      'decoder_only': models.DecoderOnlyModel,
    }[kind]
    return cls(*args, decode_fn=own)
  cls = {
    'encoder_decoder': plugin.SpeculativeEncoderDecoderModel,
    'decoder_only': plugin.SpeculativeDecoderOnlyModel,
  }[kind]
  if settings['drafter'] == 'model':
    settings = settings | {'draft_module': network(kind, dtype)}
  return cls(*args, **settings)


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
  is_broken: bool = False,
  mode: str = 'predict_with_aux',
  crash_after: int | None = None,
  **infer_args,
) -> None:
  """One call of `t5x.infer.infer`."""
  pathlib.Path(out).mkdir(parents=True, exist_ok=True)
  transforms = ()
  if draft:
    transforms = (functools.partial(plugin.load_draft, path=draft),)
  write_fn = infer.write_inferences_to_file
  if crash_after is not None:
    write_fn = functools.partial(_write_or_crash, crash_after, [])
  infer.infer(
    mode=mode,
    model=model(kind, dtype, settings=settings, decode_fn=decode_fn),
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


def _write_or_crash(num_chunks, written, path, *args, **kwargs):
  if len(written) == num_chunks:
    raise RuntimeError('crashed on purpose')
  written.append(path)
  infer.write_inferences_to_file(path, *args, **kwargs)


def main() -> None:
  for job in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    print('RUN', job['out'], len(jax.devices()), flush=True)
    run(**job)


if __name__ == '__main__':
  main()
