"""Shows a recorded trace, in the terminal, as one HTML page or as one SVG."""

import argparse
import dataclasses

from specdec_jax.assembly import trace_files as storage
from specdec_jax.cli import live_text as terminal
from specdec_jax.cli import options, outputs, wording
from specdec_jax.launch import progress
from specdec_jax.trace import page, svg


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add, instead = parser.add_argument, parser.add_mutually_exclusive_group()
  add('trace', help='what `generate --trace` wrote')
  write = instead.add_argument
  write('--html', metavar='OUT.html', help='write a self-contained page')
  write('--svg', metavar='OUT.svg', help='write a picture, light and dark')
  add(
    '--style',
    choices=('lines', 'flow'),
    default='lines',
    help='in the terminal: a line per iteration, or running text',
  )
  add('--row', type=int, help='show this row alone; the first is 1')
  add(
    '--max_iterations',
    type=options.positive_int,
    metavar='N',
    help='in the picture, the first N iterations of each row',
  )
  options.add_output(parser)


def run(args: argparse.Namespace) -> int:
  if args.max_iterations and not args.svg:
    raise ValueError(f'--max_iterations {args.max_iterations} needs --svg')
  if args.style != 'lines' and (args.html or args.svg):
    raise ValueError(
      f'--style {args.style} is for the terminal, not for --html or --svg'
    )
  written = {'--html': args.html, '--svg': args.svg}
  outputs.check(written, {'the trace': args.trace})
  traced = storage.read(args.trace)
  # Users count rows from 1, traces from 0.
  rows = {wording.ordinal(row): row for row in traced.rows}
  if args.row not in (None, *rows):
    shown = ', '.join(map(str, rows)) or 'none'
    raise ValueError(f'the trace has no row {args.row}; its rows: {shown}')
  row = rows.get(args.row)
  path = args.html or args.svg
  if not path:
    screen = progress.console(color=args.color)
    terminal.show(traced, screen, style=args.style, row=row)
    return 0
  only = _only(traced, row)
  if args.html:
    text = page.render(only)
  else:
    text = svg.render(only, max_iterations=args.max_iterations)
  with outputs.opened(path) as file:
    file.write(text)
  if path != outputs.STANDARD_OUTPUT:
    progress.show(f'wrote {path}')
  return 0


def _only(traced: storage.Trace, row: int | None) -> storage.Trace:
  """Keeps of a trace one of its rows; None keeps all."""
  of = lambda records: {k: v for k, v in records.items() if row in (None, k)}
  return dataclasses.replace(
    traced, prompts=of(traced.prompts), iterations=of(traced.iterations)
  )
