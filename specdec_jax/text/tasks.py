"""Tasks: named sources of examples, in text.

A task is a file of text, or a SeqIO task under the name that T5's users know
it by. Either way it yields text, and the model's own vocabulary makes tokens of
it; a SeqIO task that was registered elsewhere may bring its tokens along.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_jax.files import text_lines
from specdec_jax.files.paths import user_path
from specdec_jax.files.require import require
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.text import prompts
from specdec_jax.text.prompts import Dialogue

SUFFIXES = ('.jsonl', '.tsv', '.txt')
_PRETOKENIZED = '_pretokenized'

# As SeqIO's: `(targets, predictions)`, texts, to figures by name.
MetricFn = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One example of a task: the text that a model reads, or the messages that it
  answers and the last of them; the reference; the tokens of both, where the
  task fixes them; and, as JSON, the settings of this example alone."""

  inputs: str
  targets: str | None = None
  input_ids: tuple[int, ...] | None = None
  target_ids: tuple[int, ...] | None = None
  dialogue: Dialogue | None = None
  settings: str = '{}'

  def fields(self) -> dict[str, str]:
    """Returns the texts by name, as T5X writes them beside a prediction."""
    fields = {'inputs' + _PRETOKENIZED: self.inputs}
    if self.targets is not None:
      fields['targets' + _PRETOKENIZED] = self.targets
    return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A named source of examples: `read` yields them, in the same order every
  time, `metric_fns` judge predictions, and `settings_fields` names the settings
  that examples may have of their own."""

  name: str
  read: Callable[[], Iterator[Example]]
  metric_fns: tuple[MetricFn, ...] = ()
  settings_fields: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsTask:
  """A data set of TFDS as a task.

  Attributes:
    tfds_name: its name and version.
    inputs: the feature to read; None for an unconditional language model.
    targets: the feature to write.
    prefix: T5's prefix of the inputs.
    metrics: names of metrics.
  """

  tfds_name: str
  inputs: str | None
  targets: str
  prefix: str = ''
  metrics: tuple[str, ...] = ()


# As `t5.data.tasks` defines them
# (https://github.com/google-research/text-to-text-transfer-transformer), with
# the version of CNN/Daily Mail that TFDS still prepares.
TFDS_TASKS = {
  'wmt_t2t_ende_v003': TfdsTask(
    tfds_name='wmt_t2t_translate/de-en:1.0.0',
    inputs='en',
    targets='de',
    prefix='translate English to German: ',
    metrics=('bleu',),
  ),
  'cnn_dailymail_v002': TfdsTask(
    tfds_name='cnn_dailymail:3.4.0',
    inputs='article',
    targets='highlights',
    prefix='summarize: ',
    metrics=('rouge',),
  ),
  'lm1b': TfdsTask(tfds_name='lm1b:1.1.0', inputs=None, targets='text'),
}


def find(
  name: str,
  *,
  split: str | None = 'test',
  data_dir: str | None = None,
  inputs_field: str = 'inputs',
  targets_field: str = 'targets',
  prefix: str = '',
  chat: bool = False,
  system: str | None = None,
  chat_template_kwargs: Mapping[str, Any] | None = None,
  settings_fields: Sequence[str] = (),
  lengths: Mapping[str, int] | None = None,
  metric_fns: Mapping[str, MetricFn] | None = None,
) -> Task:
  """Returns the task of a name.

  Args:
    name: a path that ends in .jsonl, .tsv or .txt; or a name of `TFDS_TASKS` or
      of SeqIO's registry.
    split: of a SeqIO task; None if it is not going to be read.
    data_dir: the directory of TFDS for the data sets of SeqIO tasks.
    inputs_field: the key of inputs in a .jsonl.
    targets_field: the key of targets there, which a line may lack.
    prefix: prepended to every text of a file.
    chat: passes every text of a file as a user message to the chat template.
      Lines of a .jsonl with "messages", and perhaps "tools", instead of
      `inputs_field` always use it.
    system: the system message, before those of every dialogue.
    chat_template_kwargs: variables of the chat template by name, such as
      `enable_thinking`; a line of a .jsonl may have its own under this key.
    settings_fields: keys in a .jsonl, or features of SeqIO, with settings of
      the single example, such as `regex`.
    lengths: maximum tokens of `inputs` and `targets`, for preprocessors of a
      SeqIO task such as `append_eos_after_trim`.
    metric_fns: by name; a task of `TFDS_TASKS` uses those that it names, a file
      all.

  Raises ValueError for an unknown task, with similar names, and for chat or a
  prefix with a task of SeqIO; ImportError if seqio is needed and not installed.
  """
  metric_fns = metric_fns or {}
  if Path(name).suffix in SUFFIXES:
    path = user_path(name)
    if not path.is_file():
      raise ValueError(f'there is no file {path}')
    if settings_fields and path.suffix != '.jsonl':
      raise ValueError(f'settings_fields need a .jsonl file, not {path}')
    fields = inputs_field, targets_field, settings_fields
    variables = chat_template_kwargs or {}
    prompts.check_template_kwargs(variables, 'find')
    read = functools.partial(
      _read_file, path, fields, prefix, chat, system, variables
    )
    name = path.stem
    task_metrics = tuple(metric_fns.values())
  elif chat or system is not None or chat_template_kwargs or prefix:
    raise ValueError(
      'chat, system, chat_template_kwargs and prefix are for files, not for '
      f'{name!r}'
    )
  else:
    source = _seqio_source(name, split, data_dir, metric_fns)
    task_metrics = tuple(getattr(source, 'metric_fns', ()))
    read = functools.partial(
      _read_seqio, source, split, settings_fields, lengths
    )
  return Task(
    name=name,
    read=read,
    metric_fns=task_metrics,
    settings_fields=settings_fields,
  )


def _read_file(
  path: Path,
  fields: tuple[str, str, Sequence[str]],
  prefix: str,
  chat: bool,
  system: str | None,
  template_kwargs: Mapping[str, Any],
) -> Iterator[Example]:
  """Yields the examples of a file; columns are inputs, tab, targets."""
  begin = [] if system is None else [{'role': 'system', 'content': system}]
  is_empty = True
  for inputs, targets, settings in _read_lines(path, prefix, *fields):
    is_empty = False
    dialogue = None
    if chat or isinstance(inputs, Dialogue):
      dialogue = prompts.with_template_kwargs(inputs, template_kwargs)
      dialogue = dataclasses.replace(
        dialogue, messages=[*begin, *dialogue.messages]
      )
    elif begin or template_kwargs:
      name = 'system' if begin else prompts.TEMPLATE_KWARGS
      raise ValueError(f'{name} is for chat, and for lines with "messages"')
    yield Example(
      inputs=str(inputs), targets=targets, dialogue=dialogue, settings=settings
    )
  if is_empty:
    raise ValueError(f'{path} has no example')


def _read_lines(
  path: Path,
  prefix: str,
  inputs_field: str,
  targets_field: str,
  settings_fields: Sequence[str],
) -> Iterator[tuple[str | Dialogue, str | None, str]]:
  """Yields the inputs, the targets and the settings of every line."""
  if path.suffix != '.jsonl':
    for _, line in text_lines.read(path):
      text, *rest = line.split('\t', 1) if path.suffix == '.tsv' else [line]
      yield prefix + text, rest[0] if rest else None, '{}'
    return
  for place, record in text_lines.read_objects(path):
    inputs: str | Dialogue
    template_kwargs = record.get(prompts.TEMPLATE_KWARGS)
    if 'messages' in record and inputs_field not in record:
      if prefix:
        raise ValueError('prefix is for texts, and a line has "messages"')
      messages, tools = record['messages'], record.get('tools')
      inputs = prompts.dialogue(messages, tools, place, template_kwargs)
    else:
      inputs = prefix + text_lines.text_under(record, inputs_field, place)
      if template_kwargs is not None:
        prompts.check_template_kwargs(template_kwargs, place)
        inputs = prompts.with_template_kwargs(inputs, template_kwargs)
    targets = None
    if record.get(targets_field) is not None:
      targets = text_lines.text_under(record, targets_field, place)
    yield inputs, targets, _settings_of(record, settings_fields)


def _settings_of(record: Mapping[str, object], names: Sequence[str]) -> str:
  """Returns the features of these names, if present, as JSON."""
  # SeqIO returns numpy values: numbers, lists of them, and texts as bytes, of
  # which an empty one means that there is no value.
  plain = lambda x: x.decode() if isinstance(x, bytes) else x.tolist()
  settings = {}
  for name in names:
    value = record.get(name)
    is_empty = isinstance(value, bytes) and not value
    if value is not None and not is_empty:
      settings[name] = value
  return json.dumps(settings, default=plain)


def _seqio_source(
  name: str,
  split: str | None,
  data_dir: str | None,
  metric_fns: Mapping[str, MetricFn],
) -> Any:
  """Returns a task or mixture of SeqIO's registry, or of `TFDS_TASKS`."""
  path = f'a path that ends in {", ".join(SUFFIXES)}'
  try:
    seqio = _import_seqio()
  except ImportError as error:
    if name in TFDS_TASKS:
      raise
    raise ValueError(
      f'no task is called {name!r}: pass {path}, or, with seqio installed, a '
      f'task that is registered with it{_near(name, list(TFDS_TASKS))}'
    ) from error
  _register(seqio, metric_fns)
  names = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
  if name not in names:
    raise ValueError(
      f'no task is called {name!r}: pass {path}, or one of SeqIO'
      f'{_near(name, names)}'
    )
  if data_dir:
    seqio.set_tfds_data_dir_override(data_dir)
  source = seqio.get_mixture_or_task(name)
  is_task = name in seqio.TaskRegistry.names()
  if split and is_task and split not in source.splits:
    raise ValueError(
      f'task {name} has no split {split!r}; it has {", ".join(source.splits)}'
    )
  return source


def _register(seqio: Any, metric_fns: Mapping[str, MetricFn]) -> None:
  """Registers the tasks of `TFDS_TASKS` with SeqIO, with features of text."""
  import tensorflow as tf

  def to_text(dataset: Any, task: TfdsTask) -> Any:
    def convert(example: Mapping[str, Any]) -> dict[str, Any]:
      inputs = tf.constant('')
      if task.inputs is not None:
        inputs = tf.strings.join([task.prefix, example[task.inputs]])
      return {'inputs': inputs, 'targets': example[task.targets]}

    return dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE)

  words = seqio.PassThroughVocabulary(size=1)
  feature = seqio.Feature(words, add_eos=False, dtype=tf.string, rank=0)
  for name in sorted(TFDS_TASKS.keys() - set(seqio.TaskRegistry.names())):
    task = TFDS_TASKS[name]
    seqio.TaskRegistry.add(
      name,
      source=seqio.TfdsDataSource(tfds_name=task.tfds_name),
      preprocessors=[functools.partial(to_text, task=task)],
      output_features={'inputs': feature, 'targets': feature},
      metric_fns=[metric_fns[m] for m in task.metrics if m in metric_fns],
    )


def _read_seqio(
  source: Any,
  split: str | None,
  settings_fields: Sequence[str],
  lengths: Mapping[str, int] | None,
) -> Iterator[Example]:
  """Yields examples as the preprocessors return them, without SeqIO's trimming,
  so that their lengths can be counted."""
  dataset = source.get_dataset(
    sequence_length=lengths,
    split=split,
    shuffle=False,
    use_cached=False,
    trim_output_features=False,
  )
  for record in dataset.as_numpy_iterator():
    yield Example(
      inputs=_text_of(record, 'inputs') or '',
      targets=_text_of(record, 'targets'),
      input_ids=_ids_of(record.get('inputs')),
      target_ids=_ids_of(record.get('targets')),
      settings=_settings_of(record, settings_fields),
    )


# Features are text, or tokens, beside which SeqIO has the text: {'inputs': [37,
# 1], 'inputs_pretokenized': b'the'}.
def _text_of(record: Mapping[str, object], name: str) -> str | None:
  value = record.get(name + _PRETOKENIZED, record.get(name))
  return value.decode() if isinstance(value, bytes) else None


def _ids_of(feature: Any) -> tuple[int, ...] | None:
  is_list = getattr(feature, 'ndim', 0) == 1
  return tuple(map(int, feature)) if is_list else None


def _near(name: str, names: list[str]) -> str:
  near = did_you_mean(name, names, most=5, cutoff=0.4)
  return near or f'; known: {", ".join(names)}'


def _import_seqio() -> Any:
  seqio = require(
    'seqio', extra='data', purpose='a SeqIO task, unlike text and JSONL files,'
  )
  import tensorflow as tf

  with contextlib.suppress(RuntimeError):  # TensorFlow already uses them.
    # Otherwise TensorFlow takes the memory of the GPUs that JAX decodes on.
    tf.config.set_visible_devices([], 'GPU')
  return seqio
