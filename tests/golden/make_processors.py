"""Makes golden logits of transformers' processors; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.24.0
  python tests/golden/make_processors.py [--output tests/golden]

Writes processors.json: texts, logits of what follows them, settings by the
names of `generation_config.json`, and the logits that the list of processors,
which transformers makes of the settings, leaves.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

VOCAB_SIZE, EOS, NUM_TEXTS = 12, 2, 6
# New tokens at most, which says where an end is forced.
MOST_NEW = 3
SETTINGS = [
  {'repetition_penalty': 1.3},
  {'repetition_penalty': 0.7},
  {'no_repeat_ngram_size': 1},
  {'no_repeat_ngram_size': 2},
  {'no_repeat_ngram_size': 3},
  {'bad_words_ids': [[5], [3, 4], [1, 0, 7], [2], [6, 2]]},
  {'min_new_tokens': 3},
  {'min_length': 9},
  {'min_length': 12, 'min_new_tokens': 2},
  {'suppress_tokens': [0, 5]},
  {'begin_suppress_tokens': [1, 7, 8]},
  {'encoder_repetition_penalty': 1.4},
  {'encoder_no_repeat_ngram_size': 1},
  {'encoder_no_repeat_ngram_size': 2},
  {'encoder_no_repeat_ngram_size': 3},
  {
    'sequence_bias': [[[5], 1.5], [[3, 4], -2.0], [[1, 0, 7], 4.0], [[0], -3.0]]
  },
  {'sequence_bias': [[[1, 0], 2.5], [[0, 0], -1.5], [[0, 1, 0], 4.0]]},
]
SETTINGS.append({k: v for each in SETTINGS for k, v in each.items()})
# These leave one id.
SETTINGS += [
  {'forced_bos_token_id': 4},
  {'forced_eos_token_id': 2, 'repetition_penalty': 1.3},
  {'forced_eos_token_id': [2, 6]},
]


def model() -> transformers.LlamaForCausalLM:
  """The least that makes lists of processors; it is never run."""
  config = transformers.LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    eos_token_id=EOS,
  )
  return transformers.LlamaForCausalLM(config)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--output', type=pathlib.Path, default='tests/golden')
  output = parser.parse_args().output
  rng, made, cases = np.random.default_rng(0), model(), []
  for settings in SETTINGS:
    for _ in range(NUM_TEXTS):
      length = int(rng.integers(6, 13))
      if 'forced_bos_token_id' in settings:
        length = int(rng.integers(1, 4))
      start = max(1, int(rng.integers(length - 4, length + 1)))
      # Few ids, so that n-grams repeat.
      text = rng.integers(0, int(rng.integers(3, VOCAB_SIZE)), length)
      logits = rng.normal(size=VOCAB_SIZE).astype(np.float32).round(4)
      config = transformers.GenerationConfig(
        eos_token_id=EOS, max_length=start + MOST_NEW, **settings
      )
      made._prepare_special_tokens(config)
      # As `generate` does where both are given.
      if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + start
      processors = made._get_logits_processor(
        config,
        input_ids_seq_length=start,
        encoder_input_ids=torch.tensor(text[:start])[None],
      )
      found = processors(
        torch.tensor(text)[None], torch.tensor(logits)[None].clone()
      )[0]
      cases.append(
        {
          'settings': settings,
          'text': text.tolist(),
          'start': start,
          'logits': [float(f'{x:.4f}') for x in logits],
          # None is what is ruled out.
          'processed': [
            float(f'{x:.7g}') if np.isfinite(x) else None
            for x in found.double().tolist()
          ],
        }
      )
  lines = ',\n'.join(json.dumps(case) for case in cases)
  (output / 'processors.json').write_text(f'[\n{lines}\n]\n')


if __name__ == '__main__':
  main()
