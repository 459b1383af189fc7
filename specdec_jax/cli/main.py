"""`specdec` and its subcommands."""

import argparse
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import specdec_jax
from specdec_jax import lazy
from specdec_jax.cli import options, outputs
from specdec_jax.launch import failures, platforms, progress


class Command(NamedTuple):
  """A subcommand: a module, imported when the command is used, a line of help,
  and the functions of the module that add its options and do its work."""

  module: str
  help: str
  add_arguments: str = 'add_arguments'
  run: str = 'run'


# Commands of an extra are left out where the extra is not installed.
_COMMANDS = {
  'chat': Command('specdec_jax.cli.commands.chat', 'converse with a model'),
  'generate': Command('specdec_jax.cli.commands.generate', 'continue prompts'),
  'bench': Command(
    'specdec_jax.measure.bench_command',
    'time plain against speculative decoding',
  ),
  'calibrate': Command(
    'specdec_jax.measure.calibrate_command',
    'measure acceptance and costs for `plan`',
  ),
  'plan': Command(
    'specdec_jax.planning.plan_command',
    'choose gamma and predict the speedup',
  ),
  'audit': Command(
    'specdec_jax.audit.audit_command',
    'test whether samples follow the model',
  ),
  'trace': Command('specdec_jax.trace.trace_command', 'show a recorded trace'),
  'data': Command(
    'specdec_jax.training.data_command',
    'train vocabularies and prepare token files',
  ),
  'convert': Command(
    'specdec_jax.cli.commands.convert', 'convert a checkpoint'
  ),
  'train': Command(
    'specdec_jax.training.train_command', 'train a model under gin'
  ),
  'infer': Command(
    'specdec_jax.infer.infer_command', 'decode a task to JSONL, under gin'
  ),
  'merge': Command(
    'specdec_jax.infer.infer_command',
    'join the shards of infer',
    'add_merge_arguments',
    'merge',
  ),
  'eval': Command('specdec_jax.infer.eval_command', 'score what infer wrote'),
  'doctor': Command(
    'specdec_jax.cli.commands.doctor', 'check this installation'
  ),
}

_log = logging.getLogger('specdec_jax')
# As shells report SIGPIPE.
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one subcommand and returns its exit status.

  0; 1 for a failed self-test or audit, or a bug; 2 for bad input, or logits
  that are NaN; 75 for a server that does not answer, or a job of several
  processes that was asked to end (SIGTERM); 130 for an interrupt, after which
  all that was written is in place; 141 for a broken pipe (silent).
  With SPECDEC_TRACEBACK=1 in the environment, errors keep their traceback.
  """
  try:
    status = _run(argv)
    sys.stdout.flush()
    return status
  except KeyboardInterrupt:
    progress.say('interrupted')
    progress.leave_unfinished_work(failures.EXIT_INTERRUPTED)
    return failures.EXIT_INTERRUPTED
  except SystemExit:  # Raised by rich for a broken pipe.
    return EXIT_BROKEN_PIPE
  except BrokenPipeError:
    _drop_output()
    return EXIT_BROKEN_PIPE
  except Exception as error:
    if os.environ.get('SPECDEC_TRACEBACK'):
      raise
    sentence, status = failures.explain(error)
    if _drop_output() and not getattr(error, 'filename', None):
      sentence = f'standard output: {sentence}'
    progress.say(f'error: {sentence}')
    progress.leave_unfinished_work(status)
    return status


def _run(argv: Sequence[str] | None) -> int:
  if sys.stdout is None:
    raise ValueError(
      'standard output is closed; redirect it to /dev/null instead'
    )
  for stream in (sys.stdout, sys.stderr):
    # A character that the terminal's encoding lacks must not raise.
    if isinstance(stream, io.TextIOWrapper) and (
      not stream.encoding.lower().startswith('utf')
    ):
      stream.reconfigure(errors='replace')
  if not _log.handlers:
    _log.addHandler(_Complaints(logging.WARNING))
  argv = sys.argv[1:] if argv is None else argv
  try:
    args = _parser(argv).parse_args(argv)
  except SystemExit as done:  # After --help or a wrong option.
    return int(done.code or 0)
  platforms.prepare_libtpu()
  # The output is locked for the whole run, so that no other run overwrites it.
  with outputs.reserved(getattr(args, 'json', None)):
    return args.run_command(args)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
  """Makes the parser, with the options of the chosen subcommand only."""
  parser = options.Parser(
    prog='specdec',
    description='Draft-then-verify decoding, compiled as one program.',
  )
  parser.add_argument(
    '--version', action='version', version=specdec_jax.__version__
  )
  subparsers = parser.add_subparsers(dest='command', required=True)
  # Modules of subcommands import a lot: only the chosen one is imported.
  words = (argument for argument in argv if not argument.startswith('-'))
  chosen = next(words, None)
  for name, command in _COMMANDS.items():
    if not lazy.is_installed(command.module):
      if name == chosen:
        raise ValueError(
          f'{name} is a command of the extra {lazy.extra_of(command.module)}, '
          'whose folder is not in this installation'
        )
      continue
    subparser = subparsers.add_parser(
      name, help=command.help, formatter_class=options.HelpFormatter
    )
    if name == chosen:
      module = importlib.import_module(command.module)
      run = getattr(module, command.run)
      subparser.description = run.__doc__ or module.__doc__
      subparser.set_defaults(run_command=run)
      getattr(module, command.add_arguments)(subparser)
  return parser


def _drop_output() -> bool:
  """Returns whether standard output is broken; then drops what is buffered."""
  try:
    if sys.stdout is not None:
      sys.stdout.flush()
    return False
  except OSError:
    # Python flushes standard output once more when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


class _Complaints(logging.Handler):
  """Prints warnings of the library as lines of this command."""

  def emit(self, record: logging.LogRecord) -> None:
    progress.say(record.getMessage())
