"""Prints what is installed on this machine, and tests that decoding works."""

import argparse
import functools
import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

import jax
import numpy as np

import specdec_jax
from specdec_jax import drafters
from specdec_jax.base import Drafter, Params
from specdec_jax.checkpoints import pretrained
from specdec_jax.cli import options
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.files.require import install
from specdec_jax.launch import compilation_cache, progress
from specdec_jax.models import families, llama
from specdec_jax.sampling import logits
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts

# Seconds before a notice that the self-test is still compiling.
_PATIENCE = 5.0
# Packages, by the extra that installs them; modules have the same names.
_PACKAGES = {
  'required': ('jax', 'jaxlib', 'flax', 'numpy'),
  'models': ('tokenizers', 'safetensors', 'gguf', 'jinja2', 'rich'),
}


def add_arguments(_: argparse.ArgumentParser) -> None: ...


def run(_: argparse.Namespace) -> int:
  print(f'specdec_jax {specdec_jax.__version__}')
  print(f'python      {platform.python_version()} ({sys.executable})')
  hints = _packages()
  mesh_lib.check_devices(1)
  for device in jax.devices():
    limit = (device.memory_stats() or {}).get('bytes_limit')
    memory = f', {limit / 1e9:.1f} GB' if limit else ''
    print(f'device      {device} ({device.device_kind}){memory}')
  print(f'cores       {os.cpu_count()}')
  folder = compilation_cache.enable()
  print(f'compiled    {folder or "not kept: no folder can be written"}')
  with progress.waiting('compiling a self-test', notice_after=_PATIENCE):
    is_sound = _self_test()
  verdict = 'equals' if is_sound else 'DIFFERS from'
  print(f'self-test   speculative greedy decoding {verdict} plain decoding')
  for hint in hints:
    print(f'hint        {hint}')
  return 0 if is_sound else 1


def _packages() -> list[str]:
  """Prints versions; returns how to install the packages that are missing."""
  hints = []
  for group, packages in _PACKAGES.items():
    versions = {name: _version(name) for name in packages}
    shown = [f'{k} {v or "(not installed)"}' for k, v in versions.items()]
    print(f'{group:<11} {", ".join(shown)}')
    if not all(versions.values()):
      # Required packages come with any extra.
      extra = 'models' if group == 'required' else group
      hints.append(f'for {group} packages: {install(extra)}')
  try:
    path = pretrained.packaged_file(options.DEFAULT_MODEL)
    print(f'weights     {path}')
  except ValueError as error:
    print(f'weights     {options.DEFAULT_MODEL} (not installed)')
    hints.append(str(error))
  return hints


def _version(package: str) -> str | None:
  try:
    importlib.import_module(package)
    return importlib.metadata.version(package)
  except ImportError:  # PackageNotFoundError is one.
    return None


def _self_test() -> bool:
  """Decodes with a small random model, plainly and with three drafters."""
  config = llama.LlamaConfig(
    vocab_size=32,
    embed_dim=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
  )
  key, target = jax.random.key(0), families.language_model(config)
  params = jax.jit(families.init_params, static_argnums=0)(config, key)
  rows = [[3, 1, 4, 1], [5, 9]]
  prompt = prompts.pack(rows, config=config, max_new_tokens=44)
  greedy = logits.standardize(temperature=0.0)

  def decode(
    loop: Any, drafter: Drafter = drafters.none(), weights: Any = ()
  ) -> jax.Array:
    method = Method(
      target=target, drafter=drafter, logits_to_probs=greedy, eos_id=-1
    )
    generate = functools.partial(loop.generate, method=method, max_len=48)
    return jax.jit(generate)(Params(params, weights), key, prompt).tokens

  expected = decode(autoregressive)
  itself = drafters.autoregressive(target, gamma=3, logits_to_probs=greedy)
  # Drafters that copy from the text, are mostly wrong, are always right.
  outputs = [
    decode(speculative, drafters.prompt_lookup(gamma=4)),
    decode(speculative, drafters.uniform(gamma=3, vocab_size=32)),
    decode(speculative, itself, params),
  ]
  return all(np.array_equal(expected, tokens) for tokens in outputs)
