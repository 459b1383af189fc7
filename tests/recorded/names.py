"""Names that users write or read: flags, names in gin files, keys of JSON, and
the parameters of Python's functions."""

import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import specdec_jax
from tests.recorded import cases, doors
from tests.recorded.cases import Case

_ROOT = Path(__file__).parents[2]
_DRAFTED = Case(drafter='model', drafter_options=cases.DRAFTERS['model'])


def flags(*command: str) -> dict[str, list[str]]:
  """Returns the flags of each command below this one, as its help lists them;
  '' is `specdec` itself."""
  text = doors.run(*command, '--help')
  by_command = {' '.join(command): _flags_in(text)}
  # '    generate            continue prompts', below the positional arguments.
  for name in re.findall(r'^ {4}(\w+)(?: {2}.*)?$', text, re.M):
    by_command |= flags(*command, name)
  return by_command


def _flags_in(text: str) -> list[str]:
  # '  -h, --help            show this help message and exit'
  options = [line for line in text.splitlines() if re.match(r' {2,4}-', line)]
  names = [
    name
    for line in options
    for name in re.findall(r'(?:^ +|, )(--?[\w.]+)', line)
  ]
  return sorted({*names})


def gin_names(config: str) -> list[str]:
  """Returns what a gin file binds: parameters with their functions, macros."""
  names, block = set(), None
  for line in config.splitlines():
    if match := re.match(r'([\w./]+) =', line):
      names.add(match[1])
    elif match := re.match(r'([\w./]+):\s*(?:#.*)?$', line):
      block = match[1]
    elif match := re.match(r'\s+(\w+) =', line):
      names.add(f'{block}.{match[1]}')
  return sorted(names)


def keys_of(value: Any, path: str = '') -> Iterator[str]:
  """Yields the path of each key of a JSON value; `[]` is any place of a list,
  and `{}` any key that is a number or a token."""
  if isinstance(value, dict):
    for key, item in value.items():
      name = '{}' if re.fullmatch(r'-?[\d.]+', key) else key
      yield from {f'{path}.{name}'}
      yield from keys_of(item, f'{path}.{name}')
  elif isinstance(value, list):
    for item in value:
      yield from keys_of(item, f'{path}[]')


def _keys(values: list[Any]) -> list[str]:
  return sorted({key for value in values for key in keys_of(value)})


def _read_jsonl(path: Path) -> list[Any]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def _written_by_infer(folder: Path, out: Path) -> dict[str, list[str]]:
  """Returns the keys of what `infer` writes, and the names of its gin file."""
  doors.infer(folder, _DRAFTED, out)
  [results] = out.glob('*.jsonl-00000-of-00001')
  marks = [path for path in out.rglob('*COMPLETED*') if path.is_file()]
  [config] = out.rglob('config.gin')
  doors.run('eval', results, '--json', out / 'eval.json')
  return {
    'infer': _keys(_read_jsonl(results)),
    'marks of infer': _keys([json.loads(path.read_text()) for path in marks]),
    'config.gin': gin_names(config.read_text()),
    'eval': _keys([json.loads((out / 'eval.json').read_text())]),
  }


def _written_by_others(folder: Path, out: Path) -> dict[str, list[str]]:
  """Returns the keys of what the other commands write."""
  trace, records = out / 'trace.jsonl', out / 'records.jsonl'
  models = doors.model_flags(folder, _DRAFTED)
  texts = doors.text_flags(folder)
  doors.run(
    'generate',
    *models,
    *texts,
    *('--top_logprobs', 2, '--stop', 'e'),
    *('--json', records, '--trace', trace),
  )
  written = {
    'generate': _keys(_read_jsonl(records)),
    'trace': _keys(_read_jsonl(trace)),
  }
  for command in ('bench', 'calibrate'):
    output = doors.run(
      command,
      *models,
      *texts,
      *('--repeats', 1, '--plain_dtypes', 'float32', '--json', '-'),
    )
    written[command] = _keys([json.loads(output)])
  return written


def python_names() -> dict[str, list[str]]:
  """Returns the parameters of the public functions, with their defaults, and
  the public names of the package."""
  functions = {
    'load': specdec_jax.load,
    'generate': specdec_jax.generate,
    'stream': specdec_jax.stream,
    'Conversation': specdec_jax.Conversation,
    'Completion': specdec_jax.Completion,
  }
  signatures = {
    name: [
      f'{parameter.name} = {parameter.default!r}'
      if parameter.default is not parameter.empty
      else parameter.name
      for parameter in inspect.signature(function).parameters.values()
    ]
    for name, function in functions.items()
  }
  return {'specdec_jax': sorted(specdec_jax.__all__)} | signatures


def record(folder: Path) -> dict[str, dict[str, list[str]]]:
  """Returns all names, by where they are used."""
  with tempfile.TemporaryDirectory() as out:
    written = _written_by_infer(folder, Path(out))
    config = written.pop('config.gin')
    written |= _written_by_others(folder, Path(out))
  files = sorted((_ROOT / 'gin_configs').rglob('*.gin'))
  gin_files = {
    str(path.relative_to(_ROOT)): gin_names(path.read_text()) for path in files
  }
  return {
    'flags': flags(),
    'gin': gin_files | {'config.gin of infer': config},
    'JSON keys': written,
    'Python': python_names(),
  }
