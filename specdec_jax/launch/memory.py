"""Errors that mean that memory has run out."""


def has_run_out(error: BaseException) -> bool:
  """Whether an error of Python or of XLA says so."""
  # XLA's for a CPU has no status of its own for it.
  says_so = any(
    x in str(error) for x in ('RESOURCE_EXHAUSTED', 'Out of memory')
  )
  return says_so or isinstance(error, MemoryError)
