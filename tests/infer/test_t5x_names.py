"""What `t5x.infer` is told runs here, or is refused with what to write."""

import json

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.assembly import t5x_names as names
from specdec_jax.checkpoints import model_file
from specdec_jax.launch import gin_launch
from specdec_jax.text import vocabulary_files
from tests.checkpoints import tiny_t5
from tests.cli import tiny
from tests.infer import infer_runs

# Everything that `t5x/configs/runs/infer.gin` binds, and what T5X's users bind
# beside it: the binding here, None for one that changes nothing.
BINDINGS = {
  'BATCH_SIZE = 4': 'BATCH_SIZE = 4',
  'DROPOUT_RATE = 0.0': None,
  'LABEL_SMOOTHING = 0.0': None,
  'LOSS_NORMALIZING_FACTOR = None': None,
  'MIXTURE_OR_TASK_MODULE = None': None,
  'MIXTURE_OR_TASK_MODULE = "json.decoder"': 'import json.decoder',
  'MIXTURE_OR_TASK_NAME = "t"': 'MIXTURE_OR_TASK_NAME = "t"',
  'OPTIMIZER = @adafactor.Adafactor()': None,
  'VOCABULARY = @seqio.SentencePieceVocabulary()': None,
  'USE_CACHED_TASKS = False': None,
  'Z_LOSS = 0.0': None,
  'adafactor.Adafactor.decay_rate = 0.8': None,
  'decoding.beam_search.alpha = 1.0': 'decoding.Decoding.alpha = 1.0',
  'infer.checkpoint_ds_iter = False': None,
  'infer.checkpoint_period = 3': 'infer.checkpoint_period = 3',
  'infer.merge_chunked_results = True': None,
  'infer.mode = "score"': 'infer.mode = "score"',
  'infer.num_shards = 2': 'infer.num_shards = 2',
  'infer.shard_id = 1': 'infer.shard_id = 1',
  'infer.use_orbax = False': None,
  'models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample': None,
  'models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4': (
    'decoding.Decoding.num_decodes = 4'
  ),
  'models.EncoderDecoderModel.z_loss = 0.0': None,
  'network.T5Config.dropout_rate = 0.1': None,
  'network.T5Config.dtype = "float32"': 'DTYPE = "float32"',
  'partitioning.PjitPartitioner.num_partitions = 2': (
    'mesh.device_mesh.num_partitions = 2'
  ),
  'partitioning.PjitPartitioner.logical_axis_rules = '
  '@partitioning.standard_logical_axis_rules()': None,
  'PjitPartitioner.model_parallel_submesh = (2, 2, 1, 1)': (
    'mesh.device_mesh.model_parallel_submesh = (2, 2, 1, 1)'
  ),
  'predict_batch_with_aux.return_all_decodes = True': (
    'decoding.Decoding.return_all_decodes = True'
  ),
  'seqio.SentencePieceVocabulary.sentencepiece_model_file = "a"': (
    'VOCABULARY = "a"'
  ),
  'temperature_sample.temperature = 0.5': (
    'decoding.Decoding.temperature = 0.5'
  ),
  'temperature_sample.topk = 0': 'decoding.Decoding.top_k = None',
  'temperature_sample.topk = 40': 'decoding.Decoding.top_k = 40',
  'temperature_sample.topp = 0.9': 'decoding.Decoding.top_p = 0.9',
  'utils.DatasetConfig.batch_size = 4': 'decoding.Decoding.batch_size = 4',
  'utils.DatasetConfig.mixture_or_task_name = "t"': (
    'MIXTURE_OR_TASK_NAME = "t"'
  ),
  'utils.DatasetConfig.module = None': None,
  'utils.DatasetConfig.pack = False': None,
  'utils.DatasetConfig.seed = 0': None,
  'utils.DatasetConfig.shuffle = False': None,
  'utils.DatasetConfig.split = "dev"': 'tasks.find.split = "dev"',
  "utils.DatasetConfig.task_feature_lengths = {'inputs': 4}": (
    "TASK_FEATURE_LENGTHS = {'inputs': 4}"
  ),
  'utils.DatasetConfig.use_cached = False': None,
  'utils.RestoreCheckpointConfig.dtype = "float32"': 'DTYPE = "float32"',
  'utils.RestoreCheckpointConfig.mode = "specific"': None,
  'utils.RestoreCheckpointConfig.path = "c"': 'CHECKPOINT_PATH = "c"',
  'utils.RestoreCheckpointConfig.strict = False': None,
  # What a file states that takes the place of T5X's `infer.gin`.
  'infer_script.infer.model = %MODEL': None,
  'infer_script.infer.dataset_cfg = @utils.DatasetConfig()': None,
  'infer_script.infer.output_dir = %INFER_OUTPUT_DIR': None,
  'utils.DatasetConfig.module = %MIXTURE_OR_TASK_MODULE': None,
  'utils.DatasetConfig.mixture_or_task_name = %MIXTURE_OR_TASK_NAME': None,
  'utils.RestoreCheckpointConfig.path = %CHECKPOINT_PATH': None,
  # And what one for training as well has.
  'seqio.SentencePieceVocabulary.extra_ids = 100': None,
  'trainer.Trainer.num_microbatches = 4': None,
  'utils.SaveCheckpointConfig.period = 100': None,
}
# And what gin refuses.
REFUSED = [
  'FEATURE_LENGTHS = {}',
  'MODEL = @models.EncoderDecoderModel()',
  'TF_EXAMPLE_FILE_TYPE = "tfrecord"',
  'USE_CACHED_TASKS = True',
  'VOCABULARY = @seqio.ByteVocabulary()',
  'create_task_from_tfexample_file.inputs_key = "x"',
  'decoding.beam_search.max_decode_len = 5',
  'eval_script.evaluate.output_dir = %EVAL_OUTPUT_DIR',
  'infer.dataset_cfg = @mine.DatasetConfig()',
  'infer.fallback_init_rng = 0',
  'infer.merge_chunked_results = False',
  'infer.partitioner = @PjitPartitioner()',
  'infer.write_fn = @f',
  'models.DecoderOnlyModel.vocabulary = %VOCABULARY',
  'models.EncoderDecoderModel.decode_fn = @decoding.beam_search',
  'models.EncoderDecoderModel.predict_batch_with_aux.prompt_with_targets = 1',
  'network.T5Config.emb_dim = 64',
  'network.Transformer.config = @network.T5Config()',
  'partitioning.PjitPartitioner.params_on_devices = False',
  'partitioning.standard_logical_axis_rules.activation_partitioning_dims = 2',
  'seqio.SentencePieceVocabulary.extra_ids = 300',
  'temperature_sample.max_decode_steps = 5',
  'train/utils.DatasetConfig.pack = True',
  'train_script.train.eval_period = 500',
  'utils.DatasetConfig.shuffle = True',
  'utils.RestoreCheckpointConfig.assignment_map = ()',
  'utils.RestoreCheckpointConfig.mode = "latest"',
]
OWN = """\
from __gin__ import dynamic_registration

import __main__ as infer_script
import seqio
from t5x import partitioning
from t5x import utils

include 't5x/examples/t5/t5_1_1/small.gin'

seqio.SentencePieceVocabulary.sentencepiece_model_file = '{vocabulary}'
MODEL = '{sizes}'
DROPOUT_RATE = 0.0
TASK_FEATURE_LENGTHS = {{
    'inputs': 12,
    'targets': 16,
}}
MIXTURE_OR_TASK_NAME = %gin.REQUIRED
CHECKPOINT_PATH = %gin.REQUIRED
INFER_OUTPUT_DIR = %gin.REQUIRED
MIXTURE_OR_TASK_MODULE = None
infer_script.infer:
  mode = 'predict'
  model = %MODEL
  output_dir = %INFER_OUTPUT_DIR
  dataset_cfg = @utils.DatasetConfig()
  partitioner = @partitioning.PjitPartitioner()
  restore_checkpoint_cfg = @utils.RestoreCheckpointConfig()
  checkpoint_period = 1
partitioning.PjitPartitioner:
  num_partitions = 1
utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  module = %MIXTURE_OR_TASK_MODULE
  task_feature_lengths = %TASK_FEATURE_LENGTHS
  batch_size = 4
  split = 'test'
utils.RestoreCheckpointConfig:
  path = %CHECKPOINT_PATH
  mode = 'specific'
  dtype = 'float32'
"""

EXAMPLE = """\
from __gin__ import dynamic_registration

import __main__ as infer_script
from json import decoder
from t5x import partitioning
from t5x import utils

include "t5x/examples/scalable_t5/t5_1_1/small.gin"
include "t5x/configs/runs/infer.gin"

DROPOUT_RATE = 0.0
MIXTURE_OR_TASK_NAME = "my_task"
TASK_FEATURE_LENGTHS = {"inputs": 8, "targets": 8}
partitioning.PjitPartitioner.num_partitions = 1
utils.DatasetConfig:
  split = "test"
  batch_size = 16
"""


@pytest.mark.parametrize('binding', BINDINGS)
def test_a_binding_of_t5x(binding):
  here = BINDINGS[binding]
  found = names.rename([binding])
  assert found == ([] if here is None else [here])


@pytest.mark.parametrize('binding', REFUSED)
def test_a_binding_without_a_counterpart(binding):
  required = (
    "MIXTURE_OR_TASK_NAME = 'task.txt'",
    "TASK_FEATURE_LENGTHS = {'inputs': 4, 'targets': 4}",
    "CHECKPOINT_PATH = 'model'",
    "INFER_OUTPUT_DIR = 'out'",
  )
  files = ('models/as_stored.gin', 'runs/infer.gin')
  parse = lambda *bindings: gin_launch.parse(
    gin_launch.Configuration(
      files=files, bindings=bindings, dialect=names.DIALECT
    )
  )
  parse(*required)
  with pytest.raises(ValueError, match=binding.split(' ')[0].split('.')[-1]):
    parse(*required, binding)


def command(tmp_path, *files, **bindings) -> list[str]:
  """As for `t5x.infer`, with its program's name changed."""
  clone = '--gin_search_paths=/home/me/t5x'
  return [
    *('infer', clone, *(f'--gin_file={file}' for file in files)),
    f'--gin.INFER_OUTPUT_DIR="{tmp_path / "out"}"',
    *(f'--gin.{k.replace("__", ".")}={v}' for k, v in bindings.items()),
  ]


def test_t5x_s_own_files_name_their_sizes(run, tmp_path):
  flags = command(
    tmp_path,
    't5x/examples/t5/mt5/small.gin',
    '/home/me/t5x/t5x/configs/runs/infer.gin',
    MIXTURE_OR_TASK_NAME='"my_task"',
    TASK_FEATURE_LENGTHS="{'inputs': 8, 'targets': 8}",
    CHECKPOINT_PATH='"checkpoint_1000000"',
    DROPOUT_RATE=0.0,
    utils__DatasetConfig__batch_size=8,
    PjitPartitioner__num_partitions=1,
    infer__mode='"predict_with_aux"',
  )
  done = run(*flags, '--shard_id=0', '--tfds_data_dir=d', '--dry_run')
  assert done.status == 0, done
  assert 'batch 8' in done.out
  # https://arxiv.org/abs/2010.11934 says 300M, rows of padding apart.
  assert '300,' in done.out


@pytest.mark.parametrize(
  ('file', 'parts'),
  [
    ('t5x/examples/t5/byt5/base.gin', ['T5X itself', 'model.json']),
    ('t5x/examples/t5/t5_1_1/tiny.gin', ["'t5_1_1_tiny'", 't5_1_1_small']),
    ('t5x/configs/runs/eval.gin', ['T5X itself', 'runs/infer.gin']),
  ],
)
def test_files_of_t5x_that_nothing_stands_for(run, tmp_path, file, parts):
  flags = command(
    tmp_path,
    file,
    't5x/configs/runs/infer.gin',
    MIXTURE_OR_TASK_NAME='"my_task"',
    TASK_FEATURE_LENGTHS="{'inputs': 8, 'targets': 8}",
    CHECKPOINT_PATH='"checkpoint_1000000"',
  )
  tiny.assert_refused(run(*flags, '--dry_run'), *parts)


def test_sizes_with_scanned_layers_are_ours():
  name = '/home/me/t5x/t5x/examples/scalable_t5/mt5/XL.gin'
  text = names.stand_in(name)
  assert text.startswith("MODEL = 'scalable_mt5_xl'\n")
  assert 'gs://t5-data/vocabs/mc4.' in text


def test_a_run_among_the_examples_of_t5x(run, tmp_path):
  """It includes T5X's own files, and is found where the user has T5X."""
  name = 't5x/examples/t5/t5_1_1/examples/my_infer.gin'
  file = tmp_path / 'clone' / name
  file.parent.mkdir(parents=True)
  file.write_text(EXAMPLE, 'utf-8')
  flags = command(tmp_path, name, CHECKPOINT_PATH='"checkpoint_1000000"')
  flags += [f'--gin_search_paths={tmp_path / "clone"}', '--dry_run']
  done = run(*flags)
  assert done.status == 0, done
  assert 'batch 16' in done.out


def test_a_file_that_configures_t5x(run, tmp_path):
  """A T5X user's own file, in the place of `infer.gin`, and command; and the
  same in our own words."""
  folder = tiny_t5.write_model(tmp_path / 'model')
  task = tmp_path / 'task.jsonl'
  infer_runs.write_task(task, 6)
  own = tmp_path / 'own.gin'
  sizes = folder / model_file.NAME
  own.write_text(
    OWN.format(vocabulary=folder / vocabulary_files.SENTENCEPIECE, sizes=sizes),
    'utf-8',
  )
  theirs = command(
    tmp_path,
    own,
    MIXTURE_OR_TASK_NAME=f'"{task}"',
    CHECKPOINT_PATH=f'"{folder / "checkpoint_7"}"',
    infer__mode='"predict_with_aux"',
    predict_batch_with_aux__num_decodes=2,
    predict_batch_with_aux__return_all_decodes='True',
  )
  done = run(*theirs, '--gin.device_mesh.num_devices=1')
  assert done.status == 0, done
  ours = infer_runs.argv(
    *(folder, task, tmp_path / 'ours'),
    infer__mode='"predict_with_aux"',
    Decoding__num_decodes=2,
    Decoding__return_all_decodes=True,
    Decoding__batch_size=4,
  )
  assert run(*ours).status == 0
  found, expected = (
    (tmp_path / name / 'task-predict_with_aux.jsonl-00000-of-00001').read_text()
    for name in ('out', 'ours')
  )
  assert found == expected
  assert len(json.loads(found.splitlines()[0])['prediction']) == 2
