"""Small real files of every format, as the packages write them.

They lie in seeds.zip, so that an input is the same on every machine;
`python -m tests.fuzz.seeds` writes it anew.
"""

import dataclasses
import json
import math
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specdec_jax import lazy
from specdec_jax.assembly import trace_files as storage
from specdec_jax.checkpoints import (
  huggingface,
  orbax,
  safetensors_model,
  t5x,
)
from specdec_jax.models import families
from specdec_jax.models.drafting.eagle import EagleConfig
from specdec_jax.models.families import AnyConfig
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.text import sentencepiece_vocabulary
from tests import toy_gemma
from tests.assembly import written_traces
from tests.checkpoints import tiny_models

_BYTES = [*'abehintx', 'Ġ']
_MERGES = ['h e', 'i n', 'Ġ b']
_SPECIAL = ['<|im_start|>', '<|im_end|>']
_TOKENS = [*_SPECIAL, *_BYTES, *(m.replace(' ', '') for m in _MERGES)]
_TEXT = 'the fox in the box has a hat and the hen has ten eggs in a box'
_EXTRA_IDS = 3

LLAMA = LlamaConfig(
  vocab_size=len(_TOKENS),
  embed_dim=4,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=2,
  mlp_dim=4,
  rope_base=10_000.0,
  norm_epsilon=1e-5,
  max_positions=32,
  is_tied=True,
)


ARCHIVE = Path(__file__).parent / 'seeds.zip'


def extract(folder: Path) -> None:
  """Writes a folder for each seed; see `readers` for what reads them."""
  with zipfile.ZipFile(ARCHIVE) as archive:
    archive.extractall(folder)


def build(folder: Path) -> None:
  """Writes the seeds themselves."""
  model = _sentencepiece_model()
  t5 = _t5_config(model)
  decoder = dataclasses.replace(t5, num_encoder_layers=0)
  _write_gguf(folder / 'gguf')
  _write_llama(folder / 'llama')
  _write_t5(folder / 't5', model, t5)
  _write_eagle(folder / 'eagle')
  _write_gemmas(folder)
  _write_ours(folder / 'ours', model, decoder)
  _write_t5x(folder / 't5x')
  orbax.write_tree(folder / 'orbax' / 'params', _arrays())
  _write_orbax_files(folder / 'orbax_files')
  _write_trace(folder / 'trace')
  for write in lazy.installed('tests.training.fuzzed:write_seeds'):
    write(folder)


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    build(Path(folder))
    paths = sorted(p for p in Path(folder).rglob('*') if p.is_file())
    with zipfile.ZipFile(ARCHIVE, 'w', zipfile.ZIP_DEFLATED) as archive:
      for path in paths:
        info = zipfile.ZipInfo(str(path.relative_to(folder)))
        info.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(info, path.read_bytes())


def _write_gguf(folder: Path) -> None:
  folder.mkdir(parents=True)
  types = [3] * len(_SPECIAL) + [1] * (len(_TOKENS) - len(_SPECIAL))
  vocabulary = {
    'tokenizer.ggml.tokens': _TOKENS,
    'tokenizer.ggml.token_type': types,
    'tokenizer.ggml.merges': _MERGES,
    'tokenizer.ggml.bos_token_id': 0,
    'tokenizer.ggml.eos_token_id': 1,
    'tokenizer.ggml.add_bos_token': True,
    'llama.rope.scaling.factor': 1.0,
    'llama.attention.sliding_window': 0,
  }
  tiny_models.write_gguf(
    folder / 'model.gguf', LLAMA, _params(LLAMA), metadata=vocabulary
  )


def _write_llama(folder: Path) -> None:
  """Two files of weights, and all settings that a folder can have."""
  import tokenizers

  huggingface.save(folder, LLAMA, _params(LLAMA))
  bpe = tokenizers.models.BPE(
    vocab={token: i for i, token in enumerate(_TOKENS)},
    merges=[tuple(merge.split()) for merge in _MERGES],
  )
  tokenizer = tokenizers.Tokenizer(bpe)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|im_start|>:0 $A:0', special_tokens=[('<|im_start|>', 0)]
  )
  tokenizer.normalizer = tokenizers.normalizers.NFC()
  tokenizer.add_tokens(
    [tokenizers.AddedToken(t, special=True) for t in _SPECIAL]
  )
  tokenizer.enable_truncation(8)
  (folder / 'tokenizer.json').write_text(tokenizer.to_str(), encoding='utf-8')
  _write_json(
    folder / 'tokenizer_config.json',
    {
      'bos_token': {'content': '<|im_start|>', 'special': True},
      'eos_token': '<|im_end|>',
      'chat_template': [
        {'name': 'default', 'template': tiny_models.CHAT_TEMPLATE}
      ],
    },
  )
  _write_json(folder / 'generation_config.json', {'eos_token_id': [1]})
  _shard(folder)


def _shard(folder: Path) -> None:
  """One file of weights becomes two and an index."""
  import safetensors.numpy

  path = folder / 'model.safetensors'
  tensors = sorted(safetensors.numpy.load_file(path).items())
  path.unlink()
  weight_map = {}
  for i in range(2):
    part = dict(tensors[i::2])
    name = f'model-{i + 1}-of-2.safetensors'
    safetensors.numpy.save_file(part, folder / name, {'format': 'pt'})
    weight_map |= dict.fromkeys(part, name)
  _write_json(
    folder / 'model.safetensors.index.json',
    {'metadata': {'total_size': 1}, 'weight_map': weight_map},
  )


def _sentencepiece_model() -> bytes:
  import io

  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([_TEXT] * 4),
    model_writer=model,
    vocab_size=22,
    normalization_rule_name='identity',
    pad_id=sentencepiece_vocabulary.PAD_ID,
    eos_id=sentencepiece_vocabulary.EOS_ID,
    unk_id=sentencepiece_vocabulary.UNK_ID,
    bos_id=-1,
    num_threads=1,
    minloglevel=2,
  )
  return model.getvalue()


def _t5_config(model: bytes) -> T5Config:
  import sentencepiece

  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  return T5Config(
    vocab_size=processor.get_piece_size() + _EXTRA_IDS,
    embed_dim=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    num_heads=1,
    head_dim=2,
    mlp_dim=4,
    relpos_num_buckets=4,
    relpos_max_distance=8,
  )


def _write_sentencepiece(folder: Path, model: bytes) -> None:
  (folder / 'spiece.model').write_bytes(model)
  _write_json(folder / 'tokenizer_config.json', {'extra_ids': _EXTRA_IDS})


def _write_t5(folder: Path, model: bytes, config: T5Config) -> None:
  huggingface.save(folder, config, _params(config))
  _write_sentencepiece(folder, model)


def _write_eagle(folder: Path) -> None:
  """In the spelling with most sections."""
  config = EagleConfig(
    vocab_size=12,
    draft_vocab_size=5,
    embed_dim=4,
    target_embed_dim=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    mlp_dim=4,
    feature_layers=(1, 3),
    fc_norm=True,
    norm_before_next=True,
  )
  ids = np.array([0, 2, 3, 7, 11], np.int32)
  huggingface.save(folder, config, _params(config) | {'target_ids': ids})


def _write_gemmas(folder: Path) -> None:
  """A Gemma 3 in both formats, and a T5Gemma."""
  sizes = {'embed_dim': 4, 'num_heads': 2, 'num_kv_heads': 1, 'head_dim': 2}
  gemma = toy_gemma.decoder(len(_TOKENS), num_layers=1, mlp_dim=4, **sizes)
  gemma = dataclasses.replace(gemma, windows=(3,), query_pre_attn_scalar=2)
  huggingface.save(folder / 'gemma', gemma, _params(gemma))
  t5gemma = toy_gemma.encoder_decoder(5, num_layers=1, mlp_dim=4, **sizes)
  huggingface.save(folder / 't5gemma', t5gemma, _params(t5gemma))
  (folder / 'gguf_gemma').mkdir()
  own = {
    'attention.key_length': 2,
    'attention.sliding_window': 3,
    'rope.scaling.type': 'linear',
    'rope.scaling.factor': 8.0,
  }
  stated = {f'gemma3.{key}': value for key, value in own.items()}
  tiny_models.write_gguf(
    folder / 'gguf_gemma' / 'model.gguf',
    gemma,
    _params(gemma),
    architecture='gemma3',
    metadata=stated | {'tokenizer.ggml.tokens': _TOKENS},
  )


def _write_ours(folder: Path, model: bytes, config: T5Config) -> None:
  safetensors_model.save(folder, config, _params(config))
  _write_sentencepiece(folder, model)


def _arrays() -> dict[str, Any]:
  """A tree of few arrays: each is opened by itself, which takes time."""
  return {
    'decoder': {
      'kernel': np.arange(24, dtype=np.float32).reshape(6, 4),
      'norm': {'scale': np.ones(4, np.float32)},
    },
    'embedding': np.arange(6, dtype=np.float32).reshape(3, 2) / 7,
  }


def _write_t5x(folder: Path) -> None:
  t5x.write_target(folder, _arrays(), step=1)
  # As T5X does, a small array lies in the index itself.
  _inline_one(folder / 'checkpoint_1')


def _inline_one(folder: Path) -> None:
  from flax import serialization

  path = folder / 'checkpoint'
  contents = serialization.msgpack_restore(path.read_bytes())
  norm = contents['optimizer']['target']['decoder']['norm']
  shutil.rmtree(folder / norm['scale']['kvstore']['path'])
  norm['scale'] = np.ones(norm['scale']['metadata']['shape'], np.float32)
  path.write_bytes(serialization.msgpack_serialize(contents))


def _write_orbax_files(folder: Path) -> None:
  """As Orbax did before OCDBT: a zarr for each array, here not compressed."""
  import tensorstore

  base = folder / 'params'
  base.mkdir(parents=True)
  tree = {}
  for keys, leaf in jax.tree.leaves_with_path(_arrays()):
    names = [key.key for key in keys]
    metadata = {
      'shape': list(leaf.shape),
      'chunks': [math.ceil(leaf.shape[0] / 2), *leaf.shape[1:]],
      'compressor': None,
    }
    kvstore = {'driver': 'file', 'path': f'{base}/{".".join(names)}/'}
    spec = {'driver': 'zarr', 'dtype': 'float32', 'metadata': metadata}
    array = tensorstore.open({**spec, 'kvstore': kvstore}, create=True).result()
    array.write(np.asarray(leaf)).result()
    tree[str(tuple(names))] = {
      'key_metadata': [{'key': name, 'key_type': 2} for name in names],
      'value_metadata': {'value_type': 'np.ndarray', 'skip_deserialize': False},
    }
  _write_json(
    base / '_METADATA',
    {'tree_metadata': tree, 'use_ocdbt': False, 'use_zarr3': False},
  )


def _write_trace(folder: Path) -> None:
  folder.mkdir(parents=True)
  traced = written_traces.written_trace()
  records = [traced.header, traced.prompts[0], *traced.iterations[0]]
  with (folder / 'trace.jsonl').open('w', encoding='utf-8') as file:
    for record in [*records, traced.summary]:
      storage.write_record(file, record)


def _params(config: AnyConfig) -> dict[str, Any]:
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32),
    families.param_shapes(config),
  )


def _write_json(path: Path, value: Any) -> None:
  path.write_text(json.dumps(value), encoding='utf-8')


if __name__ == '__main__':
  main()
