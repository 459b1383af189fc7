"""The card of a shipped model: card.json, and README.md made of it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from experiments.pretrained import curve
from specdec_jax.checkpoints import pretrained
from specdec_jax.measure import suite_report

NAME = 'README.md'
DATA = 'card.json'

# What each is, for the first line.
_KINDS = {
  't5': 'T5 1.1',
  'block_decoder': 'Spec-Drafter',
  'llama': 'Llama',
  'eagle': 'EAGLE-3 drafter',
}


def load(name: str) -> dict[str, Any]:
  """The figures of a model.

  Raises:
    ValueError: if it was not shipped by `shipping.ship`.
  """
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
  """The card as Markdown."""
  parts = [_head(card), _training(card)]
  parts += [_test(task, found) for task, found in card.get('test', {}).items()]
  parts += [
    _drafting(task, found) for task, found in card.get('drafting', {}).items()
  ]
  parts += [
    _suite(target, found) for target, found in card.get('suite', {}).items()
  ]
  for name in ('limits', 'license'):
    if text := card.get(name):
      parts.append([f'## {name.capitalize()}', '', text])
  return '\n'.join('\n'.join(part) + '\n' for part in parts)


def _head(card: dict[str, Any]) -> list[str]:
  sizes = card['sizes']
  layers = f'{sizes["num_encoder_layers"]}+{sizes["num_decoder_layers"]}'
  if not sizes['num_encoder_layers']:
    layers = f'{sizes["num_decoder_layers"]}'
  kind = _KINDS.get(card['network'], card['network'])
  is_eagle = card['network'] == 'eagle'
  if is_eagle:
    target = card['training'][-1]['settings']['TARGET']
    kind += f' for `{target}`'
  elif not sizes['num_encoder_layers']:
    kind += ', decoder-only'
  lines = [
    f'# {card["name"]}',
    '',
    f'{kind}: {card["parameters"]:,} parameters, {layers} layer'
    f'{"s" * (layers != "1")}, '
    f'width {sizes["embed_dim"]}, {sizes["num_heads"]} heads, feed-forward '
    f'{sizes["mlp_dim"]}. {card["bytes"]:,} bytes in bfloat16.',
    '',
  ]
  if is_eagle:
    lines += [
      f"It can draft {sizes['draft_vocab_size']:,} of the target's "
      f'{sizes["vocab_size"]:,} tokens, and has the embeddings of the target.',
      '',
      f'`specdec generate --model {target} --drafter eagle --draft_model '
      f'{card["name"]} --chat --prompt TEXT`; with `--lookup` it copies what '
      'repeats.',
      '',
      'The files are those of an Eagle3DraftModel of the package speculators.',
    ]
  elif card['network'] == 'block_decoder':
    lines += ['It only drafts: see `gin_configs/drafters/spec_drafter.gin`.']
  else:
    lines += [f'`specdec generate --model {card["name"]} --prompt TEXT`']
  if card['format'] == 'huggingface' and not is_eagle:
    lines += [
      '',
      'The files are those of `transformers.T5ForConditionalGeneration`; the '
      'vocabulary is `../spiece.model`, without extra ids.',
    ]
  return lines


def _training(card: dict[str, Any]) -> list[str]:
  lines = ['## Training', '', f'Device: {card["device"]}.']
  if corpora := card['corpora']:
    release = corpora['release']
    lines[-1] = (
      f'Text of Debian {release["version"]} ({release["codename"]}), by '
      '`python -m experiments.corpora debian`; SHA-256 of its manifest '
      f'`{corpora["manifest_sha256"]}`. {lines[-1]}'
    )
  if card.get('note'):
    lines += ['', card['note']]
  for stage in card['training']:
    settings = ', '.join(f'{k} {v}' for k, v in stage['settings'].items())
    lines += [
      '',
      f'### {stage["run"]}',
      '',
      f'{stage["steps"]:,} steps, {stage["target_tokens"]:,} target tokens, '
      f'{stage["hours"]} hours. {settings}.',
      '',
      *(_tokens(each) for each in stage['tokens']),
    ]
    if stage['curve']:
      lines += ['', *_curve(stage['curve'])]
  if card['network'] == 'eagle':
    lines += ['', f'![The learning curve]({curve.NAME})']
  return lines


def _tokens(found: dict[str, Any]) -> str:
  """What a stage of training read."""
  if 'writer' not in found:
    return (
      f'- `{found["name"]}`: {found["examples"]:,} examples, '
      f'{found["target_tokens"]:,} target tokens, SHA-256 `{found["sha256"]}`'
    )
  temperatures = ', '.join(f'{x:g}' for x in found['temperatures'])
  return (
    f'- `{found["name"]}`: {found["examples"]:,} texts by {found["writer"]}, '
    f'temperatures {temperatures} in turn, {found["target_tokens"]:,} tokens '
    f'written; SHA-256 of the prompts `{found["sha256"]}`'
  )


def _curve(points: list[dict[str, Any]]) -> list[str]:
  num_alphas = max(len(point.get('alphas', ())) for point in points)
  names = ['step', 'hours', 'training nats', 'validation nats', 'accuracy']
  names += [f'alpha_{i + 1}' for i in range(num_alphas)]
  lines = [f'| {" | ".join(names)} |', '|---' * len(names) + '|']
  for point in points:
    nats = point['nats']
    alphas = ''.join(f' {alpha:.3f} |' for alpha in point.get('alphas', ()))
    lines.append(
      f'| {point["step"]:,} | {point["hours"]} '
      f'| {"" if nats is None else f"{nats:.3f}"} '
      f'| {point["validation_nats"]:.3f} '
      f'| {point["validation_accuracy"]:.3f} |{alphas}'
    )
  return lines


def _measured(task: str, test: dict[str, Any]) -> str:
  prefix = f', each after `{test["prefix"]}`' if test.get('prefix') else ''
  return (
    f'{test["examples"]:,} examples of `{task}` (SHA-256 `{test["sha256"]}`), '
    f'all of them{prefix}, in batches of {test["batch_size"]}, at most '
    f'{test["max_new_tokens"]} new tokens; {test["device"]}; {test["date"]}.'
  )


_LABELS = {
  'bleu': 'BLEU (sacrebleu, international tokenisation)',
  'rouge1': 'ROUGE-1',
  'rouge2': 'ROUGE-2',
  'rougeLsum': 'ROUGE-Lsum',
  'exact_match': 'exact match, %',
  'nats_per_token': 'nats per token',
  'perplexity': 'perplexity',
}


def _test(task: str, test: dict[str, Any]) -> list[str]:
  return [
    f'## Test split of {task.partition("/")[0]}',
    '',
    _measured(task, test),
    '',
    '| greedy, or of the texts themselves | |',
    '|---|---|',
    *(
      f'| {label} | {test[name]:.2f} |'
      for name, label in _LABELS.items()
      if name in test
    ),
  ]


def _drafting(task: str, found: dict[str, Any]) -> list[str]:
  decoding, alpha = found['decoding'], found['alpha'] or {}
  lines = [
    f'## Drafting for {found["target"]} on {task.partition("/")[0]}',
    '',
    f'{_measured(task, found)} Intervals are 95%; rows are the sampling unit.',
    '',
    '| | this | plainly trained | difference |',
    '|---|---|---|---|',
  ]
  for name, each in alpha.items():
    cells = [_interval(value) for value in each['drafters']]
    cells += [''] * (2 - len(cells))
    cells.append(_interval(each.get('difference'), signed=True))
    label = f'alpha, {name}'
    if each['temperature']:
      label += f' at temperature {each["temperature"]:g}'
    lines.append(f'| {label} | {" | ".join(cells)} |')
  for name, label in (
    ('accepted_per_tested', f'accepted / tested, gamma {found["gamma"]}'),
    ('tokens_per_target_run', 'tokens per target run'),
  ):
    cells = [_interval(each[name]) for each in decoding]
    cells += [''] * (3 - len(cells))
    lines.append(f'| {label}, greedy | {" | ".join(cells)} |')
  lines += ['']
  lines += [
    f'Greedy speculative output with `{each["drafter"]}` differs from greedy '
    f'decoding in {each["rows_that_differ_from_greedy"]} of '
    f'{each["rows"]:,} rows.'
    for each in decoding
  ]
  if 'bench' in found:
    lines += ['', _speed(found['bench'])]
  return lines


def _speed(bench: dict[str, Any]) -> str:
  plain, drafted = (
    bench[f'{side}_tokens_per_second']
    for side in ('autoregressive', 'speculative')
  )
  return (
    f'Speed by `specdec bench`, {bench["num_prompts"]} prompts of the test '
    f'split, batch {bench["batch_size"]}, gamma {bench["gamma"]}, on '
    f'{bench["device"]}: {drafted:.0f} tokens per second instead of '
    f'{plain:.0f}, {bench["speedup"]:.2f} times as many (predicted '
    f'{bench["predicted_speedup"]:.2f}; with the prefill '
    f'{bench["end_to_end_speedup"]:.2f}).'
  )


def _interval(found: dict[str, Any] | None, *, signed: bool = False) -> str:
  if found is None:
    return ''
  sign = '+' if signed else ''
  text = f'{found["value"]:{sign}.3f}'
  if found['interval']:
    low, high = found['interval']
    text += f' ({low:{sign}.3f} to {high:{sign}.3f})'
  return text


# Columns of the suite's table that a card shows.
_OF_SUITE = {
  key: suite_report.COLUMNS[key]
  for key in (
    *('category', 'drafter', 'gamma', 'temperature', 'batch_size'),
    *('tokens_per_target_run', 'alpha_1', 'alpha_2', 'alpha_3'),
    *('speedup', 'speedup_interval', 'predicted_speedup'),
  )
}


def read_suite(path: Path, name: str) -> dict[str, dict[str, Any]]:
  """What a suite measured of a drafter, by target, as `update` takes it, with
  copying from the prompt beside it.

  Args:
    path: the suite.json of `specdec bench --suite`.
    name: of the drafter, as `--drafters` had it.

  Raises:
    ValueError: if the suite has nothing of it.
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
  about = {key: suite.get(key) for key in ('device', 'dtype', 'commit')}
  about['sha256'] = hashlib.sha256(text).hexdigest()
  return {
    target: about
    | {
      'rows': [
        {key: row[key] for key in _OF_SUITE}
        for row in rows
        if row['target'] == target
        and (is_own(row) or row['drafter'] == 'prompt_lookup')
      ]
    }
    for target in sorted(targets)
  }


def _suite(target: str, found: dict[str, Any]) -> list[str]:
  lines = [
    f'## The benchmark suite with {target}',
    '',
    f'By `specdec bench --suite` in {found["dtype"]} on {found["device"]}; '
    f'SHA-256 of its suite.json `{found["sha256"]}`. Speed is of decoding, '
    'against the fastest plain loop.',
    '',
    f'| {" | ".join(name for name, _ in _OF_SUITE.values())} |',
    '|---' * len(_OF_SUITE) + '|',
  ]
  for row in found['rows']:
    cells = [
      '' if row[key] is None else form.format(row[key])
      for key, (_, form) in _OF_SUITE.items()
    ]
    lines.append(f'| {" | ".join(cells)} |')
  return lines
