"""Quality of packed weights: perplexity and BLEU."""

import functools
import gettext
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from experiments import common
from experiments.report import Cells, Table
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import models
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.base import Array, Prompt
from specdec_jax.infer import quality
from specdec_jax.models import families
from specdec_jax.sharding import mesh as mesh_lib

_PROMPTS = Path('experiments/suite/prompts')
_CATALOGUES = Path('/usr/share/locale/de/LC_MESSAGES')
# What is compared; None is without packing.
WEIGHTS = (
  *(None, 'int8', 'int8:32'),
  *('int4', 'int4:64', 'int4:32', 'int3:32'),
)
_WINDOW = 256


def perplexities(num_windows: int) -> Table:
  """Of SmolLM2 on the suite's texts, and its guesses beside float32's."""
  rows, best = [], None
  texts = [
    json.loads(line)['text']
    for name in ('long_input', 'summarisation', 'retrieval')
    for line in (_PROMPTS / f'{name}.jsonl').read_text().splitlines()
  ]
  for dtype, weights, caches in (
    ('float32', None, None),
    *(('bfloat16', w, None) for w in WEIGHTS),
    *(('bfloat16', w, 'int8') for w in (None, 'int8')),
  ):
    decoder = plain_decoder('smollm2-135m', dtype, weights, caches)
    ids = decoder.vocabulary.encode('\n\n'.join(texts))
    count = min(num_windows, len(ids) // _WINDOW)
    tokens = np.asarray(ids[: count * _WINDOW]).reshape(count, _WINDOW)
    run = jax.jit(functools.partial(_scored, config=decoder.config))
    found = [run(decoder.params.target, row[None]) for row in tokens]
    losses = np.concatenate([np.asarray(loss[0]) for loss, _ in found])
    guesses = np.concatenate([np.asarray(guess[0]) for _, guess in found])
    best = guesses if best is None else best
    rows.append(
      names_of(decoder)
      | {
        'perplexity': f'{np.exp(losses.mean()):.3f}',
        'likeliest token is that of float32': f'{np.mean(guesses == best):.1%}',
      }
    )
  return Table(
    rows=rows,
    notes=[
      f'{losses.size} tokens of the texts of experiments/suite/prompts, '
      f'{_WINDOW} at a time, each window by itself. MB are those of the '
      'matrices and scales, of norms and of tables of positions.'
    ],
  )


def _scored(params: Any, tokens: Array, *, config: Any) -> tuple[Array, Array]:
  """Losses of all tokens but the first, and what is likeliest in their place:
  `[B, T - 1]` each."""
  model = families.language_model(config)
  ones = jnp.ones(len(tokens), jnp.int32)
  prompt = Prompt(
    encoder_tokens=None,
    decoder_tokens=tokens[:, :1],
    decoder_lengths=ones,
    row_ids=ones,
  )
  cache = model.init(params, prompt, tokens.shape[1])
  logits, _ = model.extend(params, tokens[:, :-1], cache)
  log_probs = jax.nn.log_softmax(logits)
  losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
  return losses, jnp.argmax(logits, -1)


def bleus(num_texts: int) -> Table:
  """Of `ende-mini`, against the catalogues and against its own in float32."""
  pairs = common.spread([*_catalogue_pairs()], num_texts)
  sources, references = zip(*pairs, strict=True)
  rows: list[Cells] = []
  best: list[str] = []
  for dtype, weights in (
    ('float32', None),
    *(('bfloat16', w) for w in WEIGHTS),
  ):
    decoder = plain_decoder('ende-mini', dtype, weights)
    texts = specdec_jax.generate(
      decoder, sources, max_new_tokens=64, batch_size=16
    )
    found = [each.text for each in texts]
    best = best or found
    rows.append(
      names_of(decoder)
      | {
        'BLEU': f'{quality.bleu(references, found)["bleu"]:.2f}',
        "BLEU against float32's": f'{quality.bleu(best, found)["bleu"]:.1f}',
        "texts that are float32's": f'{np.mean(np.equal(best, found)):.1%}',
      }
    )
  return Table(
    rows=rows,
    notes=[
      f'Greedy, {len(pairs)} messages of 4 to 30 words from the German '
      'catalogues of the programs on this machine '
      f'({_CATALOGUES}/*.mo), on which nothing was trained: `ende-mini` knows '
      'package descriptions and LibreOffice.'
    ],
  )


def _catalogue_pairs() -> Iterator[tuple[str, str]]:
  """English messages without places to fill in, and their translations."""
  seen = set()
  for path in sorted(_CATALOGUES.glob('*.mo')):
    try:
      with path.open('rb') as file:
        messages = gettext.GNUTranslations(file)._catalog  # type: ignore
    except UnicodeDecodeError:  # Of another encoding than it says.
      continue
    for source, target in messages.items():
      if not isinstance(source, str) or source in seen:
        continue
      is_plain = not any(x in source + target for x in '%\n{}<>|&_')
      if is_plain and 4 <= len(source.split()) <= 30 and source != target:
        seen.add(source)
        yield source, target


def plain_decoder(
  name: str, dtype: str, weights: str | None, cache_dtype: str | None = None
) -> Decoder:
  """Loads a model without a drafter."""
  own = {'weights': weights, 'cache_dtype': cache_dtype}
  model = Model(checkpoint=name, dtype=dtype, **own)
  return decoder_lib.build(model, drafter=NoDrafter())


def names_of(decoder: Decoder) -> Cells:
  """The cells that say what was measured, and how large it is."""
  model = decoder.model
  shapes = models.param_shapes(model, decoder.config)
  return {
    'weights': model.weights or model.dtype,
    'caches': model.cache_dtype or model.dtype,
    'activations': model.dtype,
    'MB': f'{mesh_lib.tree_bytes(shapes) / 1e6:.1f}',
  }
