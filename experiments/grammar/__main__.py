"""Measures texts that match a grammar: their cost, and the free drafts.

    python -m experiments.grammar
    python -m experiments.grammar --tables=costs,host  # Times alone.

Tokens per target run are exact figures; times are medians.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jsonschema

import specdec_jax
from experiments import common, report
from experiments.grammar import host, people
from experiments.report import Cells, Table
from experiments.suite import examples
from specdec_jax.assembly import packing, running
from specdec_jax.assembly.completions import Completion
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.measure import stopwatch

MODULE = 'experiments.grammar'
GAMMA, BATCH = 8, 10
DRAFTERS = 'none', 'grammar', 'prompt_lookup'
FIELDS = (  # noqa: SIM905
  'first_name last_name street city postcode country phone email birth_date '
  'occupation company department salary currency start_date manager skills '
  'languages education degree university year married children hobbies rating '
  'verified notes category tags'
).split()
_KINDS = (
  {'type': 'string'},
  {'type': 'integer'},
  {'type': 'boolean'},
  {'type': 'number'},
  {'enum': ['low', 'medium', 'high']},
  {'type': 'string', 'maxLength': 20},
  {'type': 'array', 'items': {'type': 'string'}},
)
WIDE = {
  'type': 'object',
  'properties': dict(zip(FIELDS, itertools.cycle(_KINDS), strict=False)),
  'additionalProperties': False,
}
# A record of fixed words around a translation.
RECORD = (
  r'\{"Sprache":"Deutsch","Herkunft":"Paketbeschreibung",'
  r'"Beschreibung":"[A-Za-zäöüÄÖÜß ,.-]{1,80}"\}'
)

_NOTE = f'Float32, gamma {GAMMA}.'


def rows_of(model: str, texts: Sequence[str], **how: Any) -> list[Cells]:
  """Tokens per target run by drafter."""
  made = []
  for name in DRAFTERS:
    gamma = {} if name == 'none' else {'gamma': GAMMA}
    decoder = specdec_jax.load(model, drafter=name, **gamma)
    done = [*specdec_jax.generate(decoder, [*texts], batch_size=BATCH, **how)]
    total = lambda key, done=done: sum(each.statistics[key] for each in done)
    cells: Cells = {
      'drafter': name,
      'outputs': len(done),
      'tokens': total('tokens'),
      'target runs': total('target_runs'),
      'tokens per run': f'{total("tokens") / total("target_runs"):.2f}',
      'follow the schema': sum(map(is_person, done)) if how.get('chat') else '',
    }
    made.append(cells)
  return made


def is_person(done: Completion) -> bool:
  try:
    jsonschema.validate(json.loads(done.text), people.PERSON)
  except (ValueError, jsonschema.ValidationError):
    print('NOT VALID', repr(done.text), file=sys.stderr)
    return False
  return True


TABLES = {
  'greedy': 'JSON by SmolLM2, greedily',
  'sampled': 'JSON by SmolLM2, at temperature 1',
  'record': 'A translation within fixed words',
  'costs': 'What a grammar costs',
  'host': "The host's part of an iteration",
}


def extraction(num_people: int, temperature: float) -> Table:
  """JSON of what sentences say of a person, by SmolLM2."""
  prompts = [people.TASK.format(text) for text in people.PEOPLE[:num_people]]
  rows = rows_of(
    'smollm2-135m',
    prompts,
    json_schema=people.PERSON,
    max_new_tokens=192,  # Drawn texts, too, are to end by themselves.
    chat=True,
    temperature=temperature,
  )
  return Table(rows=rows, notes=[_NOTE])


def record() -> Table:
  """A translation within fixed words, by `ende-mini`."""
  rows = rows_of(
    'ende-mini', examples.SENTENCES, regex=RECORD, max_new_tokens=128
  )
  return Table(rows=rows, notes=[_NOTE])


def costs(max_new_tokens: int, repeats: int) -> Table:
  """The time of a target run with masks and without."""
  rows = []
  timed, counts = {}, {}
  schemas = {'none': None, '5 fields': people.PERSON, '30 fields': WIDE}
  for drafter in ('none', 'prompt_lookup'):
    gamma = {} if drafter == 'none' else {'gamma': GAMMA}
    decoder = specdec_jax.load('smollm2-135m', drafter=drafter, **gamma)
    for name, schema in schemas.items():
      settings = running.DecodeSettings(
        max_new_tokens=max_new_tokens,
        chat=True,
        text=TextSettings(json_schema=schema),
      )
      prompt = people.TASK.format(people.PEOPLE[0])
      [batch] = packing.pack(decoder, [prompt], settings)
      decode = running.compile_decode(decoder, batch, settings)
      output = jax.device_get(decode(batch, ()))
      counts[drafter, name] = output.statistics
      timed[drafter, name] = lambda decode=decode, batch=batch: (
        stopwatch.run_seconds(decode, batch, ())[1]
      )
  turns = [{k: run() for k, run in timed.items()} for _ in range(repeats)]
  for (drafter, schema), count in counts.items():
    seconds = statistics.median(turn[drafter, schema] for turn in turns)
    num_runs = int(count.num_target_runs[0])
    num_tokens = int(count.num_tokens[0])
    cells: Cells = {
      'drafter': drafter,
      'schema': schema,
      'tokens': num_tokens,
      'target runs': num_runs,
      'ms per run': f'{seconds * 1e3 / num_runs:.2f}',
      'tokens per second': f'{num_tokens / seconds:.1f}',
    }
    rows.append(cells)
  return Table(
    rows=rows,
    notes=[
      f'SmolLM2-135M, float32, greedy, one row, V = 49,152, gamma {GAMMA}. '
      f'Whole decodes with their prefills, medians of {repeats} turns.'
    ],
  )


def main(argv: Sequence[str] | None = None) -> int:
  argv = sys.argv[1:] if argv is None else argv
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--output', type=Path, default=Path('experiments/grammar/results')
  )
  common.add_counts(parser, num_people=100, max_new_tokens=64, repeats=7)
  common.add_tables(parser, TABLES)
  args = parser.parse_args(argv)
  extract = functools.partial(extraction, args.num_people)
  makers = (
    functools.partial(extract, temperature=0.0),
    functools.partial(extract, temperature=1.0),
    record,
    functools.partial(costs, args.max_new_tokens, args.repeats),
    functools.partial(host.table, args.repeats),
  )

  def run() -> None:
    for (name, title), make in zip(TABLES.items(), makers, strict=True):
      if name in args.tables:
        report.measure((MODULE, argv), args.output, name, title, make)

  return common.finish('grammar', run)


if __name__ == '__main__':
  sys.exit(main())
