"""Computes logits of odd Gemma 4s with Hugging Face transformers.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.24.0
  python -m tests.golden.make_gemma4_variants [--output tests/golden]

Writes gemma4_variants.npz: token ids `ids` and, for each of
`gemma4_variants.VARIANTS`, their logits under its name, computed in float64, of
which transformers' own float32 is up to 1.6e-4 off; `files` is a JSON
object, by the same names, of the config.json and the shapes of the tensors that
transformers writes.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

from tests.golden.gemma4_variants import VARIANTS, VOCAB_SIZE, drawn


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  output = parser.parse_args().output
  torch.set_num_threads(1)
  rng = np.random.default_rng(0)
  ids = rng.integers(2, VOCAB_SIZE, (2, 16)).astype(np.int32)
  files, logits = {}, {}
  for name, sizes in VARIANTS.items():
    config = transformers.Gemma4TextConfig(
      **sizes, attn_implementation='eager', experts_implementation='eager'
    )
    model = transformers.Gemma4ForCausalLM(config).double().eval()
    # Tied logits are a copy in this dict, and in no file.
    tensors = model.state_dict()
    tensors.pop('lm_head.weight')
    model.load_state_dict(
      {
        key: torch.tensor(drawn(key, tuple(tensor.shape)))
        for key, tensor in tensors.items()
      },
      strict=False,
    )
    files[name] = {
      'config': json.loads(model.config.to_json_string()),
      'tensors': {key: list(x.shape) for key, x in tensors.items()},
    }
    # Without hidden states, 5.24 fails on layers that share keys and get no
    # embeddings of their own.
    with torch.no_grad():
      outputs = model(torch.tensor(ids).long(), output_hidden_states=True)
    logits[name] = outputs.logits.float().numpy()
    print(f'{name}: {np.abs(logits[name]).max():.2f}')
  np.savez_compressed(
    output / 'gemma4_variants.npz', ids=ids, files=json.dumps(files), **logits
  )


if __name__ == '__main__':
  main()
