"""Decodes a task to JSONL, under gin: sharded, in chunks, resumable.

Flags, macros and output files are those of `t5x.infer`. The gin file
`runs/infer.gin` binds the arguments of `infer`; a run that was killed goes on
where it was when it is started again, and gives the same bytes.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from specdec_jax.assembly import models
from specdec_jax.assembly.models import Model
from specdec_jax.base import Params
from specdec_jax.files.paths import local_path, user_path
from specdec_jax.infer import (
  decode_many,
  examples,
  footprint,
  output,
  records,
  ways,
)
from specdec_jax.infer import decoding as decoding_lib
from specdec_jax.infer.decode_many import Timed, Utilisation
from specdec_jax.infer.decoding import Decoding, Plan
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.infer.output import Shard
from specdec_jax.infer.ways import Compiled
from specdec_jax.launch import agreement, processes, progress
from specdec_jax.measure import metrics
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts
from specdec_jax.text.tasks import Task
from specdec_jax.theory.gamma_trials import ChosenGamma

_MODES = ('predict', 'predict_with_aux', decoding_lib.SCORE)


def infer(
  *,
  model: Model,
  output_dir: str,
  task_feature_lengths: Mapping[str, int],
  find_task: Callable[..., Task],
  decoding: Decoding,
  make_mesh: Callable[[], Mesh] = mesh_lib.device_mesh,
  mode: str = _MODES[0],
  checkpoint_period: int = 100,
  shard_id: int = 0,
  num_shards: int = 1,
  tfds_data_dir: str | None = None,
  metrics_dir: str | None = None,
  profile_dir: str | None = None,
  dry_run: bool = False,
  settings: Callable[[], Mapping[str, str]] = dict,
  operative_config: Callable[[], str] | None = None,
) -> int:
  """Decodes one shard of a task.

  Args:
    output_dir: where results go; see `infer.output`.
    task_feature_lengths: most tokens of `inputs`, which are trimmed, and of
      `targets`, which are new.
    find_task: gives the task; see `text.tasks.find`.
    decoding: the drafter, the rule, the sampling and the batch.
    mode: one of T5X's: `predict`, `predict_with_aux`, which adds `scores`, or
      `score`, log-probabilities of the targets; see `infer.records`.
    checkpoint_period: batches of a chunk, which a restart does not repeat.
    shard_id: decodes the examples whose index is this, modulo `num_shards`;
      `specdec merge` joins them.
    tfds_data_dir: where TFDS has its data sets.
    metrics_dir: where clu writes metrics for TensorBoard.
    profile_dir: where the trace of one chunk goes.
    dry_run: prints what it would take of every chip, and decodes nothing.
    settings: gives what results depend on, by name, for a restart to compare.
    operative_config: gives the text of `config.gin`.

  Returns:
    The exit status: 2 if logits were not numbers, else 0.

  Raises:
    ValueError: if something does not fit, with the numbers.
  """
  _check_arguments(mode, checkpoint_period, shard_id, num_shards, profile_dir)
  config = models.read_config(model)
  lengths = examples.check_lengths(config, task_feature_lengths)
  width = prompts.decoder_width(config, lengths['inputs'])
  mesh = make_mesh()
  with jax.set_mesh(mesh):
    make_plan = functools.partial(
      decoding_lib.plan,
      model,
      decoding,
      max_len=width + lengths['targets'],
      mode=mode,
    )
    if dry_run:
      found = footprint.figures(make_plan(is_dry_run=True), lengths, mesh)
      if processes.is_first():
        progress.console().print(footprint.table(found))
      return 0
    folders = {'data_dir': tfds_data_dir} if tfds_data_dir else {}
    task = find_task(lengths=lengths, **folders)
    shard = Shard(
      folder=user_path(output_dir),
      task=task.name,
      mode=mode,
      shard_id=shard_id,
      num_shards=num_shards,
    )
    plan = make_plan()
    layout = Layout(
      config=config,
      vocabulary=plan.decoder.vocabulary,
      inputs_length=lengths['inputs'],
      targets_length=lengths['targets'],
      is_scored=mode == decoding_lib.SCORE,
    )
    run = _Run(
      shard=shard,
      task=task,
      layout=layout,
      plan=plan,
      mesh=mesh,
      chunk_size=checkpoint_period * decoding.batch_examples,
      profile_dir=profile_dir,
      metrics_dir=metrics_dir,
      settings=_agreed({**settings(), **plan.decoder.digests()}),
      operative_config=operative_config,
    )
    with contextlib.ExitStack() as stack:
      stack.enter_context(footprint.running_out_explained(plan, lengths, mesh))
      only_writer = output.only_writer(shard.path)
      processes.ask_first(lambda: stack.enter_context(only_writer))
      if processes.ask_first(lambda: _is_complete(run)):
        _say([f'{shard.path} is complete already'])
        return 0
      return _decode_shard(run)


def _agreed(settings: Mapping[str, str]) -> Mapping[str, str]:
  """These; ValueError unless all processes have the same."""
  agreement.check_everywhere(settings)
  return settings


def _check_arguments(
  mode: str,
  checkpoint_period: int,
  shard_id: int,
  num_shards: int,
  profile_dir: str | None,
) -> None:
  """Raises ValueError for arguments that nothing can be done with."""
  if mode not in _MODES:
    raise ValueError(f'infer.mode is {mode!r}; there are {", ".join(_MODES)}')
  if checkpoint_period < 1:
    raise ValueError(
      f'infer.checkpoint_period should be at least 1, got {checkpoint_period}'
    )
  if not 0 <= shard_id < num_shards <= 99_999:
    raise ValueError(
      f'shard_id {shard_id} is not one of {num_shards} shards, which count '
      'from 0'
    )
  if profile_dir is not None and local_path(profile_dir).is_file():
    raise ValueError(f'--profile {profile_dir} is a file: name a folder')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
  """One shard of a task, and how it is decoded."""

  shard: Shard
  task: Task
  layout: Layout
  plan: Plan
  mesh: Mesh
  chunk_size: int
  profile_dir: str | None
  metrics_dir: str | None
  settings: Mapping[str, str]
  operative_config: Callable[[], str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
  """The weights, and compiled programs by gamma; None is that of the plan."""

  params: Params
  programs: dict[int | None, Compiled]

  def params_of(self, gamma: int | None) -> Params:
    """What programs take: plain decoding is without the drafter's weights."""
    return Params(target=self.params.target) if gamma == 0 else self.params


def _is_complete(run: _Run) -> bool:
  """Opens the shard; whether it is complete, and of the same examples."""
  summary = output.begin(run.shard, run.settings)
  if summary is not None:
    output.check_examples(run.shard, summary, examples.digest(_rows(run)))
  return summary is not None


def _rows(run: _Run) -> Iterator[Row]:
  shard = run.shard
  return examples.encode(run.task, run.layout, shard.shard_id, shard.num_shards)


def _decode_shard(run: _Run) -> int:
  """Decodes the chunks that are not there yet, and joins all of them."""
  loaded = None
  timed: list[Timed] = []
  total: collections.Counter[str] = collections.Counter()
  per_batch = run.plan.decoding.batch_examples
  rows, turns, choice = decoding_lib.schedule(
    run.plan.decoder, _rows(run), per_batch
  )
  if choice is not None:
    _say([choice.sentence])
  # The first chunk has a batch for each of the gammas to try.
  first = [len(turns) * per_batch] if turns else []
  sizes = itertools.chain(first, itertools.repeat(run.chunk_size))
  metrics_dir = run.metrics_dir if processes.is_first() else None
  with output.metric_writer(metrics_dir) as write_metrics:
    for num_chunks in itertools.count():
      chunk, name = _next_chunk(rows, next(sizes), num_chunks)
      if not chunk:
        break
      if not num_chunks and not turns:
        run = _fitted(run, len(chunk))
      look = functools.partial(
        output.chunk_summary, run.shard, num_chunks, name
      )
      is_trial = bool(turns) and not num_chunks
      gammas: Sequence[int | None] = turns
      if not is_trial:
        gammas = (None if choice is None else choice.gamma,)
      summary = processes.ask_first(look)
      if not summary:
        if loaded is None:
          loaded = _load(run, gammas)
        lines, parts = _decode_chunk(run, loaded, chunk, gammas, not timed)
        timed.append(decode_many.together(parts))
        summary = dict(records.counts(chunk, lines))
        if is_trial:
          num_rows = run.plan.decoding.batch_size
          found = decoding_lib.choose(turns, parts, num_rows)
          summary[output.GAMMA] = vars(found)
        if processes.is_first():
          summary = output.write_chunk(
            run.shard,
            num_chunks,
            lines,
            {**summary, 'examples_digest': name},
            run.settings,
          )
        step = total['examples'] + len(chunk)
        write_metrics(step, timed[-1].figures())
      if is_trial:
        choice = _settle(run, summary)
      if processes.is_first():
        total.update({k: v for k, v in summary.items() if isinstance(v, int)})
  if processes.is_first():
    _finish(run, num_chunks, total, timed, choice)
  return 2 if total['nan_examples'] else 0


def _fitted(run: _Run, num_examples: int) -> _Run:
  """With no more rows in a batch than so many examples have samples."""
  plan, parts = run.plan, run.mesh.shape[mesh_lib.rules.DATA]
  num_rows = num_examples * plan.decoding.num_samples
  decoding = plan.decoding.within(num_rows + -num_rows % parts)
  return dataclasses.replace(
    run, plan=dataclasses.replace(plan, decoding=decoding)
  )


def _next_chunk(
  rows: Iterator[Row], size: int, index: int
) -> tuple[tuple[Row, ...], str]:
  """So many of the rows that are left, and their digest; ValueError unless all
  processes have the same."""
  chunk = tuple(itertools.islice(rows, size))
  name = examples.digest(chunk)
  agreement.check_everywhere({f'digest of the examples in chunk {index}': name})
  return chunk, name


def _finish(
  run: _Run,
  num_chunks: int,
  total: Mapping[str, int],
  timed: Sequence[Timed],
  choice: ChosenGamma | None,
) -> None:
  """Joins the chunks, and says what was done."""
  counts = {**records.counts((), ()), **total}
  mark = {**counts, 'settings': run.settings}
  if choice is not None:
    mark[output.GAMMA] = vars(choice)
  output.finish(run.shard, num_chunks, mark)
  length, num_samples = run.layout.inputs_length, run.plan.decoding.num_samples
  _say(examples.sentences(counts, timed, length, num_samples))


def _settle(run: _Run, summary: Any) -> ChosenGamma:
  """The choice in a summary, which only the first process has; others learn
  its gamma."""
  found = processes.ask_first(lambda: output.choice_of(run.shard, summary))
  if not processes.is_first():
    return ChosenGamma(gamma=processes.number_of_first(0), sentence='')
  _say([found.sentence])
  processes.number_of_first(found.gamma)
  return found


def _load(run: _Run, gammas: Sequence[int | None]) -> _Loaded:
  """Reads the weights and compiles; then `config.gin` can be written."""
  with progress.waiting(f'loading {run.plan.decoder.model.checkpoint}'):
    params = decoding_lib.load(run.plan, run.mesh)
  loaded = _Loaded(params=params, programs={})
  _compile(run, loaded, gammas)
  if run.operative_config is not None and processes.is_first():
    output.write_config(run.shard, run.operative_config())
  return loaded


def _compile(run: _Run, loaded: _Loaded, gammas: Sequence[int | None]) -> None:
  """Compiles programs of these gammas, and keeps no others."""
  for gamma in [gamma for gamma in loaded.programs if gamma not in gammas]:
    del loaded.programs[gamma]
  with progress.waiting('compiling'):
    for gamma in {*gammas} - {*loaded.programs}:
      plan, params = run.plan, loaded.params_of(gamma)
      if gamma is not None:
        plan = dataclasses.replace(plan, decoder=plan.decoder.at(gamma))
      compiled = ways.of(plan).compile(plan, params, run.layout, run.mesh)
      compiled.warm_up()
      loaded.programs[gamma] = compiled


def _decode_chunk(
  run: _Run,
  loaded: _Loaded,
  rows: Sequence[Row],
  gammas: Sequence[int | None],
  is_first: bool,
) -> tuple[list[dict[str, Any]], list[Timed]]:
  """Decodes some examples, one part of them with each gamma; their lines in
  order, and the time of each part."""
  _compile(run, loaded, gammas)
  outputs: dict[int, Any] = {}
  parts = []
  size = -(-len(rows) // len(gammas))
  num_samples = run.plan.decoding.num_samples
  with contextlib.ExitStack() as stack:
    if run.profile_dir is not None and is_first:
      stack.enter_context(jax.profiler.trace(run.profile_dir))
    bar = stack.enter_context(progress.bar('decoding', len(rows) * num_samples))
    for i, gamma in enumerate(gammas):
      part = examples.sampled(rows[i * size : (i + 1) * size], num_samples)
      utilisation = Utilisation(num_rows=run.plan.decoding.batch_size)
      started = time.perf_counter()
      decode = loaded.programs[gamma].decode
      for row, found in decode(part, utilisation=utilisation):
        outputs[row.index] = found
        bar.advance(1)
      seconds = time.perf_counter() - started
      counts = metrics.joined([outputs[row.index].statistics for row in part])
      parts.append(
        Timed(statistics=counts, utilisation=utilisation, seconds=seconds)
      )
  of_row = lambda row: [
    outputs[each.index] for each in examples.sampled([row], num_samples)
  ]
  lines = [
    ways.of(run.plan).record(row, of_row(row), run.layout, run.plan)
    for row in rows
  ]
  return lines, parts


def _say(lines: Sequence[str]) -> None:
  """Prints lines on standard error, once for all processes."""
  if processes.is_first():
    for line in lines:
      print(f'specdec: {line}', file=sys.stderr, flush=True)
