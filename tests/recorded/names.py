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
from specdec_jax import lazy
from tests.cli.commands import DECODING_COMMANDS
from tests.recorded import cases, doors
from tests.recorded.cases import Case

_ROOT = Path(__file__).parents[2]
DRAFTED = Case(drafter='model', drafter_options=cases.DRAFTERS['model'])


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


def all_keys(values: list[Any]) -> list[str]:
  """Returns the paths of all keys of several values."""
  return sorted({key for value in values for key in keys_of(value)})


def read_jsonl(path: Path) -> list[Any]:
  """Reads the values of a file of lines."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def _written_by_commands(folder: Path, out: Path) -> dict[str, list[str]]:
  """Returns the keys of what commands write that decode prompts."""
  trace, records = out / 'trace.jsonl', out / 'records.jsonl'
  models = doors.model_flags(folder, DRAFTED)
  texts = doors.text_flags(folder)
  doors.run(
    'generate',
    *models,
    *texts,
    *('--top_logprobs', 2, '--stop', 'e'),
    *('--json', records, '--trace', trace),
  )
  written = {
    'generate': all_keys(read_jsonl(records)),
    'trace': all_keys(read_jsonl(trace)),
  }
  others = [name for name in DECODING_COMMANDS if name != 'generate']
  for command in others:
    output = doors.run(
      command,
      *models,
      *texts,
      *('--repeats', 1, '--plain_dtypes', 'float32', '--json', '-'),
    )
    written[command] = all_keys([json.loads(output)])
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
    written = _written_by_commands(folder, Path(out))
    for written_by_infer in lazy.installed(
      'tests.infer.recorded:written_by_infer'
    ):
      written |= written_by_infer(folder, Path(out))
  files = sorted((_ROOT / 'gin_configs').rglob('*.gin'))
  gin_files = {
    str(path.relative_to(_ROOT)): gin_names(path.read_text()) for path in files
  }
  if 'config.gin' in written:
    gin_files['config.gin of infer'] = written.pop('config.gin')
  return {
    'flags': flags(),
    'gin': gin_files,
    'JSON keys': written,
    'Python': python_names(),
  }
