"""Model gins of tiny T5X networks, as users have them, for the tests."""

import pathlib

VOCABULARY = (
  pathlib.Path(__file__).parents[2] / 'golden' / 't5x' / 'tiny_sp.model'
)
MODEL_GIN = """
from __gin__ import dynamic_registration
include '{base}'
import seqio
from t5x import utils
from tests.integrations import t5x_runs
from {package} import network
utils.RestoreCheckpointConfig.state_transformation_fns = [@t5x_runs.note]
t5x_runs.note.path = '{noted}'
seqio.SentencePieceVocabulary.sentencepiece_model_file = '{vocabulary}'
network.{config}:
  vocab_size = 128
  dtype = 'float32'
  logits_via_embedding = False
{sizes}"""
DRAFT_GIN = """
from __gin__ import dynamic_registration
from {package} import network
draft/network.{config}:
{sizes}"""
GIN = {
  'encoder_decoder': {
    'base': 't5x/examples/t5/t5_1_1/base.gin',
    'package': 't5x.examples.t5',
    'config': 'T5Config',
  },
  'decoder_only': {
    'base': 't5x/examples/decoder_only/models/base.gin',
    'package': 't5x.examples.decoder_only',
    'config': 'TransformerConfig',
  },
}


def gin_files(kind: str, folder) -> tuple[str, str]:
  """Model gins of the tiny target and of its draft model."""
  sizes = {'emb_dim': 64, 'num_heads': 4, 'head_dim': 16, 'mlp_dim': 128}
  if kind == 'encoder_decoder':
    sizes |= {'num_encoder_layers': 2, 'num_decoder_layers': 2}
  else:
    sizes |= {'num_layers': 2}
  fields = GIN[kind] | {
    'sizes': ''.join(f'  {k} = {v}\n' for k, v in sizes.items()),
    'vocabulary': VOCABULARY,
    'noted': folder / 'noted',
  }
  for name, text in (('model', MODEL_GIN), ('draft', DRAFT_GIN)):
    (folder / f'{name}.gin').write_text(text.format(**fields))
  return str(folder / 'model.gin'), str(folder / 'draft.gin')
