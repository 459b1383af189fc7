"""Tiny models in Hugging Face folders, and the command in this process."""

import contextlib
import json
import re
import resource
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import traverse_util

from specdec_jax.checkpoints import huggingface, stored_arrays
from specdec_jax.cli.main import main
from specdec_jax.models import families
from specdec_jax.models.llama import LlamaConfig

SPECIALS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
MERGES = (('Ġ', 't'), ('h', 'e'), ('Ġt', 'he'), ('i', 'n'), ('a', 'b'))
# Of the weights: with it, greedy texts repeat themselves, but not at once.
SCALE = 0.5
# Weights are drawn in this order, layer by layer.
DRAWN = (
  *('token_embedder', 'decoder_norm', 'logits_dense'),
  *('pre_self_attention_layer_norm', 'pre_mlp_layer_norm'),
  *('query', 'key', 'value', 'out', 'wi_0', 'wi_1', 'wo'),
)
TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
  "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokens() -> list[str]:
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  return [*SPECIALS, *alphabet, *map(''.join, MERGES)]


def make_tokenizer(tokens=None) -> tokenizers.Tokenizer:
  tokens = make_tokens() if tokens is None else tokens
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={token: i for i, token in enumerate(tokens)}, merges=[*MERGES]
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens([*SPECIALS])
  return tokenizer


def make_config(**changes) -> LlamaConfig:
  sizes = {
    'vocab_size': len(make_tokens()),
    'embed_dim': 16,
    'num_layers': 1,
    'num_heads': 2,
    'num_kv_heads': 1,
    'head_dim': 8,
    'mlp_dim': 16,
    'max_positions': 128,
    'is_tied': False,
  }
  return LlamaConfig(**sizes | changes)


def _when_drawn(path: str) -> tuple[bool, int, int]:
  """The order in which weights are drawn, which decides what texts come."""
  branch = path.rsplit('/', 1)[0]
  number = re.match(r'layers_(\d+)/', branch)
  place = next(i for i, part in enumerate(DRAWN) if branch.endswith(part))
  return bool(number), int(number[1]) if number else 0, place


def write_model(
  folder,
  *,
  change=None,
  tokenizer=None,
  eos_token='<|im_end|>',
  chat_template=TEMPLATE,
  seed=0,
  **sizes,
) -> str:
  """Writes a random model, which soon repeats itself; its path.

  Args:
    folder: to be made.
    change: called with the dict of float32 tensors by path, to edit it.
    tokenizer: instead of the usual one.
    eos_token: the token that ends a text.
    chat_template: or None.
    seed: of the weights.
    **sizes: of the config.
  """
  config = make_config(**sizes)
  rng = np.random.default_rng(seed)
  shapes = stored_arrays.flatten(families.param_shapes(config))
  tensors = {
    path: SCALE * rng.standard_normal(shapes[path].shape).astype(np.float32)
    for path in sorted(shapes, key=_when_drawn)
  }
  # Only tokens that show on a terminal are ever the likeliest.
  is_shown = [t.isascii() and t not in SPECIALS for t in make_tokens()]
  kernel = tensors['logits_dense/kernel']
  kernel[:, : len(is_shown)] *= np.array(is_shown)
  if change:
    change(tensors)
  arrays = {k: jnp.asarray(v) for k, v in tensors.items()}
  params = traverse_util.unflatten_dict(arrays, sep='/')
  huggingface.save(folder, config, params)
  (tokenizer or make_tokenizer()).save(str(Path(folder) / 'tokenizer.json'))
  settings = {'eos_token': eos_token, 'chat_template': chat_template}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return str(folder)


def burst(tensors) -> None:
  """The norm before the logits overflows, though every weight is finite."""
  tensors['decoder_norm/scale'] = np.full(16, 3e38, np.float32)


def weaker(tensors) -> None:
  """A model that often agrees with the one that it was, and not always."""
  kernel = tensors['logits_dense/kernel']
  noise = np.random.default_rng(3).normal(size=kernel.shape)
  tensors['logits_dense/kernel'] = kernel + np.float32(0.1) * noise.astype(
    np.float32
  )


class Result(NamedTuple):
  status: int
  out: str
  err: str

  def records(self) -> list[dict]:
    return [json.loads(line) for line in self.out.splitlines()]


def run(capfd, *argv: str) -> Result:
  """Runs the command in this process."""
  capfd.readouterr()
  status = main([str(each) for each in argv])
  return Result(status, *capfd.readouterr())


def run_well(capfd, *argv: str) -> str:
  """Runs the command, which should end well; what it printed."""
  result = run(capfd, *argv)
  assert result.status == 0, result.err
  return result.out


def assert_refused(result: Result, *parts: str) -> None:
  """Exit status 2, one line on standard error with `parts`, and no more."""
  assert result.status == 2, result
  assert result.out == ''
  assert 'Traceback' not in result.err
  assert re.fullmatch(r'specdec( \w+)*: error: [^\n]+\n', result.err), result
  assert 'unexpected' not in result.err
  for part in parts:
    assert part in result.err, result.err


def but_for_rounding(record: dict) -> dict:
  """A record without what rounding can change."""
  return record | {'log_probs': pytest.approx(record['log_probs'], abs=1e-4)}


def begun(path: Path) -> Path:
  """What an interrupted run wrote of a file that then is not there."""
  assert not path.exists()
  (found,) = path.parent.glob(f'{path.name}.partial-*')
  return found


def without_styles(text: str) -> str:
  """Text without a terminal's control sequences."""
  return re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', text)


@contextlib.contextmanager
def files_of_at_most(num_bytes):
  """A limit of this process, which stands for a disk that is full."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
