"""Shows a recorded trace, in the terminal or as one HTML page."""

import argparse
from pathlib import Path

from specdec_jax.cli import options, progress
from specdec_jax.evaluation import trace_file, trace_html, trace_terminal

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
    help='one line an iteration, or running text',
  )
  parser.add_argument('--row', type=int, help='show this row alone')
  options.add_color(parser)


def run(args: argparse.Namespace) -> int:
  traced = trace_file.read(args.trace)
  if args.html:
    Path(args.html).write_text(trace_html.render(traced), encoding='utf-8')
    print(f'wrote {args.html}')
    return 0
  screen = progress.console(is_stderr=False, color=args.color)
  trace_terminal.show(traced, screen, style=args.style, row=args.row)
  return 0
