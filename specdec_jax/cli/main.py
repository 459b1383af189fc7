"""`specdec`: generate, bench, trace, doctor."""

import argparse
import os
import sys
from collections.abc import Sequence

from specdec_jax.cli import bench, doctor, generate, options, trace

_COMMANDS = {
  'generate': generate,
  'bench': bench,
  'trace': trace,
  'doctor': doctor,
}

EXIT_OK, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one subcommand; the exit status.

  0 is success, 2 bad input, with one sentence on standard error, and 130 an
  interrupt, after which everything written so far is in place.
  """
  parser = argparse.ArgumentParser(
    prog='specdec',
    description='Draft-then-verify decoding, compiled as one program.',
  )
  subparsers = parser.add_subparsers(dest='command', required=True)
  for name, module in _COMMANDS.items():
    subparser = subparsers.add_parser(
      name,
      help=module.HELP,
      description=module.__doc__,
      formatter_class=options.HelpFormatter,
    )
    module.add_arguments(subparser)
  args = parser.parse_args(argv)
  try:
    return _COMMANDS[args.command].run(args) or EXIT_OK
  except KeyboardInterrupt:
    print('specdec: interrupted', file=sys.stderr)
    return EXIT_INTERRUPTED
  except BrokenPipeError:
    # The reader of our output left, as `head` does.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
  except (ValueError, ImportError, OSError) as error:
    if os.environ.get('SPECDEC_TRACEBACK'):
      raise
    print(f'specdec: error: {error}', file=sys.stderr)
    return EXIT_BAD_INPUT
