"""Reads T5X's gin files and bindings as those of `specdec infer`.

T5X's gin files configure T5X itself: ours stand for those of its sizes and of
its `infer`. What a user's file or flag binds for T5X is bound to what does it
here, or dropped where it changes nothing. What is left is refused; the table is
in docs/launching.md.
"""

import re
from collections.abc import Iterator, Sequence

from specdec_jax.files.require import require
from specdec_jax.launch.gin_files import Dialect
from specdec_jax.models import presets

_FILE = re.compile(
  r'(?:.*/)?(t5x/(?:configs|contrib|examples)/(?:\w+/)*)(\w+)\.gin'
)
_CC_ALL = 'cc_all.32000.100extra'
_MC4 = 'mc4.250000.100extra'
# Folders with T5X's sizes: the prefix of our preset, and the vocabulary.
_FAMILIES = {
  't5x/examples/t5/t5_1_0/': ('t5_1_0', _CC_ALL),
  't5x/examples/t5/t5_1_1/': ('t5_1_1', _CC_ALL),
  't5x/examples/t5/mt5/': ('mt5', _MC4),
  't5x/examples/scalable_t5/t5_1_1/': ('scalable_t5_1_1', _CC_ALL),
  't5x/examples/scalable_t5/mt5/': ('scalable_mt5', _MC4),
}
# Packages that only T5X's gin files need, and our imports for such a file.
_FOREIGN = ('__gin__', '__main__', 't5x', 'seqio', 'flaxformer')
_HEADER = """\
from __gin__ import dynamic_registration
from specdec_jax.infer import decoding
from specdec_jax.infer import infer
from specdec_jax.text import tasks
from specdec_jax.sharding import mesh
"""
_INFER = "include 'gin_configs/runs/infer.gin'\n"

# The tables below are keyed by the end of a selector: `T5Config.dtype` stands
# for `network.T5Config.dtype`, too, and `Trainer.` for all that Trainer takes.
_RENAMED = {
  'DatasetConfig.batch_size': 'decoding.Decoding.batch_size',
  'DatasetConfig.mixture_or_task_name': 'MIXTURE_OR_TASK_NAME',
  'DatasetConfig.split': 'tasks.find.split',
  'DatasetConfig.task_feature_lengths': 'TASK_FEATURE_LENGTHS',
  'DecoderParams.num_decodes': 'decoding.Decoding.num_decodes',
  'DecoderParams.return_all_decodes': 'decoding.Decoding.return_all_decodes',
  'PjitPartitioner.model_parallel_submesh': (
    'mesh.device_mesh.model_parallel_submesh'
  ),
  'PjitPartitioner.num_partitions': 'mesh.device_mesh.num_partitions',
  'RestoreCheckpointConfig.dtype': 'DTYPE',
  'RestoreCheckpointConfig.path': 'CHECKPOINT_PATH',
  'SentencePieceVocabulary.sentencepiece_model_file': 'VOCABULARY',
  'T5Config.dtype': 'DTYPE',
  'TransformerConfig.dtype': 'DTYPE',
  'beam_search.alpha': 'decoding.Decoding.alpha',
  'predict_batch_with_aux.num_decodes': 'decoding.Decoding.num_decodes',
  'predict_batch_with_aux.return_all_decodes': (
    'decoding.Decoding.return_all_decodes'
  ),
  'temperature_sample.temperature': 'decoding.Decoding.temperature',
  'temperature_sample.topk': 'decoding.Decoding.top_k',
  'temperature_sample.topp': 'decoding.Decoding.top_p',
}
# T5X's 0 means no limit, which is None here.
_LIMITS = ('temperature_sample.topk', 'temperature_sample.topp')
# Modules to import, unless the value is None or a macro.
_MODULES = ('DatasetConfig.module', 'MIXTURE_OR_TASK_MODULE')
# Bindings about training and about how T5X restores, on which nothing here
# depends.
_IDLE = {
  *('Adafactor.', 'CheckpointConfig.', 'SaveCheckpointConfig.', 'Trainer.'),
  *('DROPOUT_RATE', 'LABEL_SMOOTHING', 'LOSS_NORMALIZING_FACTOR', 'OPTIMIZER'),
  *('DatasetConfig.seed', 'RestoreCheckpointConfig.strict', 'Z_LOSS'),
  *('T5Config.dropout_rate', 'TransformerConfig.dropout_rate'),
  *('create_learning_rate_scheduler.', 'infer.checkpoint_ds_iter'),
  *('infer.use_orbax', 'label_smoothing', 'loss_normalizing_factor'),
  *('optimizer_def', 'z_loss'),
}
# Bindings that ask for what happens here anyway, if their value begins so.
_AS_HERE = {
  'DatasetConfig.pack': 'False',
  'DatasetConfig.shuffle': 'False',
  'DatasetConfig.use_cached': 'False',
  'PjitPartitioner.logical_axis_rules': '@partitioning.standard_logical_axis_r',
  'RestoreCheckpointConfig.mode': 'specific',
  'SentencePieceVocabulary.extra_ids': '100',
  'USE_CACHED_TASKS': 'False',
  'VOCABULARY': '@seqio.SentencePieceVocabulary',
  'decode_fn': '@decoding.temperature_sample',
  'infer.dataset_cfg': '@utils.DatasetConfig()',
  'infer.merge_chunked_results': 'True',
  'infer.model': '%MODEL',
  'infer.output_dir': '%INFER_OUTPUT_DIR',
  'infer.partitioner': '@partitioning.PjitPartitioner()',
  'infer.restore_checkpoint_cfg': '@utils.RestoreCheckpointConfig()',
}
# Scopes of T5X's training runs: a binding in one does not concern `infer`.
_TRAINING = ('train', 'train_eval', 'infer_eval')


def stand_in(name: str) -> str | None:
  """Returns the text that stands for a gin file of T5X, None if the file can be
  read as a user's; ValueError for one that nothing stands for."""
  match = _FILE.fullmatch(name)
  if match is None:
    return None
  folder, stem = match.groups()
  if (folder, stem) == ('t5x/configs/runs/', 'infer'):
    return _INFER
  if folder in _FAMILIES:
    family, vocabulary = _FAMILIES[folder]
    name = f'{family}_{stem.lower()}'
    presets.preset(name)  # Raises for sizes that are not known.
    path = f'gs://t5-data/vocabs/{vocabulary}/sentencepiece.model'
    return f"MODEL = '{name}'\nVOCABULARY = '{path}'\n"
  if folder.endswith('/examples/'):
    return None  # A run that includes some of the others.
  raise ValueError(
    f'{name} configures T5X itself: runs have runs/infer.gin, and sizes MODEL, '
    'a name of models/presets.py or a model.json, with --model=as_stored'
  )


def translate(text: str) -> str:
  """Returns a gin file with names of this package if it configures T5X, else as
  it is."""
  if not re.search(r'^(from|import) (t5x|__main__)\b', text, re.MULTILINE):
    return text
  # Such a file states everything that T5X's own infer.gin does.
  run = _INFER if re.search(r'\bdataset_cfg\b', text) else ''
  return _HEADER + run + ''.join(f'{line}\n' for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
  """Yields the statements of a file, one per line, with names of this
  package."""
  parser = require('gin.config_parser', extra='infer', purpose='a gin file')

  class AsWritten(parser.ParserDelegate):  # type: ignore[name-defined]
    def configurable_reference(self, name: str, evaluate: bool) -> str:
      return _Reference(f'@{name}{"()" * evaluate}')

    def macro(self, name: str) -> str:
      return _Reference(f'%{name}')

  for statement in parser.ConfigParser(text, AsWritten()):
    if isinstance(statement, parser.IncludeStatement):
      yield f'include {statement.filename!r}'
    elif isinstance(statement, parser.ImportStatement):
      if statement.module.split('.')[0] not in _FOREIGN:
        yield statement.format()
    elif isinstance(statement, parser.BindingStatement):
      name = '/'.join(filter(None, (statement.scope, statement.selector)))
      name = '.'.join(filter(None, (name, statement.arg_name)))
      yield from rename([f'{name} = {statement.value!r}'])


class _Reference(str):
  """A text that is shown without quotes."""

  __slots__ = ()
  __repr__ = str.__str__


def rename(bindings: Sequence[str]) -> list[str]:
  """Returns bindings with names of this package, without those that change
  nothing here. gin refuses what is still T5X's."""
  renamed = map(_renamed, bindings)
  return [binding for binding in renamed if binding]


def _renamed(binding: str) -> str:
  """Returns one binding; empty if it changes nothing here."""
  name, _, value = (part.strip() for part in binding.partition('='))
  scope, _, selector = name.rpartition('/')
  if scope in _TRAINING:
    return binding
  # Of `utils.DatasetConfig.pack`: itself, `DatasetConfig.pack`, `pack`, and
  # then `pack.`, `DatasetConfig.`, `utils.`.
  parts = selector.split('.')
  ends = ['.'.join(parts[i:]) for i in range(len(parts))]
  plain = value.strip('\'"')
  for end in (*ends, *(f'{part}.' for part in reversed(parts))):
    is_as_here = end in _AS_HERE and plain.startswith(_AS_HERE[end])
    if end in _IDLE or is_as_here or value == f'%{_RENAMED.get(end)}':
      return ''
    if end in _MODULES:
      return '' if plain.startswith(('%', 'None')) else f'import {plain}'
    if end in _RENAMED:
      is_no_limit = end in _LIMITS and value in ('0', '0.0')
      return f'{_RENAMED[end]} = {None if is_no_limit else value}'
  return re.sub(r'^infer_script\b', 'infer', binding)


# `FILES` only translates files, for training. It renames no binding:
# DROPOUT_RATE and others, which change nothing in `infer`, are macros of our
# own there.
FILES = Dialect(stand_in=stand_in, translate=translate)
DIALECT = FILES._replace(rename=rename)
