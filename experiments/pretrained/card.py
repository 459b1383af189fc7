"""The card of a shipped model: card.json, and README.md made of it."""

import json
from pathlib import Path
from typing import Any

from specdec_jax.checkpoints import pretrained

NAME = 'README.md'
DATA = 'card.json'

# What each is, for the first line.
_KINDS = {
  't5': 'T5 1.1',
  'block_decoder': 'Spec-Drafter',
  'llama': 'Llama',
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
  return '\n'.join('\n'.join(part) + '\n' for part in parts)


def _head(card: dict[str, Any]) -> list[str]:
  sizes = card['sizes']
  layers = f'{sizes["num_encoder_layers"]}+{sizes["num_decoder_layers"]}'
  if not sizes['num_encoder_layers']:
    layers = f'{sizes["num_decoder_layers"]}'
  kind = _KINDS.get(card['network'], card['network'])
  if not sizes['num_encoder_layers']:
    kind += ', decoder-only'
  lines = [
    f'# {card["name"]}',
    '',
    f'{kind}: {card["parameters"]:,} parameters, {layers} layers, '
    f'width {sizes["embed_dim"]}, {sizes["num_heads"]} heads, feed-forward '
    f'{sizes["mlp_dim"]}. {card["bytes"]:,} bytes in bfloat16.',
    '',
  ]
  if card['network'] == 'block_decoder':
    lines += ['It only drafts: see `gin_configs/drafters/spec_drafter.gin`.']
  else:
    lines += [f'`specdec generate --model {card["name"]} --prompt TEXT`']
  if card['format'] == 'huggingface':
    lines += [
      '',
      'The files are those of `transformers.T5ForConditionalGeneration`; the '
      'vocabulary is `../spiece.model`, without extra ids.',
    ]
  return lines


def _training(card: dict[str, Any]) -> list[str]:
  release = card['corpora']['release']
  lines = [
    '## Training',
    '',
    f'Text of Debian {release["version"]} ({release["codename"]}), by `python '
    f'-m experiments.corpora debian`; SHA-256 of its manifest '
    f'`{card["corpora"]["manifest_sha256"]}`. Device: {card["device"]}.',
  ]
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
      *(
        f'- `{t["name"]}`: {t["examples"]:,} examples, {t["target_tokens"]:,} '
        f'target tokens, SHA-256 `{t["sha256"]}`'
        for t in stage['tokens']
      ),
    ]
    if stage['curve']:
      lines += ['', *_curve(stage['curve'])]
  return lines


def _curve(curve: list[dict[str, Any]]) -> list[str]:
  lines = [
    '| step | hours | training nats | validation nats | accuracy |',
    '|---|---|---|---|---|',
  ]
  for point in curve:
    nats = point['nats']
    lines.append(
      f'| {point["step"]:,} | {point["hours"]} '
      f'| {"" if nats is None else f"{nats:.3f}"} '
      f'| {point["validation_nats"]:.3f} '
      f'| {point["validation_accuracy"]:.3f} |'
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
