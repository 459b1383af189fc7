"""Shows a recorded trace, in the terminal or as one HTML page."""

import argparse
import dataclasses

from specdec_jax.cli import options, outputs, progress
from specdec_jax.evaluation import trace_file, trace_html, trace_terminal
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
  parser.add_argument('--row', type=int, help='show this row alone')
  options.add_output(parser)


def run(args: argparse.Namespace) -> int:
  outputs.check({'--html': args.html}, {'the trace': args.trace})
  traced = trace_file.read(args.trace)
  if args.row is not None and args.row not in traced.rows:
    rows = ', '.join(map(str, traced.rows)) or 'none'
    raise ValueError(f'the trace has no row {args.row}; its rows: {rows}')
  if args.html:
    page = trace_html.render(_only(traced, args.row))
    with outputs.opened(args.html) as file:
      file.write(page)
    if args.html != outputs.STANDARD_OUTPUT:
      print(f'wrote {args.html}')
    return 0
  screen = progress.console(color=args.color)
  trace_terminal.show(traced, screen, style=args.style, row=args.row)
  return 0


def _only(traced: Trace, row: int | None) -> Trace:
  """A trace of one of its rows; None keeps all."""
  if row is None:
    return traced
  return dataclasses.replace(
    traced,
    prompts={k: v for k, v in traced.prompts.items() if k == row},
    iterations={k: v for k, v in traced.iterations.items() if k == row},
  )
