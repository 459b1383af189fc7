"""llama.cpp through llama-cpp-python: plain, and with its prompt lookup, on a
Llama with random weights; one row at a time."""

import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.audit import ways
from experiments.audit.ways import Tokens, Way

_EMBED, _HEADS, _MLP, _LAYERS = 32, 2, 64, 1


def engine() -> Iterator[Way]:
  """Its ways."""
  llama = ways.package('llama_cpp')
  lookup = ways.package('llama_cpp.llama_speculative')
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'tiny.gguf'
    write(path)
    load = functools.partial(
      llama.Llama,
      model_path=str(path),
      n_ctx=64,
      n_threads=1,
      logits_all=True,
      verbose=False,
    )
    drafters = {
      'plain': None,
      'prompt lookup': lookup.LlamaPromptLookupDecoding(
        num_pred_tokens=ways.GAMMA
      ),
    }
    for (name, drafter), (setting, top_k) in itertools.product(
      drafters.items(), ways.SETTINGS.items()
    ):
      model = load(draft_model=drafter)
      # 0 keeps all.
      sampled = {'temp': 1.0, 'top_k': top_k or 0}
      yield Way(
        f'{name}, {setting}, batch 1',
        functools.partial(_sample, model, sampled),
        functools.partial(_next_probs, functools.cache(_logits(load())), top_k),
        ways.ONE,
        20_000 if drafter is None else 8000,
        functools.partial(_continue, model, {'temp': 0.0}),
      )


def _continue(model: Any, sampled: dict, prompt: Tokens) -> list[int]:
  # By default its sampling has more than temperature and top-k.
  apart = {'top_p': 1.0, 'min_p': 0.0, 'repeat_penalty': 1.0}
  tokens = model.generate(list(prompt), **sampled, **apart)
  return list(itertools.islice(tokens, ways.NUM_TOKENS))


def _sample(
  model: Any, sampled: dict, prompt: Tokens, num: int, seed: int
) -> list[list[int]]:
  found = []
  for own in np.random.default_rng(seed).integers(2**32 - 1, size=num):
    model.set_seed(int(own))
    found.append(_continue(model, sampled, prompt))
  return found


def _logits(model: Any) -> Any:
  def logits(prefix: Tokens) -> np.ndarray:
    model.reset()
    model.eval(list(prefix))
    return np.array(model.scores[len(prefix) - 1], np.float64)

  return logits


def _next_probs(logits: Any, top_k: int | None, prefix: Tokens) -> np.ndarray:
  return ways.probs_of(logits(prefix), top_k)


def write(path: Path) -> None:
  """Writes a Llama with random weights and without a vocabulary."""
  gguf = ways.package('gguf')
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_context_length(64)
  writer.add_embedding_length(_EMBED)
  writer.add_block_count(_LAYERS)
  writer.add_feed_forward_length(_MLP)
  writer.add_head_count(_HEADS)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_vocab_size(ways.VOCAB_SIZE)
  writer.add_tokenizer_model('none')
  rng = np.random.default_rng(1)
  shapes = {
    'token_embd': (ways.VOCAB_SIZE, _EMBED),
    'output': (ways.VOCAB_SIZE, _EMBED),
    'blk.0.attn_q': (_EMBED, _EMBED),
    'blk.0.attn_k': (_EMBED, _EMBED),
    'blk.0.attn_v': (_EMBED, _EMBED),
    'blk.0.attn_output': (_EMBED, _EMBED),
    'blk.0.ffn_gate': (_MLP, _EMBED),
    'blk.0.ffn_up': (_MLP, _EMBED),
    'blk.0.ffn_down': (_EMBED, _MLP),
  }
  for name, shape in shapes.items():
    values = 1.2 * rng.normal(size=shape) / np.sqrt(shape[1])
    writer.add_tensor(f'{name}.weight', values.astype(np.float32))
  for name in ('blk.0.attn_norm', 'blk.0.ffn_norm', 'output_norm'):
    writer.add_tensor(f'{name}.weight', np.ones(_EMBED, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
