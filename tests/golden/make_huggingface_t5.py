"""Makes tiny T5s of Hugging Face transformers; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.23.0 safetensors
  python tests/golden/make_huggingface_t5.py [--output tests/golden]

Writes random models as `save_pretrained` writes them, each with a golden.npz
of padded encoder ids, decoder ids, their teacher-forced logits, and greedy
outputs:

- `tiny_t5_1_0`: ReLU, tied embeddings;
- `tiny_t5_1_1`: gated GELU, untied, stacks of different depth, few buckets;
- `tiny_flan_t5`: the same in bfloat16, in several files with an index;
- `tiny_mt5`: an mT5;
- `tiny_umt5`: a umT5, each of whose layers has its own relative positions;
- `tiny_madlad`: a T5 1.1 with MADLAD-400's ids: padding 1, end 2.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

SIZES = {
  'd_model': 24,
  'd_kv': 8,
  'd_ff': 40,
  'num_heads': 2,
  'num_layers': 2,
  'dropout_rate': 0.1,
  'pad_token_id': 0,
  'eos_token_id': 1,
  'decoder_start_token_id': 0,
}
VOCAB_SIZE = 96
NUM_NEW_TOKENS = 12


def untie(model) -> None:
  """Gives a model logits of their own, as T5 1.1, FLAN-T5 and mT5 have.

  transformers 5 ties every T5 that it makes itself, and unties one that it
  reads if the two differ.
  """
  model.config.tie_word_embeddings = False
  model.all_tied_weights_keys.pop('lm_head.weight')
  model.lm_head.weight = torch.nn.Parameter(
    torch.empty_like(model.lm_head.weight)
  )


def randomise(model, seed: int) -> None:
  """Weights under which texts vary, but attention is not so sharp that it
  magnifies rounding: T5 does not scale its scores."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if 'layer_norm' in name:
        parameter.uniform_(0.5, 1.5)
      elif 'relative' in name or 'lm_head' in name:
        parameter.normal_(std=1.0)
      elif '.q.' in name or '.k.' in name:
        parameter.normal_(std=0.08)
      else:
        parameter.normal_(std=0.3)


def encoder_batch() -> tuple[torch.Tensor, torch.Tensor]:
  """Ids `[4, 20]`, right-padded with 0, and the mask."""
  lengths = torch.tensor([20, 13, 7, 1])
  ids = torch.randint(2, VOCAB_SIZE, (4, 20))
  mask = torch.arange(20)[None] < lengths[:, None]
  return ids * mask, mask.long()


def make(folder: pathlib.Path, model, seed: int, **how) -> None:
  """Saves a random model, and what it computes when it is read again."""
  if model.config.feed_forward_proj != 'relu':
    untie(model)
  randomise(model, seed)
  model.to(how.get('dtype', torch.float32)).save_pretrained(
    folder, max_shard_size=how.get('max_shard_size', '1GB')
  )
  (folder / 'generation_config.json').unlink()
  model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
  if model.config.model_type == 'umt5':
    # transformers 5 reads it as true whatever the file says, and then scales
    # the logits, which earlier ones and T5X do not.
    model.config.tie_word_embeddings = False
  ids, mask = encoder_batch()
  decoder_ids = torch.randint(2, VOCAB_SIZE, (4, 18))
  decoder_ids[:, 0] = 0
  with torch.no_grad():
    logits = model(
      input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids
    ).logits
    greedy = model.generate(
      input_ids=ids,
      attention_mask=mask,
      do_sample=False,
      num_beams=1,
      max_new_tokens=NUM_NEW_TOKENS,
    )
  np.savez(
    folder / 'golden.npz',
    encoder_tokens=ids.numpy(),
    decoder_tokens=decoder_ids.numpy(),
    logits=logits.numpy(),
    greedy=greedy.numpy(),
  )
  top = logits.topk(2).values
  margin = (top[..., 0] - top[..., 1]).min().item()
  print(folder.name, f'{logits.abs().max():.2f}', margin, greedy.tolist())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  output = parser.parse_args().output
  torch.set_num_threads(1)
  t5, mt5 = (
    transformers.T5ForConditionalGeneration,
    transformers.MT5ForConditionalGeneration,
  )
  sizes = {**SIZES, 'vocab_size': VOCAB_SIZE}
  gated = {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}
  few = {
    'num_layers': 3,
    'num_decoder_layers': 2,
    'relative_attention_num_buckets': 8,
    'relative_attention_max_distance': 12,
  }
  make(
    output / 'tiny_t5_1_0',
    t5(transformers.T5Config(**sizes, feed_forward_proj='relu')),
    1,
  )
  make(
    output / 'tiny_t5_1_1',
    t5(transformers.T5Config(**{**sizes, **gated, **few})),
    2,
  )
  make(
    output / 'tiny_flan_t5',
    t5(transformers.T5Config(**sizes, **gated)),
    3,
    dtype=torch.bfloat16,
    max_shard_size='20KB',
  )
  make(
    output / 'tiny_mt5',
    mt5(transformers.MT5Config(**sizes, **gated)),
    4,
  )
  madlad = {'pad_token_id': 1, 'eos_token_id': 2}
  make(
    output / 'tiny_madlad',
    t5(transformers.T5Config(**{**sizes, **gated, **madlad})),
    5,
  )
  umt5 = {'scalable_attention': True}  # As google/umt5-small has it.
  make(
    output / 'tiny_umt5',
    transformers.UMT5ForConditionalGeneration(
      transformers.UMT5Config(**sizes, **gated, **umt5)
    ),
    6,
  )


if __name__ == '__main__':
  main()
