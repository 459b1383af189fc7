"""Decodes a task to JSONL, under gin: sharded, in chunks, resumable.

A run that was killed resumes when it is started again, and writes the same
bytes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from specdec_jax.assembly import decode_many, models, running
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.drafters import Pool, text_pool
from specdec_jax.files.paths import local_path, user_path
from specdec_jax.files.require import require
from specdec_jax.infer import (
  chunks,
  examples,
  gammas,
  output,
  records,
  strategies,
)
from specdec_jax.infer import decoding as decoding_lib
from specdec_jax.infer.decoding import Decoding, Job
from specdec_jax.infer.marks import Counts, Mark
from specdec_jax.launch import agreement, failures, processes, progress
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text.tasks import Task


def infer(
  *,
  model: models.Model,
  output_dir: str,
  task_feature_lengths: Mapping[str, int],
  find_task: Callable[..., Task],
  decoding: Decoding,
  make_mesh: Callable[[], Mesh] = mesh_lib.device_mesh,
  mode: str = 'predict',
  checkpoint_period: int = 100,
  shard_id: int = 0,
  num_shards: int = 1,
  tfds_data_dir: str | None = None,
  metrics_dir: str | None = None,
  profile_dir: str | None = None,
  dry_run: bool = False,
  measure_gamma: bool = False,
  settings: Callable[[], Mapping[str, str]] = dict,
  operative_config: Callable[[], str] | None = None,
) -> int:
  """Decodes one shard of a task.

  Returns the exit status: 2 if logits were NaN, 75 if several processes were
  asked to end, and did so after a chunk, else 0. ValueError if arguments do not
  fit each other, with the numbers.

  Args:
    model: the target.
    output_dir: the folder of results; see `infer.output`.
    task_feature_lengths: most tokens of `inputs`, and of new ones, `targets`.
    find_task: returns the task, like `text.tasks.find`.
    decoding: how to decode.
    make_mesh: makes the mesh of devices.
    mode: see `decoding.MODES` and `infer.records`.
    checkpoint_period: batches per chunk; a restart skips complete chunks.
    shard_id: decodes the examples whose index is this, modulo `num_shards`.
    num_shards: number of shards.
    tfds_data_dir: the folder of TFDS data sets.
    metrics_dir: the folder of metrics for TensorBoard.
    profile_dir: the folder of a profile of one chunk.
    dry_run: prints memory per chip, and decodes nothing.
    measure_gamma: before decoding, if no gamma is given, decodes the first
      examples (at most 128) with several gammas and chooses the fastest, which
      later runs remember.
    settings: the settings that results depend on, by name; a restart must have
      the same.
    operative_config: returns the text of `config.gin`.
  """
  _check_arguments(checkpoint_period, shard_id, num_shards, profile_dir)
  mesh, folder = make_mesh(), user_path(output_dir)
  with jax.set_mesh(mesh):
    examples.check_lengths(models.read_config(model), task_feature_lengths)
    outline = functools.partial(
      decoding_lib.outline, model, decoding, task_feature_lengths, mode, mesh
    )
    if dry_run:
      return strategies.show_footprint(outline(is_dry_run=True))
    if not output_dir:
      raise ValueError('INFER_OUTPUT_DIR is empty: name a folder for results')
    folders = {'data_dir': tfds_data_dir} if tfds_data_dir else {}
    task = find_task(lengths=dict(task_feature_lengths), **folders)
    job = _with_samplings(outline(), task)
    with progress.waiting('comparing weights with those of earlier runs'):
      digests = job.decoder.digests()
    run = _Run(
      job=job,
      task=task,
      shard=output.Shard(folder, task.name, mode, shard_id, num_shards),
      chunk_size=checkpoint_period * decoding.batch_examples,
      profile_dir=profile_dir,
      metrics_dir=metrics_dir,
      settings={**settings(), **digests},
      operative_config=operative_config,
      measure_gamma=measure_gamma,
    )
    return _decode_shard(run)


def _with_samplings(job: Job, task: Task) -> Job:
  """Returns a job with the samplings of its examples; ValueError if a setting
  of an example is wrong."""
  samplings = examples.samplings(task, job.decoder.sampling)
  job = dataclasses.replace(job, samplings=samplings)
  for sampling in () if job.is_scored else samplings.values():
    sampling.check_has_room("TASK_FEATURE_LENGTHS' targets", job.targets_length)
  if job.is_scored or examples.are_drawn_alike(samplings):
    return job
  reason = 'draws nothing: give examples no temperature of their own'
  job.decoding.refuse('num_decodes', reason=reason)
  return dataclasses.replace(job, decoder=job.decoder.sampled)


def _advise(job: Job, task: Task) -> None:
  """Prints hints: if beams have no drafts, if stop strings are ignored, and if
  a chat model gets texts that are not messages."""
  is_plain = lambda choice: isinstance(choice, NoDrafter)
  needs_hint = is_plain(job.decoder.recipe.drafter) and not is_plain(
    job.decoding.make_drafter()
  )
  if needs_hint:
    _say(
      'beams are searched without drafts, which seldom make them faster: give '
      'gamma to use drafts'
    )
  if job.decoder.stop:
    _say(
      f'the model has stop_strings {[*job.decoder.stop]}, and infer decodes '
      'on behind them: generate ends texts there'
    )
  # Most instruction-tuned models end such texts at once.
  if job.layout.vocabulary.chat_template is not None:
    first = next(task.read(), None)
    if first and first.dialogue is None and first.input_ids is None:
      _say(
        'the model has a chat template, and the texts of this task are given '
        'as they are: --gin.find.chat=True makes messages of them'
      )


def _check_arguments(
  checkpoint_period: int,
  shard_id: int,
  num_shards: int,
  profile_dir: str | None,
) -> None:
  """Raises ValueError for arguments out of range."""
  running.check_count('infer.checkpoint_period', checkpoint_period)
  if num_shards > 99_999:  # Names of files have five digits.
    raise ValueError(f'infer.num_shards is {num_shards}, and at most 99999')
  if not 0 <= shard_id < num_shards:
    raise ValueError(
      f'shard_id {shard_id} is not one of {num_shards} shards, which count '
      'from 0'
    )
  if profile_dir is not None and local_path(profile_dir).is_file():
    raise ValueError(f'--profile {profile_dir} is a file: name a folder')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
  """One shard of a task, and how it is decoded."""

  job: Job
  task: Task
  shard: output.Shard
  chunk_size: int
  profile_dir: str | None
  metrics_dir: str | None
  settings: Mapping[str, str]
  operative_config: Callable[[], str] | None
  measure_gamma: bool

  def rows(self) -> Iterator[examples.Row]:
    """Reads the examples of the shard."""
    shard_id, num_shards = self.shard.shard_id, self.shard.num_shards
    return examples.encode(self.task, self.job.layout, shard_id, num_shards)


def _decode_shard(run: _Run) -> int:
  """Decodes a shard as its only writer, unless it is complete already."""
  # Compared, since the weights, whose digests are settings, may be copies on
  # every host.
  agreement.check_everywhere(run.settings)
  path = run.shard.path
  counts = Counts()

  def is_complete() -> bool:
    nonlocal counts
    mark = output.begin(run.shard, run.settings)
    if mark is None:
      return False
    digest = examples.digest(run.rows())
    output.check_examples(path, mark, digest, place=path)
    counts = mark
    return True

  # The first process holds the lock and looks for results.
  with contextlib.ExitStack() as stack:
    processes.ask_first(lambda: stack.enter_context(output.only_writer(path)))
    if processes.ask_first(is_complete):
      _say(f'{path} is complete already')
      return _status(counts)
    _advise(run.job, run.task)
    return _decode_chunks(run)


def _decode_chunks(run: _Run) -> int:
  """Decodes missing chunks, and joins all of them."""
  # All processes read and decode every chunk together. Only the first one looks
  # for complete chunks, writes and counts.
  job = run.job
  loaded = None
  num_chunks = 0
  total = Counts()
  gamma: int | None = None
  timed: list[decode_many.Timed] = []
  profile_dir = run.profile_dir
  pool = job.decoder.params.drafter
  # The pool to copy from: at chunk i it has the texts of all earlier chunks,
  # also those that other runs decoded.
  tokens = text_pool.joined(pool.tokens, ()) if isinstance(pool, Pool) else None
  with _metric_writer(run.metrics_dir) as write_metrics:
    for chunk in chunks.read(run.rows(), run.chunk_size):
      num_chunks += 1
      # If the whole run has fewer rows than a batch, the batch shrinks.
      if not chunk.index:
        job = job.for_examples(len(chunk.rows))
      is_done, mark = _find(run, chunk)
      if not is_done:
        # Weights are read only when a chunk is missing.
        loaded = loaded or _load(run, job, gamma)
        if tokens is not None:
          loaded = loaded.with_pool(tokens)
        decoded = chunks.decode(loaded, chunk.rows, profile_dir=profile_dir)
        profile_dir = None
        timed.append(decoded.timed)
        mark = _write(run, chunk, loaded, decoded)
        write_metrics(total.examples + len(chunk.rows), timed[-1].figures())
      if tokens is not None and mark:
        lines = output.read_chunk(run.shard, chunk.index)
        texts = records.texts(chunk.rows, lines, job.layout)
        tokens = text_pool.joined(tokens, texts)
      # The mark of a chunk has its counts; only the first process has marks.
      if mark:
        total += mark
        gamma = mark.gamma
      if processes.is_ending():
        _say(
          f'this job was asked to end (SIGTERM), and ends after chunk '
          f'{chunk.index}: the same command goes on from there'
        )
        return failures.EXIT_TRY_AGAIN
  if processes.is_first():
    output.finish(run.shard, num_chunks, total, run.settings)
    _report(total, timed, job)
  return _status(total)


def _status(counts: Counts) -> int:
  """Returns the exit status, from the counts of the first process."""
  return processes.number_of_first(2 if counts.nan_examples else 0)


def _find(run: _Run, chunk: chunks.Chunk) -> tuple[bool, Mark | None]:
  """Returns whether a chunk is complete, and in the first process its mark."""
  mark = processes.ask_first(
    lambda: output.chunk_mark(run.shard, chunk.index, chunk.digest)
  )
  return bool(mark), mark if processes.is_first() else None


def _load(run: _Run, job: Job, gamma: int | None) -> chunks.Loaded:
  """Reads the weights and compiles; writes `config.gin`.

  `gamma` is the chosen gamma of earlier chunks, for a job without one; None if
  there are none, and in all processes but the first.
  """
  sentence = ''
  earlier = processes.number_of_first(-1 if gamma is None else gamma)
  if not job.decoder.is_auto:
    loaded = chunks.load(job)
  elif earlier >= 0:
    sentence = f'gamma {earlier}, as in the chunks before'
    loaded = chunks.load(job.at(earlier))
  elif run.measure_gamma:
    loaded = chunks.load(job)
    gamma, sentence = gammas.measured(loaded, run.rows())
    loaded = loaded.at(gamma)
  else:
    # For gamma 0 the drafter's weights are not read.
    gamma, sentence = gammas.remembered(job)
    loaded = chunks.load(job.at(gamma))
  _say(sentence)
  loaded = loaded.compiled()
  # Only now gin knows which bindings are used.
  if run.operative_config is not None and processes.is_first():
    output.write_config(run.shard, run.operative_config())
  return loaded


def _write(
  run: _Run, chunk: chunks.Chunk, loaded: chunks.Loaded, decoded: chunks.Decoded
) -> Mark | None:
  """Writes a chunk, in the first process; returns its mark."""
  if not processes.is_first():
    return None
  gamma = None
  if run.job.decoder.is_auto:
    gamma = loaded.job.decoder.drafter.gamma
  mark = Mark(
    **vars(records.counts(chunk.rows, decoded.lines)),
    examples_digest=chunk.digest,
    gamma=gamma,
  )
  return output.write_chunk(
    run.shard, chunk.index, decoded.lines, mark, run.settings
  )


@contextlib.contextmanager
def _metric_writer(
  folder: str | None,
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
  """Yields a function of `(step, figures)` that writes metrics for TensorBoard
  in the first process; ImportError if clu or TensorFlow is not installed."""
  if folder is None or not processes.is_first():
    yield lambda step, figures: None
    return
  metric_writers = require(
    'clu.metric_writers',
    extra='infer,data',
    purpose='writing metrics for TensorBoard',
  )
  writer = metric_writers.create_default_writer(folder, asynchronous=False)
  with contextlib.closing(writer):
    yield writer.write_scalars


def _report(
  total: Counts, timed: Sequence[decode_many.Timed], job: Job
) -> None:
  """Prints the speed of this run, and counts of all chunks."""
  if timed:
    together = decode_many.together(timed)
    figures = together.figures()
    shown = {
      'tokens_per_target_run': '{:.2f} tokens per target run',
      'alpha': 'alpha {:.2f}',
      'row_utilisation': 'rows used {:.0%}',
    }
    num_rows = together.statistics.num_tokens.size
    parts = [
      f'{num_rows // job.decoding.num_samples} examples decoded in '
      f'{together.seconds:.1f} s: {figures["tokens_per_second"]:.1f} tokens/s',
      *(shown[name].format(figures[name]) for name in shown if name in figures),
    ]
    _say(', '.join(parts))
  if total.trimmed_examples:
    _say(
      f'{total.trimmed_examples} of {total.examples} inputs were longer '
      f'than {job.inputs_length} tokens and were trimmed by '
      f'{total.trimmed_tokens} tokens together'
    )
  if total.nan_examples:
    _say(
      f'error: logits of {total.nan_examples} examples were not numbers '
      '(NaN), or their settings left no token, and their decoding stopped; '
      'their "end" is "nan"'
    )


def _say(line: str) -> None:
  """Prints a line on standard error, once for all processes."""
  if line and processes.is_first():
    progress.say(line)
