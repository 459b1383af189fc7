"""Shows a recorded trace, in the terminal or as one HTML page."""

import argparse
import dataclasses

from specdec_jax.cli import options, outputs, progress
from specdec_jax.evaluation import (
  trace_file,
  trace_html,
  trace_terminal,
  trace_text,
)
from specdec_jax.evaluation.trace_file import Trace

HELP = 'show a recorded trace'


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('trace', help='what `generate --trace` wrote')
  parser.add_argument(
    '--html', metavar='OUT.html', help='write a self-contained page instead'
  )
  parser.add_argument(
    '--style',
    choices=('lines', 'flow'),
    default='lines',
    help='in the terminal, one line an iteration, or running text',
  )
  parser.add_argument(
    '--row', type=int, help='show this row alone; the first is 1'
  )
  options.add_output(parser)


def run(args: argparse.Namespace) -> int:
  outputs.check({'--html': args.html}, {'the trace': args.trace})
  traced = trace_file.read(args.trace)
  row = _find(traced, args.row)
  if args.html:
    page = trace_html.render(_only(traced, row))
    with outputs.opened(args.html) as file:
      file.write(page)
    if args.html != outputs.STANDARD_OUTPUT:
      print(f'wrote {args.html}')
    return 0
  screen = progress.console(color=args.color)
  trace_terminal.show(traced, screen, style=args.style, row=row)
  return 0


def _find(traced: Trace, number: int | None) -> int | None:
  """A row as the records name it, by the number that is shown of it."""
  if number is None:
    return None
  rows = {trace_text.ordinal(row): row for row in traced.rows}
  if number not in rows:
    shown = ', '.join(map(str, rows)) or 'none'
    raise ValueError(f'the trace has no row {number}; its rows: {shown}')
  return rows[number]


def _only(traced: Trace, row: int | None) -> Trace:
  """A trace of one of its rows; None keeps all."""
  if row is None:
    return traced
  return dataclasses.replace(
    traced,
    prompts={k: v for k, v in traced.prompts.items() if k == row},
    iterations={k: v for k, v in traced.iterations.items() if k == row},
  )
