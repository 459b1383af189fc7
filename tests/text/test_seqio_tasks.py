"""Tasks of SeqIO: those that T5's users know, and anybody's own.

TFDS reads data sets that are written here in its own format.
"""

import pytest

pytest.importorskip('seqio')
pytest.importorskip('tensorflow_datasets')

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from specdec_jax import lazy
from specdec_jax.text import tasks
from specdec_jax.text.tasks import Example
from tests.checkpoints.tiny_t5 import T5X

pytestmark = pytest.mark.seqio


def write_dataset(data_dir, name, features, examples) -> None:
  """Writes a data set where TFDS looks for it under this name."""
  name, _, version = name.partition(':')
  name, _, config = name.partition('/')
  folder = data_dir / name / config / version
  folder.mkdir(parents=True)
  identity = tfds.core.DatasetIdentity(
    name=name,
    version=tfds.core.Version(version),
    data_dir=str(folder),
    module_name=name,
    config_name=config or None,
  )
  writer = tfds.core.SequentialWriter(
    tfds.core.DatasetInfo(
      builder=identity, features=tfds.features.FeaturesDict(features)
    ),
    max_examples_per_shard=100,
  )
  writer.initialize_splits(['test'])
  writer.add_examples({'test': examples})
  writer.close_all()


TEXT = tfds.features.Text()
DATA = {
  'wmt_t2t_ende_v003': (
    {'en': TEXT, 'de': TEXT},
    [{'en': 'Yes.', 'de': 'Ja.'}, {'en': 'No.', 'de': 'Nein.'}],
    [
      Example(inputs='translate English to German: Yes.', targets='Ja.'),
      Example(inputs='translate English to German: No.', targets='Nein.'),
    ],
    ['bleu'],
  ),
  'cnn_dailymail_v002': (
    {'article': TEXT, 'highlights': TEXT, 'id': TEXT},
    [{'article': 'Long story.', 'highlights': 'Story.', 'id': '1'}],
    [Example(inputs='summarize: Long story.', targets='Story.')],
    ['rouge'],
  ),
  'lm1b': (
    {'text': TEXT},
    [{'text': 'Some words.'}],
    [Example(inputs='', targets='Some words.')],
    [],
  ),
}


@pytest.mark.parametrize('name', tasks.TFDS_TASKS)
def test_tasks_that_t5_users_know(name, tmp_path):
  features, stored, expected, metrics = DATA[name]
  write_dataset(tmp_path, tasks.TFDS_TASKS[name].tfds_name, features, stored)
  # What judges predictions is the extra infer's.
  metric_fns = dict(*lazy.installed('specdec_jax.infer.quality:METRICS'))
  task = tasks.find(name, data_dir=str(tmp_path), metric_fns=metric_fns)
  assert task.name == name
  assert list(task.read()) == expected == list(task.read())
  judges = [metric_fns[metric] for metric in metrics] if metric_fns else []
  assert list(task.metric_fns) == judges
  with pytest.raises(ValueError, match=r"'dev'.*test"):
    tasks.find(name, split='dev')


@seqio.map_over_dataset
def split_at_tab(line):
  parts = tf.strings.split(line, '\t')
  return {'inputs': parts[0], 'targets': parts[1]}


def test_a_task_of_ones_own_brings_its_tokens(tmp_path):
  text = tmp_path / 'text.tsv'
  text.write_text('two dogs\tfive cats\n')
  vocabulary = seqio.SentencePieceVocabulary(str(T5X / 'tiny_sp.model'))
  seqio.TaskRegistry.add(
    'own_task',
    source=seqio.TextLineDataSource({'test': str(text)}),
    preprocessors=[
      split_at_tab,
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos,
    ],
    output_features={
      name: seqio.Feature(vocabulary=vocabulary)
      for name in ('inputs', 'targets')
    },
  )
  (example,) = tasks.find('own_task').read()
  ids = (*vocabulary.encode('two dogs'), 1)
  assert example == Example(
    inputs='two dogs',
    targets='five cats',
    input_ids=ids,
    target_ids=(*vocabulary.encode('five cats'), 1),
  )
  with pytest.raises(ValueError, match='did you mean own_task'):
    tasks.find('own_tusk')


@pytest.mark.parametrize('append', ['append_eos', 'append_eos_after_trim'])
def test_long_inputs_end_as_the_preprocessors_say(append, tmp_path):
  """Of a task's own: what is read, cut to the length, is what SeqIO trims."""
  text = tmp_path / 'text.tsv'
  text.write_text('two dogs\tfive\nfive cats and two dogs and a cat\ttwo\n')
  vocabulary = seqio.SentencePieceVocabulary(str(T5X / 'tiny_sp.model'))
  task = seqio.TaskRegistry.add(
    f'long_{append}',
    source=seqio.TextLineDataSource({'test': str(text)}),
    preprocessors=[
      split_at_tab,
      seqio.preprocessors.tokenize,
      getattr(seqio.preprocessors, append),
    ],
    output_features={
      name: seqio.Feature(vocabulary=vocabulary)
      for name in ('inputs', 'targets')
    },
  )
  lengths = {'inputs': 5, 'targets': 5}
  expected = [
    record['inputs'].tolist()
    for record in task.get_dataset(
      lengths, split='test', shuffle=False
    ).as_numpy_iterator()
  ]
  found = tasks.find(f'long_{append}', lengths=lengths).read()
  assert [list(example.input_ids[:5]) for example in found] == expected
  assert (expected[1][-1] == 1) == (append == 'append_eos_after_trim')
