"""The card of a shipped model: card.json, and README.md made of it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from experiments.pretrained import curve
from experiments.suite import table
from specdec_jax.checkpoints import pretrained

NAME = 'README.md'
DATA = 'card.json'

_TEMPLATE = Path(__file__).with_name('card.md.jinja')
# What each network is, for the first line.
_KINDS = {
  't5': 'T5 1.1',
  'block_decoder': 'Spec-Drafter',
  'llama': 'Llama',
  'eagle': 'EAGLE-3 drafter',
  'block_drafter': 'Block drafter',
}
_LABELS = {
  'bleu': 'BLEU (sacrebleu, international tokenisation)',
  'rouge1': 'ROUGE-1',
  'rouge2': 'ROUGE-2',
  'rougeLsum': 'ROUGE-Lsum',
  'exact_match': 'exact match, %',
  'nats_per_token': 'nats per token',
  'perplexity': 'perplexity',
}


def load(name: str) -> dict[str, Any]:
  """Reads the figures of a model; ValueError if `shipping.ship` did not ship
  it."""
  path = pretrained.FOLDER / name / DATA
  if not path.is_file():
    raise ValueError(f'there is no {path}: ship the model first')
  return json.loads(path.read_text(encoding='utf-8'))


def save(name: str, contents: dict[str, Any]) -> None:
  text = json.dumps(contents, indent=1, ensure_ascii=False) + '\n'
  path = pretrained.FOLDER / name / DATA
  path.write_text(text, encoding='utf-8')


def update(name: str, measured: dict[str, dict[str, Any]]) -> None:
  """Puts what was measured, by section and task, in the place of what is known
  of the same task."""
  contents = load(name)
  for section, tasks in measured.items():
    contents[section] = contents.get(section, {}) | tasks
  save(name, contents)


def write(name: str) -> Path:
  """Writes README.md; its path."""
  path = pretrained.FOLDER / name / NAME
  path.write_text(render(load(name)), encoding='utf-8')
  return path


def render(card: dict[str, Any]) -> str:
  """Renders the card as Markdown, with the metadata that Hugging Face's hub
  reads."""
  base_model, runs = None, card['training']
  laws: list[curve.Fits | None] = [None] * len(runs)
  # Drafters that read a target's states are for it alone.
  if card['network'] in ('eagle', 'block_drafter'):
    base_model = runs[-1]['settings']['TARGET']
  if card['network'] == 'eagle':
    laws = [curve.of_stage(run) for run in runs]
  metadata = ModelCardData(
    model_name=card['name'],
    base_model=base_model,
    library_name='specdec_jax',
    tags=[card['network']],
  )
  made = ModelCard.from_template(
    metadata,
    template_path=str(_TEMPLATE),
    **card,
    kinds=_KINDS,
    labels=_LABELS,
    columns=_OF_SUITE,
    laws=laws,
    beyond=curve.BEYOND,
  )
  return f'{made}\n'


# Columns of the suite's table that a card shows.
_OF_SUITE = {
  key: table.COLUMNS[key]
  for key in (
    *('category', 'drafter', 'gamma', 'temperature', 'batch_size'),
    *('tokens_per_target_run', 'alpha_1', 'alpha_2', 'alpha_3'),
    *('speedup', 'speedup_interval', 'predicted_speedup'),
  )
}


def read_suite(path: Path, name: str) -> dict[str, dict[str, Any]]:
  """Reads what a suite measured of a drafter, by target, as `update` takes it,
  with copying from the prompt beside it, at the smallest gamma.

  `path` is the suite.json of `experiments.suite`, `name` the drafter's, as
  `--drafters` had it. ValueError if the suite has nothing of it.
  """
  try:
    text = path.read_bytes()
    suite = json.loads(text)
    rows = suite['rows']
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f'{path} is no suite.json') from error
  is_own = lambda row: row['drafter'].split('+')[0] == name
  targets = {row['target'] for row in rows if is_own(row)}
  if not targets:
    raise ValueError(f'{path} has no row of the drafter {name}')
  gamma = min({row['gamma'] for row in rows if is_own(row)})
  about = {key: suite.get(key) for key in ('device', 'dtype', 'commit')}
  about['sha256'] = hashlib.sha256(text).hexdigest()
  return {
    target: about
    | {
      'rows': [
        {key: row[key] for key in _OF_SUITE}
        for row in rows
        if row['target'] == target
        and row['gamma'] == gamma
        and (is_own(row) or row['drafter'] == 'prompt_lookup')
      ]
    }
    for target in sorted(targets)
  }
