"""What `t5x.infer` is told, in the words of this package.

T5X's gin files configure T5X itself: ours stand for those of its sizes and of
its `infer`, and what is bound for T5X, on the command line or in a user's file,
is bound to what does it here. What has no counterpart is refused in a sentence
that says what to write instead.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from specdec_jax.files.require import require
from specdec_jax.models import presets

_FILE = re.compile(
  r'(?:.*/)?(t5x/(?:configs|contrib|examples)/(?:\w+/)*)(\w+)\.gin'
)
_CC_ALL = 'cc_all.32000.100extra'
_MC4 = 'mc4.250000.100extra'
# Folders of its sizes: how ours are called, and their vocabulary.
_FAMILIES = {
  't5x/examples/t5/t5_1_0/': ('t5_1_0', _CC_ALL),
  't5x/examples/t5/t5_1_1/': ('t5_1_1', _CC_ALL),
  't5x/examples/t5/mt5/': ('mt5', _MC4),
  't5x/examples/scalable_t5/t5_1_1/': ('scalable_t5_1_1', _CC_ALL),
  't5x/examples/scalable_t5/mt5/': ('scalable_mt5', _MC4),
}
# What a gin file imports that configures T5X, and what it then needs of ours.
_FOREIGN = ('__gin__', '__main__', 't5x', 'seqio', 'flaxformer')
_HEADER = """\
from __gin__ import dynamic_registration
from specdec_jax.infer import decoding
from specdec_jax.infer import infer
from specdec_jax.text import tasks
from specdec_jax.sharding import mesh
"""
_INFER = "include 'gin_configs/runs/infer.gin'\n"

# Ends of names that T5X's users bind, and what is bound here. Elsewhere in this
# file a name with a dot at its end stands for all that begins so.
_RENAMED = {
  'DatasetConfig.batch_size': 'decoding.Decoding.batch_size',
  'DatasetConfig.mixture_or_task_name': 'MIXTURE_OR_TASK_NAME',
  'DatasetConfig.split': 'tasks.find.split',
  'DatasetConfig.task_feature_lengths': 'TASK_FEATURE_LENGTHS',
  'PjitPartitioner.num_partitions': 'mesh.device_mesh.num_partitions',
  'RestoreCheckpointConfig.dtype': 'DTYPE',
  'RestoreCheckpointConfig.path': 'CHECKPOINT_PATH',
  'SentencePieceVocabulary.sentencepiece_model_file': 'VOCABULARY',
  'T5Config.dtype': 'DTYPE',
  'TransformerConfig.dtype': 'DTYPE',
  'beam_search.alpha': 'decoding.Decoding.alpha',
  'temperature_sample.temperature': 'decoding.Decoding.temperature',
  'temperature_sample.topk': 'decoding.Decoding.top_k',
  'temperature_sample.topp': 'decoding.Decoding.top_p',
} | {
  f'{place}.{name}': f'{here}.{name}'
  for place, here, names in (
    ('DecoderParams', 'decoding.Decoding', 'num_decodes return_all_decodes'),
    ('PjitPartitioner', 'mesh.device_mesh', 'model_parallel_submesh'),
    (
      'predict_batch_with_aux',
      'decoding.Decoding',
      'num_decodes return_all_decodes',
    ),
  )
  for name in names.split()
}
_MODULES = ('DatasetConfig.module', 'MIXTURE_OR_TASK_MODULE')
# Bindings that change nothing here: whatever they say, or if they say this.
_IDLE = {
  'Adafactor.': '',
  'CheckpointConfig.': '',
  'DROPOUT_RATE': '',
  'DatasetConfig.pack': 'False',
  'DatasetConfig.seed': '',
  'DatasetConfig.shuffle': 'False',
  'DatasetConfig.use_cached': 'False',
  'LABEL_SMOOTHING': '',
  'LOSS_NORMALIZING_FACTOR': '',
  'OPTIMIZER': '',
  'PjitPartitioner.logical_axis_rules': '@partitioning.standard_logical_axis_r',
  'RestoreCheckpointConfig.mode': 'specific',
  'RestoreCheckpointConfig.strict': '',
  'SaveCheckpointConfig.': '',
  'SentencePieceVocabulary.extra_ids': '100',
  'T5Config.dropout_rate': '',
  'Trainer.': '',
  'TransformerConfig.dropout_rate': '',
  'USE_CACHED_TASKS': 'False',
  'VOCABULARY': '@seqio.SentencePieceVocabulary',
  'Z_LOSS': '',
  'create_learning_rate_scheduler.': '',
  'decode_fn': '@decoding.temperature_sample',
  'infer.checkpoint_ds_iter': '',
  'infer.dataset_cfg': '@utils.DatasetConfig()',
  'infer.merge_chunked_results': 'True',
  'infer.model': '%MODEL',
  'infer.output_dir': '%INFER_OUTPUT_DIR',
  'infer.partitioner': '@partitioning.PjitPartitioner()',
  'infer.restore_checkpoint_cfg': '@utils.RestoreCheckpointConfig()',
  'infer.use_orbax': '',
  **dict.fromkeys(_MODULES, 'None'),
  **dict.fromkeys(
    [
      f'{model}.{name}'
      for model in ('DecoderOnlyModel', 'EncoderDecoderModel')
      for name in (
        *('label_smoothing', 'loss_normalizing_factor', 'optimizer_def'),
        'z_loss',
      )
    ],
    '',
  ),
}
_SIZES = (
  'sizes are those that MODEL names, of models/presets.py or a model.json: '
  'give --model=as_stored and --gin.MODEL=\'"DIR/model.json"\''
)
# Scopes of T5X's runs that train.
_TRAINING = ('train', 'train_eval', 'infer_eval')
_RUNS = 'there are runs/infer.gin for infer and runs/train_task.gin for train'
_JUDGED = 'decode with runs/infer.gin, and give specdec eval what it writes'
_EXPORTED = 'no SavedModel is written; specdec convert writes checkpoints'
_COMPILED = (
  'programs are compiled when a run begins, and kept for the next; specdec '
  'plan --topology compiles without the chips'
)
_UMT5 = (
  'its sizes are umt5_small to umt5_xxl: give --model=as_stored, '
  '--gin.MODEL=\'"umt5_base"\' and its SentencePiece model as VOCABULARY'
)
_AS_TEXT = (
  'write the examples to a .jsonl file and name it in MIXTURE_OR_TASK_NAME, '
  'with --gin_file=runs/infer.gin'
)
_AS_THEY_ARE = (
  'tasks are read from their source, in order, an example a row: leave it out'
)
_BEAMS = (
  'beam search has Decoding.num_decodes, Decoding.alpha and '
  'Decoding.return_all_decodes'
)
_AXES = (
  "arrays are split by T5X's standard rules over device_mesh: leave it out"
)
_WORDS = (
  'a vocabulary is a file: name the SentencePiece model in VOCABULARY, and its '
  'sentinels, if they are not 100, in a tokenizer_config.json beside it, as '
  '{"extra_ids": N}'
)
_SAMPLING = 'sampling has Decoding.temperature, top_k, top_p and num_samples'
_FIELDS = 'leave it out, and bind what is to be changed: '
# What to do instead of T5X's other runs.
_INSTEAD_OF_RUNS = {
  'eval': _JUDGED,
  'export': _EXPORTED,
  'export_seqio': _EXPORTED,
  'infer_from_tfexample_file': _AS_TEXT,
  'precompile': _COMPILED,
}
# What to do instead of the others.
_INSTEAD = {
  'DatasetConfig.': _AS_THEY_ARE,
  'DecoderOnlyModel.': _SIZES,
  'DecoderWrapper.': _SIZES,
  'EncoderDecoderModel.': _SIZES,
  'FEATURE_LENGTHS': _AS_TEXT,
  'PjitPartitioner.': _AXES,
  'RestoreCheckpointConfig.': 'one checkpoint is read, under the names that it '
  'has: name it in CHECKPOINT_PATH, and leave this out',
  'T5Config.': _SIZES,
  'TF_EXAMPLE_FILE_PATHS': _AS_TEXT,
  'TF_EXAMPLE_FILE_TYPE': _AS_TEXT,
  'Transformer.': _SIZES,
  'TransformerConfig.': _SIZES,
  'USE_CACHED_TASKS': _AS_THEY_ARE,
  'beam_search.': _BEAMS,
  'create_task_from_tfexample_file.': _AS_TEXT,
  'decode_fn': f'{_BEAMS}; {_SAMPLING}',
  'evaluate.': _JUDGED,
  'infer.dataset_cfg': f'{_FIELDS}find.split, Decoding.batch_size',
  'infer.partitioner': f'{_FIELDS}device_mesh.num_partitions',
  'infer.restore_checkpoint_cfg': f'{_FIELDS}CHECKPOINT_PATH, DTYPE',
  'predict_batch_with_aux.': f'{_BEAMS}; the plug-in for T5X has the rest',
  'seqio.': _WORDS,
  'standard_logical_axis_rules.': _AXES,
  'temperature_sample.': _SAMPLING,
  'train.': _RUNS,
  **dict.fromkeys(
    [
      f'infer.{name}'
      for name in (
        *('fallback_init_rng', 'file_extension', 'keep_aux_as_numpy'),
        *('merge_chunked_results', 'merge_fn', 'output_vocab_feature_name'),
        *('summarize_config_fn', 'train_state_initializer_cls'),
        *('verify_matching_vocabs_fn', 'write_fn'),
      )
    ],
    'results are written in one way, as T5X does unless told otherwise: leave '
    'it out',
  ),
}
# What references name that nothing here stands for.
_FOREIGN_VALUES = {'@models.': _SIZES, '@seqio.': _WORDS}
_SAID = 'all that is said goes to standard error: leave it out'
# Flags of absl, jax and fiddle, which T5X's scripts have as well.
_FLAGS = {
  r'--(no)?(also)?logtostderr|--(v|verbosity|log_dir|logger_levels)': _SAID,
  r'--stderrthreshold': _SAID,
  r'--jax_\w+': (
    "jax's options are variables of the environment, such as JAX_PLATFORMS=cpu"
  ),
  r'--(fdl\w*|fiddle_config|config)': (
    'nothing reads Fiddle here: give gin files and --gin.NAME=VALUE'
  ),
  r'--(run_with_pdb|pdb_post_mortem)': (
    'SPECDEC_TRACEBACK=1 in the environment shows where an error comes from'
  ),
  r'--(run_with_profiling|profile_file|use_cprofile_for_profiling)': (
    'write --profile=DIR'
  ),
  r'--(flagfile|undefok|only_check_args)': (
    'write the flags themselves; --dry_run checks them'
  ),
  r'--run_mode': 'the command says it, as in specdec infer: leave it out',
  r'--seqio_additional_cache_dirs': (
    'tasks are read from their source: leave it out'
  ),
  r'--gin_(file|bindings|search_paths)': 'gin files are for infer and train',
  r'--help(full|short|xml)': 'write --help',
  r'-\w\w+': 'write two dashes, --NAME',
  r'--multiprocess_gpu': 'write --multiprocess',
}


def text_of(name: str) -> str | None:
  """What stands for a gin file of T5X, None if it is none of those, or can be
  read as a user's; ValueError for one that nothing stands for."""
  if not (found := _FILE.fullmatch(name)):
    return None
  folder, stem = found.groups()
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
  hint = _RUNS if '/runs/' in folder else _SIZES
  hint = _UMT5 if '/umt5/' in folder else hint
  raise ValueError(
    f'{name} configures T5X itself: {_INSTEAD_OF_RUNS.get(stem, hint)}'
  )


def renewed_file(text: str) -> str:
  """A gin file with names of this package, if it configures T5X; raises as
  `renewed`."""
  if not re.search(r'^(from|import) (t5x|__main__)\b', text, re.MULTILINE):
    return text
  # Such a file states all that T5X's own one does.
  run = _INFER if re.search(r'\bdataset_cfg\b', text) else ''
  return _HEADER + run + ''.join(f'{line}\n' for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
  """The statements of a file, each on a line, with names of this package."""
  parser = require('gin.config_parser', extra='infer', purpose='a gin file')

  class AsWritten(parser.ParserDelegate):  # type: ignore[name-defined]
    def configurable_reference(self, name: str, evaluate: bool) -> Any:
      return _Reference(f'@{name}{"()" * evaluate}')

    def macro(self, name: str) -> Any:
      return _Reference(f'%{name}')

  for each in parser.ConfigParser(text, AsWritten()):
    if isinstance(each, parser.IncludeStatement):
      yield f'include {each.filename!r}'
    elif isinstance(each, parser.ImportStatement):
      if each.module.split('.')[0] not in _FOREIGN:
        yield each.format()
    elif isinstance(each, parser.BindingStatement):
      name = '/'.join(filter(None, (each.scope, each.selector)))
      name = '.'.join(filter(None, (name, each.arg_name)))
      yield from renewed([f'{name} = {each.value!r}'])


class _Reference(str):
  """A text that is shown without quotes."""

  __slots__ = ()
  __repr__ = str.__str__


def renewed(bindings: Sequence[str]) -> list[str]:
  """Bindings with names of this package; ValueError for one of T5X's that has
  no counterpart."""
  return [new for each in bindings if (new := _renewed(each))]


def _renewed(binding: str) -> str:
  """One binding; empty if it changes nothing here."""
  name, _, value = (part.strip() for part in binding.partition('='))
  scope, _, selector = name.rpartition('/')
  if scope in _TRAINING:
    raise ValueError(f'gin: {name} = {value}: {_RUNS}')
  parts = selector.split('.')
  ends = ['.'.join(parts[i:]) for i in range(len(parts))]
  # Narrow names come before those that stand for many.
  names = [*ends, *(f'{part}.' for part in reversed(parts))]
  plain = value.strip('\'"')
  for end in names:
    if end in _IDLE and plain.startswith(_IDLE[end]):
      return ''
    if end in _MODULES:
      return '' if plain.startswith('%') else f'import {plain}'
    if end in _RENAMED:
      if value == f'%{_RENAMED[end]}':
        return ''
      is_no_limit = '.top' in end and value in ('0', '0.0')
      return f'{_RENAMED[end]} = {None if is_no_limit else value}'
    if end in _INSTEAD:
      raise ValueError(f'gin: {name} = {value}: {_INSTEAD[end]}')
  for start, hint in _FOREIGN_VALUES.items():
    if plain.startswith(start):
      raise ValueError(f'gin: {name} = {value}: {hint}')
  return re.sub(r'^infer_script\b', 'infer', binding)


def flag_hint(flag: str) -> str | None:
  """What to do instead of a flag that T5X's scripts take from absl, jax or
  fiddle; None for others."""
  name = flag.partition('=')[0]
  hints = (hint for key, hint in _FLAGS.items() if re.fullmatch(key, name))
  return next(hints, None)
