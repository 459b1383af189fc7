"""Explains errors to users: a sentence, and an exit status."""

import errno
import os
import traceback

from specdec_jax.launch import platforms

EXIT_BUG, EXIT_BAD_INPUT = 1, 2
# EX_TEMPFAIL of sysexits.h.
EXIT_TRY_AGAIN = 75
# As shells report SIGINT.
EXIT_INTERRUPTED = 130
# The errno that `files.buckets` gives a server that does not answer.
AWAY = errno.EHOSTUNREACH


def explain(error: BaseException) -> tuple[str, int]:
  """Returns an error in one line, and its exit status. For an error that this
  package did not raise on purpose, the line says how to get a traceback."""
  if isinstance(error, KeyboardInterrupt):
    return 'interrupted', EXIT_INTERRUPTED
  status = EXIT_TRY_AGAIN if is_away(error) else EXIT_BAD_INPUT
  text = ' '.join(str(error).split())
  if isinstance(error, OSError):
    reason = error.strerror or text or type(error).__name__
    place = f'{error.filename}: ' if error.filename else ''
    return place + reason, status
  if is_out_of_memory(error):
    return (
      'out of memory; shorten the longest prompt, lower --batch_size, '
      '--max_new_tokens or --gamma, or take --dtype bfloat16; for infer, lower '
      'Decoding.batch_size or TASK_FEATURE_LENGTHS, or raise '
      'device_mesh.num_partitions: --dry_run shows what takes how much',
      EXIT_BAD_INPUT,
    )
  # In most commands the first computation fails if jax has no device.
  is_silent = isinstance(error, AssertionError) and not text
  is_of_jax = is_silent or text.startswith('Unable to initialize backend')
  if is_of_jax and (lacking := platforms.missing()):
    return lacking, EXIT_BAD_INPUT
  # An error that a line of this package raises is raised on purpose.
  is_expected = isinstance(error, (ValueError, ImportError))
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  package = os.path.dirname(os.path.dirname(__file__)) + os.sep
  if is_expected and frame.f_code.co_filename.startswith(package):
    return text, status
  return (
    f'unexpected {type(error).__name__}: {text} (SPECDEC_TRACEBACK=1 in the '
    'environment shows where)',
    status if is_expected or is_away(error) else EXIT_BUG,
  )


def is_out_of_memory(error: BaseException) -> bool:
  """Returns whether an error of Python or XLA is a lack of memory."""
  # XLA has no status of its own for a CPU out of memory.
  signs = ('RESOURCE_EXHAUSTED', 'Out of memory')
  return isinstance(error, MemoryError) or any(x in str(error) for x in signs)


def is_away(error: BaseException | None) -> bool:
  """Returns whether the server of a bucket did not answer."""
  # ConnectionError alone may come from elsewhere, such as the hub's client.
  while error is not None and getattr(error, 'errno', None) != AWAY:
    error = error.__cause__
  return error is not None
