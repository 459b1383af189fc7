"""Texts by JSON schemas that were written for other programs.

    python -m experiments.grammar.schemas write --schemas=data --task=task.jsonl
    specdec infer ...  # See README.md.
    python -m experiments.grammar.schemas judge --task=task.jsonl \
      --predictions=out/task-predict.jsonl-00000-of-00001

A text that ends by itself has to follow its schema. Many do not end, as a small
model repeats itself inside a string. `--cut` writes a task of these, with a
bias for what closes strings, arrays and objects, and a penalty for repetition.
"""

import argparse
import decimal
import functools
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

import specdec_jax
from experiments import common, report
from experiments.report import Cells, Table
from specdec_jax.files import text_lines
from specdec_jax.text import grammars

MODULE = 'experiments.grammar.schemas'
TASK = 'Give a short example of JSON for this schema: {}'
# Characters of a schema that its prompt quotes.
_QUOTED = 80
# Tokens that close strings, arrays or objects, or end a number.
_CLOSING = re.compile('"?[]}]*,?')
# A text is in circles if its last characters repeat a shorter part.
_TAIL, _LONGEST_CIRCLE = 400, 130
# Of the numbers that are checked; no text has longer ones.
_DIGITS = 2000
# A line of a task or of its predictions.
_Line = dict[str, Any]
_Pair = tuple[_Line, _Line]


def write(args: argparse.Namespace) -> None:
  """Writes a task: for each temperature, a text of each schema."""
  schemas = chosen(args.schemas, args.num_schemas)
  lines = [
    {
      'inputs': TASK.format(text[:_QUOTED]),
      'schema': name,
      'temperature': temperature,
      'json_schema': text,
    }
    for temperature in args.temperatures
    for name, text in schemas.items()
  ]
  _write_lines(args.task, lines)


def chosen(folder: Path, num_schemas: int) -> dict[str, str]:
  """Draws schemas from the JSON files of a folder and its folders, by their
  paths: of those that llguidance compiles for SmolLM2, and that `jsonschema`
  takes for schemas. Raises ValueError if there are too few."""
  paths = sorted(folder.rglob('*.json'))
  random.Random(2).shuffle(paths)
  decoder = specdec_jax.load('smollm2-135m', drafter='none')
  reader = grammars.reader_of(decoder.vocabulary, decoder.target.vocab_size)
  schemas: dict[str, str] = {}
  for path in paths:
    if len(schemas) == num_schemas:
      break
    text = path.read_text('utf-8')
    try:
      reader.number_of(grammars.of_option('json_schema', text))
      schema = json.loads(text)
      jsonschema.validators.validator_for(schema).check_schema(schema)
    except (ValueError, jsonschema.SchemaError):
      continue
    schemas[path.relative_to(folder).as_posix()] = text
  if len(schemas) < num_schemas:
    raise ValueError(
      f'{folder} has {len(schemas)} usable schemas, not {num_schemas}'
    )
  return schemas


def judge(args: argparse.Namespace, argv: Sequence[str]) -> None:
  """Counts the texts that follow their schemas, and writes the task of those
  that their limit cut."""
  if len(args.task) != len(args.predictions):
    raise ValueError(
      f'--task has {len(args.task)} files, and --predictions '
      f'{len(args.predictions)}: give the predictions of each task, in order'
    )
  files = zip(args.task, args.predictions, strict=True)
  runs = [(task.stem, _pairs(task, texts)) for task, texts in files]
  make = functools.partial(table, runs)
  title = 'JSON by schemas of other programs'
  report.measure((MODULE, argv), args.output, 'schemas', title, make)
  if args.cut is not None:
    # A closing token may be repeated, too: every use makes it less likely.
    settings = {'logit_bias': closing_biases(), 'frequency_penalty': 0.5}
    cut = [
      line | settings
      for _, pairs in runs
      for line, text in pairs
      if _is_cut(text)
    ]
    _write_lines(args.cut, cut)


def _pairs(task: Path, predictions: Path) -> list[_Pair]:
  """Reads the lines of a task with their predictions."""
  lines, texts = _read_lines(task), _read_lines(predictions)
  # A line of a task has its text where a prediction has its fields by name.
  inputs = [{'inputs_pretokenized': line.get('inputs')} for line in lines]
  if inputs != [text.get('inputs') for text in texts]:
    raise ValueError(
      f'{predictions} has not the inputs of {task}: give its own predictions'
    )
  return list(zip(lines, texts, strict=True))


def closing_biases() -> dict[str, float]:
  """Returns biases of SmolLM2's tokens that close something, by their ids."""
  tokens = specdec_jax.load('smollm2-135m', drafter='none').vocabulary.tokens()

  def bias(token: str) -> float:
    # After a comma an array goes on, so a bracket has more. In a string both
    # would be text, so a quote has more than either, and `"}` the most.
    has_bracket = ']' in token or '}' in token
    has_quote = '"' in token
    return 6.0 + 2.0 * has_bracket + 4.0 * has_quote

  return {
    str(i): bias(token)
    for i, token in enumerate(tokens)
    if token and _CLOSING.fullmatch(token)
  }


def table(runs: Sequence[tuple[str, Sequence[_Pair]]]) -> Table:
  """Counts the texts of each temperature of each task; runs have the tasks'
  names."""
  rows = []
  for name, pairs in runs:
    for temperature in sorted({line['temperature'] for line, _ in pairs}):
      alike = [pair for pair in pairs if pair[0]['temperature'] == temperature]
      cells = {'task': name, 'temperature': f'{temperature:g}'}
      rows.append(cells | counted(alike))
  return Table(rows=rows)


def counted(pairs: Sequence[_Pair]) -> Cells:
  """Counts texts that ended by themselves, those of them that follow their
  schemas, and those that were cut."""
  ended = [pair for pair in pairs if pair[1]['aux']['end'] == 'eos']
  cut = [text['prediction'] for _, text in pairs if _is_cut(text)]
  follow = 0
  for line, text in ended:
    if follows(text['prediction'], line['json_schema']):
      follow += 1
    else:
      print('NOT VALID', line['schema'], text['prediction'], file=sys.stderr)
  total = lambda name: sum(text['aux'][name] for _, text in pairs)
  return {
    'texts': len(pairs),
    'tokens': total('tokens'),
    'target runs': total('target_runs'),
    'ended': len(ended),
    'follow their schema': follow,
    'met the limit': len(cut),
    'of these in circles': sum(map(is_in_circles, cut)),
  }


def follows(text: str, schema: str) -> bool:
  """Whether a text is JSON that a schema accepts, by `jsonschema`."""
  # As binary fractions, 2.32 would be no multiple of 0.01.
  read = functools.partial(json.loads, parse_float=_exact)
  try:
    with decimal.localcontext(decimal.Context(prec=_DIGITS)):
      jsonschema.validate(read(text), read(schema))
  except (ValueError, ArithmeticError, jsonschema.ValidationError):
    return False
  return True


def _exact(text: str) -> int | decimal.Decimal:
  """Reads a number with a point or an exponent; 2.0 and 1e3 are integers."""
  try:
    number = decimal.Decimal(text)
  except decimal.InvalidOperation:  # An exponent of twenty digits or more.
    number = decimal.Decimal(float(text))
  is_short = number.is_finite() and number.adjusted() < _DIGITS
  if is_short and number == number.to_integral_value():
    return int(number)
  return number


def is_in_circles(text: str) -> bool:
  """Whether the end of a text repeats a part of it again and again."""
  # 'la la la la ' is itself after 3 characters; three rounds are the least.
  tail = text[-_TAIL:]
  longest = min(_LONGEST_CIRCLE, len(tail) // 3)
  return any(tail[size:] == tail[:-size] for size in range(1, longest + 1))


def _is_cut(text: Mapping[str, Any]) -> bool:
  return text['aux']['end'] == 'length'


def _read_lines(path: Path) -> list[_Line]:
  return [line for _, line in text_lines.read_objects(path)]


def _write_lines(path: Path, lines: Sequence[_Line]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  text = ''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines)
  path.write_text(text, 'utf-8')
  print(f'wrote {len(lines)} texts to {path}')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python -m {MODULE}', description=__doc__.splitlines()[0]
  )
  commands = parser.add_subparsers(dest='command', required=True)
  writing = commands.add_parser('write', help='the task, for specdec infer')
  writing.add_argument(
    '--schemas',
    type=Path,
    required=True,
    help='a folder of JSON schemas, perhaps in folders',
  )
  writing.add_argument(
    '--temperatures',
    type=float,
    nargs='+',
    default=[0.0, 1.0, 1.0],
    help='of the texts of each schema; 0 is greedy',
  )
  common.add_counts(writing, num_schemas=300)
  writing.add_argument(
    '--task', type=Path, required=True, help='where to write the task'
  )
  judging = commands.add_parser('judge', help='what specdec infer wrote')
  judging.add_argument(
    '--task', type=Path, nargs='+', required=True, help='one or more'
  )
  judging.add_argument(
    '--predictions',
    type=Path,
    nargs='+',
    required=True,
    help='of each task, in the same order',
  )
  judging.add_argument(
    '--cut', type=Path, help='where to write the task of texts that were cut'
  )
  judging.add_argument(
    '--output', type=Path, default=Path('experiments/grammar/results')
  )
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  args = _parser().parse_args(argv)
  run = (
    functools.partial(write, args)
    if args.command == 'write'
    else functools.partial(judge, args, argv)
  )
  return common.finish('schemas', run)


if __name__ == '__main__':
  sys.exit(main())
