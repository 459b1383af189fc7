"""Makes tiny Gemmas of Hugging Face transformers; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.23.0 safetensors
  python tests/golden/make_huggingface_gemma.py [--output tests/golden]

Writes random models as `save_pretrained` writes them, each with a golden.npz:
token ids and their logits, `ids` and `logits`, or for the encoder-decoder its
padded ids, decoder ids, their logits and greedy outputs. Texts are longer than
the windows.

- `tiny_gemma2`: an odd scale of scores, grouped heads, two layers;
- `tiny_gemma3`: norms of queries and keys, stretched positions, two bases, a
  window of 5, six layers;
- `tiny_t5gemma`: stacks of different width and depth.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

VOCAB_SIZE = 96
NUM_NEW_TOKENS = 12
WINDOW = 5
SIZES = {
  'vocab_size': VOCAB_SIZE,
  'hidden_size': 24,
  'intermediate_size': 40,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'max_position_embeddings': 128,
  'sliding_window': WINDOW,
  'attn_implementation': 'eager',
}


def randomise(model, seed: int) -> None:
  """Weights under which texts vary, and bounds of scores and logits are felt:
  embeddings are multiplied by the root of their width."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if 'norm' in name:
        # What a layer adds outweighs the last token, which the logits reuse.
        parameter.normal_(std=0.3).add_(3 * ('post' in name))
      elif 'embed_tokens' in name:
        parameter.normal_(std=0.3)
      else:
        parameter.normal_(std=0.5)


def make_decoder(folder: pathlib.Path, model, seed: int) -> None:
  """Saves a random decoder, some token ids and its logits for them."""
  randomise(model, seed)
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  ids = torch.randint(2, VOCAB_SIZE, (3, 24))
  with torch.no_grad():
    logits = model.eval()(ids).logits
  np.savez(folder / 'golden.npz', ids=ids.numpy(), logits=logits.numpy())
  print(folder.name, f'{logits.abs().max():.2f}')


def make_encoder_decoder(folder: pathlib.Path, model, seed: int) -> None:
  """Saves a random T5Gemma, and what it computes when it is read again."""
  randomise(model, seed)
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  model = (
    type(model)
    .from_pretrained(folder, dtype=torch.float32, attn_implementation='eager')
    .eval()
  )
  lengths = torch.tensor([20, 13, 7, 1])
  mask = torch.arange(20)[None] < lengths[:, None]
  ids = torch.randint(3, VOCAB_SIZE, (4, 20)) * mask
  decoder_ids = torch.randint(3, VOCAB_SIZE, (4, 18))
  decoder_ids[:, 0] = 2
  encoded = {'input_ids': ids, 'attention_mask': mask.long()}
  with torch.no_grad():
    logits = model(**encoded, decoder_input_ids=decoder_ids).logits
    greedy = model.generate(
      **encoded,
      decoder_start_token_id=2,
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
  print(folder.name, f'{logits.abs().max():.2f}', greedy.tolist())


def gemma_3(**sizes) -> dict:
  return {
    **SIZES,
    'num_hidden_layers': 6,
    'query_pre_attn_scalar': 8,
    'rope_parameters': {
      'full_attention': {
        'rope_type': 'linear',
        'factor': 8.0,
        'rope_theta': 1e6,
      },
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
    },
    **sizes,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  output = parser.parse_args().output
  torch.set_num_threads(1)
  of_gemma_2 = {
    'num_hidden_layers': 2,
    'query_pre_attn_scalar': 12,
    'attn_logit_softcapping': 5.0,
    'final_logit_softcapping': 12.0,
  }
  make_decoder(
    output / 'tiny_gemma2',
    transformers.Gemma2ForCausalLM(
      transformers.Gemma2Config(**SIZES | of_gemma_2)
    ),
    1,
  )
  make_decoder(
    output / 'tiny_gemma3',
    transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**gemma_3())),
    2,
  )
  encoder = {
    'hidden_size': 16,
    'intermediate_size': 32,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'num_hidden_layers': 3,
  }
  make_encoder_decoder(
    output / 'tiny_t5gemma',
    transformers.T5GemmaForConditionalGeneration(
      transformers.T5GemmaConfig(
        encoder={**SIZES, **of_gemma_2, **encoder},
        decoder={**SIZES, **of_gemma_2},
        vocab_size=VOCAB_SIZE,
        attn_implementation='eager',
      )
    ),
    3,
  )


if __name__ == '__main__':
  main()
