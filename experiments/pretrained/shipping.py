"""From a finished run to a folder of the package."""

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.pretrained import card, curve
from specdec_jax.checkpoints import formats, loading, model_file, pretrained
from specdec_jax.files import replacing
from specdec_jax.models import families
from specdec_jax.text import vocabulary_files
from specdec_jax.training import metrics_log
from specdec_jax.training.data import token_files, written_texts

_VOCABULARY = (vocabulary_files.SENTENCEPIECE, 'tokenizer_config.json')
# A macro of config.gin with a value that Python reads; gin indents the lines
# that it goes on over, and puts a backslash before them.
_MACRO = re.compile(r'^([A-Z_]+) = (?:\\\n)?(.+(?:\n[ ].+)*)$', re.MULTILINE)
_NUM_POINTS = 12


def ship(
  runs: Sequence[str],
  name: str,
  *,
  manifest: str | None,
  about: Mapping[str, str | None],
  overwrite: bool = False,
) -> None:
  """Makes `specdec_jax/pretrained/NAME`: the weights in bfloat16, and what is
  known of their training in card.json.

  Encoder-decoders and EAGLE-3 drafters are put into Hugging Face's format,
  which other packages read too; other networks into ours. The vocabulary lies
  once above all folders; an EAGLE-3 drafter has that of its target, and a
  picture of its learning curve.

  The last of `runs` has the model; each began from the one before. If the first
  began from the model that is shipped, its card keeps what it says of the runs
  before. `manifest` is None for a drafter that learned from texts of its target
  alone; `about` is what the runs do not say, such as the device. A draft
  vocabulary that was shipped before stays. ValueError if a run is not finished,
  or has another vocabulary than what was shipped before, or there is no
  manifest.
  """
  records = [_training(Path(run)) for run in runs]
  begun_from = records[0]['settings'].get('INITIAL_CHECKPOINT_PATH')
  if begun_from == name:
    records = card.load(name)['training'] + records
  source, folder = Path(runs[-1]) / 'model', pretrained.FOLDER / name
  config = formats.read_config(source, jnp.bfloat16)
  is_eagle = families.drafts_for(config) == 'eagle'
  if manifest is None and not is_eagle:
    raise ValueError(f'{runs[-1]} learned from corpora: give --manifest')
  corpora = None if manifest is None else _corpora(Path(manifest))
  _check_vocabulary(source)
  pretrained.FOLDER.mkdir(exist_ok=True)
  is_huggingface = families.has_encoder(config) or is_eagle
  to = 'huggingface' if is_huggingface else 'safetensors'
  params = formats.read_params(source, config)
  # What is drafted follows from the texts, not from the weights.
  drafted = folder / formats.DRAFT_VOCABULARY
  with replacing.new_folder(folder, overwrite=overwrite) as begun:
    _write(begun, config, params, source, to)
    if drafted.is_file():
      shutil.copyfile(drafted, begun / formats.DRAFT_VOCABULARY)
    if is_eagle:
      log = lambda run: metrics_log.read_log(run / metrics_log.NAME)
      logs = [(run.name, log(run)) for run in map(Path, runs)]
      curve.draw(logs, begun / curve.NAME)
  contents = {
    'name': name,
    'network': families.of(config).name,
    'sizes': _sizes(config),
    'parameters': sum(leaf.size for leaf in jax.tree.leaves(params)),
    'bytes': (folder / 'model.safetensors').stat().st_size,
    'format': to,
    'corpora': corpora,
    **about,
    'training': records,
  }
  card.save(name, contents)


def _write(
  folder: Path, config: Any, params: Any, source: Path, to: str
) -> None:
  """Writes a model in the format of that name, and the vocabulary above."""
  if families.of(config).has_vocabulary:
    words = loading.read_vocabulary(source, num_rows=config.vocab_size)
    if words is not None:
      vocabulary_files.write(folder, words)
  [written] = (each for each in formats.FORMATS if each.name == to)
  assert written.write is not None
  written.write(folder, config, params, 0)
  for file in _VOCABULARY:
    if (folder / file).is_file():
      shutil.move(folder / file, pretrained.FOLDER / file)
  # It was made for its owner alone.
  (folder / 'model.safetensors').chmod(0o644)


def total_bytes() -> int:
  """Counts the bytes of all that is shipped."""
  files = pretrained.FOLDER.rglob('*')
  return sum(path.stat().st_size for path in files if path.is_file())


def _corpora(manifest: Path) -> dict[str, Any]:
  try:
    text = manifest.read_bytes()
    release = json.loads(text)['archive']['release']
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f'{manifest} is no manifest of corpora') from error
  return {
    'manifest_sha256': hashlib.sha256(text).hexdigest(),
    'release': release,
  }


def _check_vocabulary(source: Path) -> None:
  """Raises ValueError if a model has another than those that are shipped."""
  ours = source / vocabulary_files.SENTENCEPIECE
  shared = pretrained.FOLDER / vocabulary_files.SENTENCEPIECE
  if not ours.is_file() or not shared.is_file():
    return
  if ours.read_bytes() != shared.read_bytes():
    raise ValueError(f'{ours} is not the vocabulary of {pretrained.FOLDER}')


def _sizes(config: Any) -> dict[str, Any]:
  names = ('embed_dim', 'num_heads', 'mlp_dim')
  # A block drafter has layers of one kind, and an EAGLE-3 drafter one layer.
  num_layers = getattr(config, 'num_layers', 1)
  sizes = {
    'num_encoder_layers': getattr(config, 'num_encoder_layers', 0),
    'num_decoder_layers': getattr(config, 'num_decoder_layers', num_layers),
    **{name: getattr(config, name) for name in names},
  }
  own = ('vocab_size', 'draft_vocab_size', 'block_size', 'markov_rank')
  return sizes | {x: getattr(config, x) for x in own if hasattr(config, x)}


def _training(run: Path) -> dict[str, Any]:
  """Reads what a run's files say of it."""
  lines = metrics_log.read_log(run / metrics_log.NAME)
  steps = [line for line in lines if 'targets' in line]
  if not steps or not (run / 'model' / model_file.NAME).is_file():
    raise ValueError(f'{run} is no finished run: it has no model')
  macros = _macros(run / 'config.gin')
  return {
    'run': run.name,
    'steps': steps[-1]['step'],
    'target_tokens': int(sum(line['targets'] for line in steps)),
    'hours': round(_hours(steps), 2),
    'tokens': [
      *(
        _tokens(Path(folder))
        for name in ('TOKENS', 'TARGET_TOKENS')
        for folder in _folders(macros.get(name, ()))
      ),
      *(
        _texts(folder, macros.get('NUM_PARTS'))
        for folder in _folders(macros.get('TEXTS', ()))
      ),
    ],
    'settings': {
      name: _shown(value)
      for name, value in macros.items()
      if name not in ('MODEL_DIR', 'VOCABULARY')
    },
    'curve': _curve(lines, steps),
  }


def _folders(value: str | Sequence[str]) -> Sequence[str]:
  return [value] if isinstance(value, str) else value


def _shown(value: Any) -> Any:
  """Shows a setting without the folders of the machine that its paths lie
  on."""
  if isinstance(value, list | tuple):
    return [_shown(each) for each in value]
  return '/'.join(value.split('/')[-2:]) if isinstance(value, str) else value


def _hours(steps: Sequence[dict[str, float]]) -> float:
  """Counts the hours of the steps alone, without validation and checkpoints."""
  return sum(s['targets'] / s['targets_per_second'] for s in steps) / 3600


def _macros(path: Path) -> dict[str, Any]:
  """Reads the macros of a config.gin that are plain values."""
  macros = {}
  for name, text in _MACRO.findall(path.read_text(encoding='utf-8')):
    try:
      value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):  # A reference.
      continue
    if value is not None:
      macros[name] = value
  return macros


def _tokens(folder: Path) -> dict[str, Any]:
  """Describes the training split of token files."""
  split = token_files.load_description(folder).at('splits').at('train').values
  names = ('examples', 'target_tokens', 'sha256')
  return {'name': folder.name} | {name: split.get(name) for name in names}


def _texts(folder: str, num_parts: int | None) -> dict[str, Any]:
  """Describes texts that a target wrote for the run."""
  description = written_texts.load_description(folder)
  parts = written_texts.load_parts(folder, num_parts)
  return {
    'name': Path(folder).name,
    'examples': sum(len(part) for part in parts),
    'target_tokens': sum(part.num_written for part in parts),
    'sha256': description.text('prompts_sha256'),
    'writer': f'{description.text("model")} in {description.text("dtype")}',
    'temperatures': description.values['temperatures'],
  }


def _curve(
  lines: Sequence[dict[str, float]], steps: Sequence[dict[str, float]]
) -> list[dict[str, float]]:
  """Picks evenly spread validations, the last among them, with the training
  loss there and the hours until then."""
  found = [line for line in lines if 'validation_nats' in line]
  chosen = {
    round(i * (len(found) - 1) / max(_NUM_POINTS - 1, 1))
    for i in range(_NUM_POINTS)
  }
  points = []
  for i in sorted(chosen) if found else ():
    step = found[i]['step']
    before = [line for line in steps if line['step'] <= step]
    points.append(
      {
        'step': step,
        'hours': round(_hours(before), 2),
        'nats': before[-1]['nats'] if before else None,
        'validation_nats': found[i]['validation_nats'],
        'validation_accuracy': found[i]['validation_accuracy'],
        'alphas': curve.alphas(found[i]),
      }
    )
  return points
