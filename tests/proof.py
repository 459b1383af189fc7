"""The statistical proof that decoding is lossless: `python -m tests.proof`.

Runs the tests marked `proof` or `campaign` and prints what they measured. The
exit status is non-zero if a figure is not what it should be.
"""

import importlib.util
import pathlib
import sys

import pytest


def main() -> int:
  """Runs the proof, on two processes where pytest-xdist is installed."""
  folder = pathlib.Path(__file__).parent
  arguments = ['-m', 'proof or campaign', '-q', str(folder)]
  if importlib.util.find_spec('xdist'):
    arguments = ['-n', '2', *arguments]
  return int(pytest.main(arguments + sys.argv[1:]))


if __name__ == '__main__':
  sys.exit(main())
