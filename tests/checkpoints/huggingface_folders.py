"""Folders as Hugging Face writes them, and changes of them."""

import json

from specdec_jax.checkpoints import huggingface
from specdec_jax.text import huggingface_tokenizer
from tests.checkpoints.tiny_models import MERGES, byte_tokens


def load_folder(folder, **options) -> tuple:
  """Sizes, parameters and vocabulary of a Hugging Face folder."""
  config = huggingface.read_config(folder, **options)
  vocabulary = huggingface_tokenizer.read_vocabulary(folder)
  return config, huggingface.read_params(folder, config), vocabulary


def tokenizer_json() -> str:
  """A tokenizer of bytes, with some merges."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: i for i, token in enumerate(byte_tokens())},
      merges=[tuple(merge.split(' ')) for merge in MERGES],
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(byte_tokens()[:3])
  return tokenizer.to_str()


def save(folder, config, params) -> None:
  """Writes a model with a tokenizer."""
  huggingface.save(folder, config, params)
  (folder / 'tokenizer.json').write_text(tokenizer_json(), encoding='utf-8')


def change_json(path, **changes) -> None:
  """Changes settings of a file, which need not exist."""
  settings = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(settings | changes))


def shard(folder) -> None:
  """Splits the weights of a folder over two files."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names = sorted(tensors)
  weight_map = {}
  for i, part in enumerate((names[:9], names[9:])):
    file_name = f'model-{i + 1:05}-of-00002.safetensors'
    save_file({name: tensors[name] for name in part}, folder / file_name)
    weight_map |= dict.fromkeys(part, file_name)
  change_json(folder / 'model.safetensors.index.json', weight_map=weight_map)


def rewrite(folder, change) -> None:
  """Applies `change` to the dict of a folder's tensors."""
  from safetensors.numpy import load_file, save_file

  tensors = load_file(folder / 'model.safetensors')
  change(tensors)
  save_file(tensors, folder / 'model.safetensors')


# What stretches rotary positions in Llama 3.1's config.json.
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 64,
}
