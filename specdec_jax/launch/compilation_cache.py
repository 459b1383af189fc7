"""The persistent cache of compiled programs."""

import os
from pathlib import Path

import jax


def enable() -> str | None:
  """Enables the persistent cache, in `JAX_COMPILATION_CACHE_DIR` if that is
  set, else in `~/.cache/specdec_jax/compiled`; returns the folder, or None if
  it cannot be written. `JAX_ENABLE_COMPILATION_CACHE=0` disables it."""
  # By default jax caches programs that took a second to compile; most programs
  # of a small model take less, and add up before the first text.
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.02)
  if chosen := getattr(jax.config, 'jax_compilation_cache_dir', None):
    return chosen
  if (above := writable_folder()) is None:
    return None
  folder = str(above / 'compiled')
  jax.config.update('jax_compilation_cache_dir', folder)
  return folder


def writable_folder() -> Path | None:
  """Makes `~/.cache/specdec_jax`; None where nothing can be written."""
  try:
    cache_home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    folder = Path(cache_home) / 'specdec_jax'
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # RuntimeError: no home folder is known.
    return None
  return folder if os.access(folder, os.W_OK) else None
