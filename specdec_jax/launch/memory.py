"""Errors that mean that memory has run out."""


def has_run_out(error: BaseException) -> bool:
  """Whether an error of Python or of XLA says so; XLA's for a CPU has no status
  of its own for it."""
  text = str(error)
  return (
    isinstance(error, MemoryError)
    or 'RESOURCE_EXHAUSTED' in text
    or 'Out of memory' in text
  )
