"""Makes golden logits of transformers' processors; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.24.0
  python tests/golden/make_processors.py [--output tests/golden]

Writes processors.json: texts, logits of what follows them, settings by the
names of `generation_config.json`, and the logits that the list of processors,
which transformers makes of the settings, leaves.
"""

import argparse
import itertools
import json
import pathlib
from typing import Any

import numpy as np
import torch
import transformers

VOCAB_SIZE, EOS, NUM_TEXTS = 12, 2, 6
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


# One of each processor, whose ids are also those of others: all pairs of them
# say in which order processors come.
SINGLE = [
  {'repetition_penalty': 1.3},
  {'no_repeat_ngram_size': 2},
  {'encoder_repetition_penalty': 1.4},
  {'encoder_no_repeat_ngram_size': 2},
  {'sequence_bias': [[[5], 1.5], [[0, 4], 3.0], [[0], -3.0], [[5], -0.5]]},
  {'bad_words_ids': [[4], [0, 5], [EOS], [0, 0, 1]]},
  {'min_new_tokens': 2},
  {'min_new_tokens': 0},
  {'min_length': 4},
  {'suppress_tokens': [EOS, 5]},
  {'begin_suppress_tokens': [EOS, 4, 5]},
  {'forced_bos_token_id': 4},
  {'forced_eos_token_id': [EOS, 6]},
]
# The texts of each pair: the prompt's length, the text's, and the most new
# tokens. They begin as a decoder with its start token alone, with a limit that
# is also the first place, or have a prompt.
PAIR_TEXTS = [(1, 1, 1), (1, 1, 3), (1, 2, 3), (1, 3, 3), (3, 3, 1), (4, 6, 4)]


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


def processed(
  made: transformers.LlamaForCausalLM,
  settings: dict[str, Any],
  text: np.ndarray,
  logits: np.ndarray,
  *,
  start: int,
  most_new: int,
) -> dict[str, Any]:
  """Returns a case: what the list of processors makes of the logits."""
  config = transformers.GenerationConfig(
    eos_token_id=EOS, max_new_tokens=most_new, **settings
  )
  made._prepare_special_tokens(config)
  # As `generate` does, where one of two settings may replace the other.
  config = made._prepare_generated_length(
    config,
    has_default_max_length=True,
    has_default_min_length=config.min_length is None,
    model_input_name='input_ids',
    input_ids_length=start,
    inputs_tensor=torch.tensor(text[:start])[None],
  )
  processors = made._get_logits_processor(
    config,
    input_ids_seq_length=start,
    encoder_input_ids=torch.tensor(text[:start])[None],
  )
  after = processors(
    torch.tensor(text)[None], torch.tensor(logits)[None].clone()
  )[0]
  return {
    'settings': settings,
    'text': text.tolist(),
    'start': start,
    'most_new': most_new,
    'logits': [float(f'{x:.4f}') for x in logits],
    # None is what is ruled out.
    'processed': [
      float(f'{x:.7g}') if np.isfinite(x) else None
      for x in after.double().tolist()
    ],
  }


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('--output', type=pathlib.Path, default='tests/golden')
  output = parser.parse_args().output
  rng, made, cases = np.random.default_rng(0), model(), []

  def draw_logits() -> np.ndarray:
    return rng.normal(size=VOCAB_SIZE).astype(np.float32).round(4)

  for settings in SETTINGS:
    for _ in range(NUM_TEXTS):
      length = int(rng.integers(6, 13))
      if 'forced_bos_token_id' in settings:
        length = int(rng.integers(1, 4))
      start = max(1, int(rng.integers(length - 4, length + 1)))
      # Few ids, so that n-grams repeat.
      text = rng.integers(0, int(rng.integers(3, VOCAB_SIZE)), length)
      cases.append(
        processed(made, settings, text, draw_logits(), start=start, most_new=3)
      )
  for one, other in itertools.combinations(SINGLE, 2):
    if one.keys() == other.keys():
      continue
    for start, length, most_new in PAIR_TEXTS:
      # Ids 0 and 4 or 5, which sequences begin with.
      text = np.where(rng.random(length) < 0.6, 0, rng.integers(4, 6, length))
      cases.append(
        processed(
          made,
          one | other,
          text,
          draw_logits(),
          start=start,
          most_new=most_new,
        )
      )
  lines = ',\n'.join(json.dumps(case) for case in cases)
  (output / 'processors.json').write_text(f'[\n{lines}\n]\n')


if __name__ == '__main__':
  main()
