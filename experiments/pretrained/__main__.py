"""Ships a trained model with the package, and writes its model card.

    python -m experiments.pretrained ship --run=runs/ende_mini \
      --name=ende-mini --manifest=corpora/manifest.json --device='CPU, 2 cores'
    python -m experiments.pretrained measure --target=ende-mini \
      --drafter=ende-nano --plain_drafter=runs/ende_nano/model \
      --task=corpora/debian_ende/test.jsonl --metric=bleu
    python -m experiments.pretrained suite --name=smollm2-135m-eagle \
      --suite=out/suite/suite.json
    python -m experiments.pretrained curve --name=smollm2-135m-eagle \
      --out=experiments/eagle/curve.svg

`ship` makes the folder `specdec_jax/pretrained/NAME` from a finished run, with
the facts of its training in card.json. `measure` decodes the whole test split
and adds its figures to card.json of each given model that is shipped. `suite`
adds what `experiments.suite` measured of a drafter. These write the card,
README.md, from card.json. `curve` draws, from card.json, the power laws that an
EAGLE-3 drafter's card states of its longer runs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import common
from experiments.pretrained import card, curve, shipping
from experiments.pretrained.measuring import measure
from specdec_jax.checkpoints import pretrained
from specdec_jax.infer import quality
from specdec_jax.launch.numbers import positive_int


def main(argv: Sequence[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  return common.finish('pretrained', lambda: args.run_command(args))


# Sections of a card that are stated, not found.
_ABOUT = ('device', 'note', 'limits', 'license')


def _ship(args: argparse.Namespace) -> None:
  shipping.ship(
    args.run,
    args.name,
    manifest=args.manifest,
    about={name: getattr(args, name) for name in _ABOUT},
    overwrite=args.overwrite,
  )
  card.write(args.name)
  print(f'{pretrained.FOLDER}: {shipping.total_bytes():,} bytes in all')


def _measure(args: argparse.Namespace) -> None:
  found = measure(args)
  print(json.dumps(found, indent=2))
  for name, figures in found.items():
    if name in pretrained.names():
      card.update(name, figures)
      card.write(name)
      print(f'{pretrained.FOLDER / name / card.NAME}', file=sys.stderr)


def _suite(args: argparse.Namespace) -> None:
  found = card.read_suite(Path(args.suite), args.name)
  card.update(args.name, {'suite': found})
  print(card.write(args.name), file=sys.stderr)


def _curve(args: argparse.Namespace) -> None:
  runs = card.load(args.name)['training']
  found = [(run['run'], law) for run in runs if (law := curve.of_stage(run))]
  curve.draw_fits(found, args.out)
  for name, law in found:
    print(f'{name}: {law.whole}; of the second half {law.tail}')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m experiments.pretrained', description=__doc__.splitlines()[0]
  )
  commands = parser.add_subparsers(required=True)
  ship = commands.add_parser('ship', help='make the folder of a finished run')
  ship.set_defaults(run_command=_ship)
  ship.add_argument(
    '--run',
    action='append',
    required=True,
    help="a run's folder; several, oldest first, if one began from another: "
    'the last is shipped',
  )
  ship.add_argument('--name', required=True, help='such as ende-mini')
  ship.add_argument(
    '--manifest', help='of the corpora, unless texts of a target were learned'
  )
  ship.add_argument('--device', required=True, help='that trained it, in words')
  ship.add_argument('--note', help='what the settings of the runs do not say')
  ship.add_argument('--limits', help='what it is bad at')
  ship.add_argument('--license', help='of the weights, and why')
  ship.add_argument('--overwrite', action='store_true')
  suite = commands.add_parser('suite', help='state what a suite measured')
  suite.set_defaults(run_command=_suite)
  suite.add_argument('--name', required=True, help='of the shipped drafter')
  suite.add_argument('--suite', required=True, help='a suite.json')
  law = commands.add_parser('curve', help='draw fits of the learning curves')
  law.set_defaults(run_command=_curve)
  law.add_argument('--name', required=True, help='of the shipped drafter')
  law.add_argument('--out', type=Path, required=True, help='an .svg file')
  add = commands.add_parser('measure', help='decode the test split')
  add.set_defaults(run_command=_measure)
  add.add_argument('--target', required=True)
  add.add_argument('--drafter', required=True, help='or a Spec-Drafter')
  add.add_argument(
    '--plain_drafter', help='trained on the data set alone, to compare with'
  )
  add.add_argument('--task', required=True, help='a .jsonl file')
  add.add_argument('--metric', choices=tuple(quality.METRICS))
  add.add_argument('--inputs_field', default='inputs')
  add.add_argument('--prefix', default='', help='put before every input')
  add.add_argument(
    '--bench',
    help='what `specdec bench --json` wrote of the pair, to be stated',
  )
  add.add_argument(
    '--inputs_length',
    type=positive_int,
    default=256,
    help='most tokens that are read; of a language model, of the prompt',
  )
  common.add_counts(add, gamma=4, batch_size=32, max_new_tokens=128)
  return parser


if __name__ == '__main__':
  sys.exit(main())
