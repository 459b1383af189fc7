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
import numpy as np
from jax.sharding import Mesh

from specdec_jax.assembly import models
from specdec_jax.assembly.models import Model
from specdec_jax.base import Params
from specdec_jax.files.local_path import local_path
from specdec_jax.infer import (
  decode_many,
  examples,
  footprint,
  output,
  report,
)
from specdec_jax.infer import decoding as decoding_lib
from specdec_jax.infer.decode_many import Programs, Utilisation
from specdec_jax.infer.decoding import Decoding, Plan
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.infer.output import Shard
from specdec_jax.infer.report import Timed
from specdec_jax.launch import processes, progress
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts
from specdec_jax.text.tasks import Task

_MODE = 'predict'


def infer(
  *,
  model: Model,
  output_dir: str,
  task_feature_lengths: Mapping[str, int],
  find_task: Callable[..., Task],
  decoding: Decoding,
  make_mesh: Callable[[], Mesh] = mesh_lib.device_mesh,
  mode: str = _MODE,
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
    model: the target.
    output_dir: where results go; see `infer_output`.
    task_feature_lengths: most tokens of `inputs`, which are trimmed, and of
      `targets`, which are new.
    find_task: gives the task; see `text.tasks.find`.
    decoding: the drafter, the rule, the sampling and the batch.
    make_mesh: gives the mesh.
    mode: 'predict'.
    checkpoint_period: batches of a chunk, which a restart does not repeat.
    shard_id: decodes the examples whose index is this, modulo `num_shards`.
    num_shards: see `shard_id`; `specdec merge` joins them.
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
      decoding_lib.plan, model, decoding, max_len=width + lengths['targets']
    )
    if dry_run:
      found = footprint.figures(make_plan(is_dry_run=True), lengths, mesh)
      if processes.is_first():
        progress.console().print(footprint.table(found))
      return 0
    folders = {'data_dir': tfds_data_dir} if tfds_data_dir else {}
    task = find_task(lengths=lengths, **folders)
    shard = Shard(
      folder=local_path(output_dir),
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
    )
    run = _Run(
      shard=shard,
      task=task,
      layout=layout,
      plan=plan,
      mesh=mesh,
      chunk_size=checkpoint_period * decoding.batch_size,
      profile_dir=profile_dir,
    )
    used = dict(settings())
    with contextlib.ExitStack() as stack:
      stack.enter_context(
        footprint.running_out_explained(run.plan, lengths, mesh)
      )
      only_writer = output.only_writer(shard.path)
      processes.ask_first(lambda: stack.enter_context(only_writer))
      if processes.ask_first(lambda: _is_complete(run, used)):
        _say([f'{shard.path} is complete already'])
        return 0
      return _decode_shard(run, used, metrics_dir, operative_config)


def _check_arguments(
  mode: str,
  checkpoint_period: int,
  shard_id: int,
  num_shards: int,
  profile_dir: str | None,
) -> None:
  """Raises ValueError for arguments that nothing can be done with."""
  if mode != _MODE:
    raise ValueError(f'infer.mode is {mode!r}; there is {_MODE!r}')
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decoder:
  """Compiled programs and the weights that they take."""

  programs: Programs
  params: Params
  pack: Callable[[Sequence[Row | None]], Any]


def _is_complete(run: _Run, settings: Mapping[str, str]) -> bool:
  """Opens the shard; whether it is complete, and of the same examples."""
  summary = output.begin(run.shard, settings)
  if summary is None:
    return False
  digest = examples.digest(_rows(run))
  output.check_examples(run.shard, summary, digest)
  return True


def _rows(run: _Run) -> Iterator[Row]:
  """The examples of the shard."""
  shard = run.shard
  return examples.encode(run.task, run.layout, shard.shard_id, shard.num_shards)


def _decode_shard(
  run: _Run,
  settings: Mapping[str, str],
  metrics_dir: str | None,
  operative_config: Callable[[], str] | None,
) -> int:
  """Decodes the chunks that are not there yet, and joins all of them."""
  decoder = None
  timed: list[Timed] = []
  total: collections.Counter[str] = collections.Counter()
  num_chunks = 0
  rows = _rows(run)
  if not processes.is_first():
    metrics_dir = None
  with report.metric_writer(metrics_dir) as write_metrics:
    while chunk := tuple(itertools.islice(rows, run.chunk_size)):
      name = examples.digest(chunk)
      look = functools.partial(
        output.chunk_summary, run.shard, num_chunks, name
      )
      summary = processes.ask_first(look)
      if not summary:
        if decoder is None:
          decoder = _load(run, operative_config)
        records = _decode_chunk(run, decoder, chunk, timed)
        summary = report.counts(chunk, records)
        if processes.is_first():
          mark = {**summary, 'examples_digest': name}
          output.write_chunk(run.shard, num_chunks, records, mark)
        step = total['examples'] + len(chunk)
        write_metrics(step, timed[-1].figures())
      if processes.is_first():
        total.update({k: v for k, v in summary.items() if isinstance(v, int)})
      num_chunks += 1
  if processes.is_first():
    counts = {**report.counts((), ()), **total}
    mark = {**counts, 'settings': dict(settings)}
    output.finish(run.shard, num_chunks, mark)
    _say(report.sentences(counts, timed, run.layout.inputs_length))
  return 2 if total['nan_examples'] else 0


def _load(run: _Run, operative_config: Callable[[], str] | None) -> _Decoder:
  """Reads the weights and compiles; then `config.gin` can be written."""
  with progress.waiting(f'loading {run.plan.decoder.model.checkpoint}'):
    params = decoding_lib.load(run.plan, run.mesh)
  pack = examples.packer(run.layout)
  empty = pack([None] * decoding_lib.refill_size(run.plan, run.mesh))
  with progress.waiting('compiling'):
    programs = decoding_lib.programs(run.plan, params, empty, run.mesh)
    decoding_lib.warm_up(programs, params, empty)
  if operative_config is not None and processes.is_first():
    output.write_config(run.shard, operative_config())
  return _Decoder(programs=programs, params=params, pack=pack)


def _decode_chunk(
  run: _Run, decoder: _Decoder, rows: Sequence[Row], timed: list[Timed]
) -> list[dict[str, Any]]:
  """Decodes some examples; their records in order, and a time more."""
  outputs = {}
  utilisation = Utilisation(num_rows=decoder.programs.batch_size)
  with contextlib.ExitStack() as stack:
    if run.profile_dir is not None and not timed:
      stack.enter_context(jax.profiler.trace(run.profile_dir))
    started = time.perf_counter()
    bar = stack.enter_context(progress.bar('decoding', len(rows)))
    for row, found in decode_many.decode(
      decoder.programs,
      decoder.params,
      run.plan.decoding.seed,
      rows,
      pack=decoder.pack,
      utilisation=utilisation,
    ):
      outputs[row.index] = found
      bar.advance(1)
    in_order = [outputs[row.index] for row in rows]
    statistics = jax.tree.map(
      lambda *values: np.concatenate(values),
      *(output.statistics for output in in_order),
    )
    seconds = time.perf_counter() - started
    timed.append(
      Timed(statistics=statistics, utilisation=utilisation, seconds=seconds)
    )
  return [
    examples.record(row, output, run.layout)
    for row, output in zip(rows, in_order, strict=True)
  ]


def _say(lines: Sequence[str]) -> None:
  """Prints lines on standard error, once for all processes."""
  if processes.is_first():
    for line in lines:
      print(f'specdec: {line}', file=sys.stderr, flush=True)
