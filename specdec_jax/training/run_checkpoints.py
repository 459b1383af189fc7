"""Checkpoints of a run: everything that it needs to go on as if unbroken."""

import contextlib
import dataclasses
import functools
import hashlib
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax import base
from specdec_jax.base import Array
from specdec_jax.checkpoints import model_file, orbax, stored_arrays
from specdec_jax.files import full_disk, replacing
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import remove_tree, user_path
from specdec_jax.launch import processes
from specdec_jax.models.families import DrafterConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as meshes
from specdec_jax.training.losses import ArrayTree

if TYPE_CHECKING:
  from orbax.checkpoint import CheckpointManager

_FOLDER = 'checkpoints'


@base.value
class Run:
  """What a checkpoint holds: the number of steps taken, an int32 scalar, the
  parameters, a float32 tree, the optimiser's state, and the key of the whole
  run. A step reads the batch of its number."""

  step: Array
  params: ArrayTree
  opt_state: ArrayTree
  rng_key: Array


def partition(params: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
  """Partitions parameters into those that are trained and integers, such as the
  ids of a draft vocabulary. Each tree has None for what is in the other."""
  # {'kernel': floats, 'target_ids': ints} becomes {'kernel': floats,
  # 'target_ids': None} and {'kernel': None, 'target_ids': ints}.
  is_trained = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  trained = jax.tree.map(lambda x: x if is_trained(x) else None, params)
  fixed = jax.tree.map(lambda x: None if is_trained(x) else x, params)
  return trained, fixed


def combine(trained: ArrayTree, fixed: ArrayTree) -> ArrayTree:
  """Combines what `partition` returned."""
  return jax.tree.map(
    lambda x, y: y if x is None else x,
    trained,
    fixed,
    is_leaf=lambda x: x is None,
  )


def place_run(run: Run, optimizer: optax.GradientTransformation) -> Run:
  """Places a run over the mesh that is set, if any: parameters and what the
  optimiser has of their shapes as `sharding.rules` says, the rest whole."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return run
  shardings = meshes.parameter_shardings(mesh, run.params)
  # A tree of shardings has the structure of the run.
  whole: ArrayTree = NamedSharding(mesh, PartitionSpec())
  trained, _ = partition(run.params)
  # Adafactor's factored moments have other shapes than their parameter.
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda x, param, sharding: sharding if x.shape == param.shape else whole,
    run.opt_state,
    trained,
    meshes.parameter_shardings(mesh, trained),
    transform_non_params=lambda x: whole,
  )
  places = Run(step=whole, params=shardings, opt_state=opt_state, rng_key=whole)
  return jax.device_put(run, places)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The checkpoints of a run's folder; `open_run` makes one."""

  folder: Path
  manager: 'CheckpointManager'

  def steps(self) -> list[int]:
    """Lists the steps with a complete checkpoint, ascending."""
    return sorted(self.manager.all_steps())

  def save(self, run: Run) -> None:
    """Writes a checkpoint of the run's step, complete or not at all; OSError if
    the disk is full, with earlier checkpoints untouched."""
    ocp = orbax.import_orbax()
    tree = _as_tree(run)
    with full_disk.named(self.folder, tree):
      args = ocp.args.StandardSave(tree)
      self.manager.save(int(run.step), args=args)
      self.manager.wait_until_finished()

  def restore(self, like: Run, step: int) -> Run:
    """Reads a checkpoint, laid out as `like`; ValueError if it is another's."""
    expected = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      _as_tree(like),
    )
    folder = self._folder(step)
    try:
      stored = orbax.open_tree(folder / 'default')
      tree = stored_arrays.read_tree(stored, expected, source=str(folder))
    except ValueError as error:
      cause = error.__cause__
      if isinstance(cause, PermissionError | ConnectionError):
        raise cause from None  # It says nothing of the checkpoint.
      raise ValueError(
        f'{self.folder}: the checkpoint of step {step} is of another '
        f'configuration or optimiser, or is damaged: {error}'
      ) from error
    return Run(**tree | {'rng_key': jax.random.wrap_key_data(tree['rng_key'])})

  def restore_newest(self, like: Run, say: Callable[[str], None]) -> Run | None:
    """Reads the newest checkpoint that can be read; None if there is none.

    Newer ones are then damaged, and are moved out of the way, so that the run
    can write those steps again; `say` is told of each. ValueError if there are
    checkpoints and none of them can be read.
    """
    unread: list[tuple[int, ValueError]] = []
    for step in reversed(self.steps()):
      run, error = None, ValueError('another process cannot read it')
      try:
        run = self.restore(like, step)
      except ValueError as raised:
        error = raised
      # If one process cannot read it, none does: all go on from one step.
      if _is_everywhere(run is not None):
        break
      unread.append((step, error))
    else:
      if unread:
        raise unread[0][1]
      return None
    for newer, error in unread:
      aside = self.folder / f'damaged_checkpoint_{newer}'
      if processes.is_first():
        remove_tree(aside)
        self._folder(newer).rename(aside)
      say(
        f'{self.folder}: the checkpoint of step {newer} cannot be read and is '
        f'now {aside.name}; training goes back to step {step} '
        f'({error.__cause__ or error})'
      )
    # All processes wait for the first to move them before they list the steps.
    if unread and _is_everywhere(True):
      self.manager.reload()
    return run

  def _folder(self, step: int) -> Path:
    return self.folder / _FOLDER / str(step)


def _is_everywhere(flag: bool) -> bool:
  """Tells whether it is true in all processes, which wait for each other."""
  return bool(multihost_utils.process_allgather(np.asarray(flag)).all())


@contextlib.contextmanager
def open_run(
  model_dir: str | os.PathLike[str],
  config: T5Config | DrafterConfig,
  *,
  vocabulary: Path | None = None,
  keep: int = 3,
) -> Iterator[Checkpoints]:
  """Opens the checkpoints of a new run, or of one that goes on.

  Nobody else can open the run meanwhile. The folder is made if need be; its
  `model.json` says what network is trained, and its `vocabulary.sha256` with
  what SentencePiece model, if known. The newest `keep` checkpoints are kept.

  Raises ValueError if the folder is of another network or another vocabulary,
  is open already, or as `orbax.text_of`; ImportError without orbax-checkpoint.
  """
  ocp = orbax.import_orbax()
  folder = user_path(model_dir).absolute()
  managed = orbax.text_of(folder / _FOLDER)
  folder.mkdir(parents=True, exist_ok=True)
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep,
    # Who meets a full disk hears of it at that step.
    enable_async_checkpointing=False,
    cleanup_tmp_directories=True,
  )
  with contextlib.ExitStack() as stack:
    # The first process checks for all: its refusal ends the others too, which
    # would wait for it at the next collective.
    lock = one_writer(folder / '.lock', folder)
    processes.ask_first(lambda: stack.enter_context(lock))
    processes.ask_first(lambda: _check_network(folder, config))
    processes.ask_first(lambda: _check_vocabulary(folder, vocabulary))
    opened = ocp.CheckpointManager(managed, options=options)
    manager = stack.enter_context(opened)
    checkpoints = Checkpoints(folder, manager)
    yield checkpoints
    # Orbax deletes when it writes: a kill in between leaves one too many.
    for step in checkpoints.steps()[:-keep]:
      manager.delete(step)


def _check_network(folder: Path, config: T5Config | DrafterConfig) -> None:
  """Writes the network's sizes, or compares them but for rate and dtype."""
  if not (folder / model_file.NAME).exists():
    model_file.write(folder, config)
    return
  before = dataclasses.asdict(model_file.read(folder))
  now = dataclasses.asdict(config)
  different = [
    f'{name} {before[name]} there and {now[name]} here'
    for name in now
    if name not in ('dtype', 'dropout_rate') and before.get(name) != now[name]
  ]
  if different:
    raise ValueError(f'{folder} is of another network: {", ".join(different)}')


def _check_vocabulary(folder: Path, vocabulary: Path | None) -> None:
  """Writes the vocabulary's digest, or compares it."""
  if vocabulary is None:
    return
  digest = hashlib.sha256(vocabulary.read_bytes()).hexdigest()
  path = folder / 'vocabulary.sha256'
  if not path.exists():
    replacing.write_text(path, f'{digest}\n')
  elif (before := path.read_text(encoding='utf-8').strip()) != digest:
    raise ValueError(
      f'{folder} is of another vocabulary: {before[:12]} there and '
      f'{digest[:12]} here'
    )


def _as_tree(run: Run) -> dict[str, ArrayTree]:
  return {**vars(run), 'rng_key': jax.random.key_data(run.rng_key)}


def average(checkpoints: Checkpoints, like: Run, *, last: int) -> ArrayTree:
  """Averages the newest checkpoints' parameters (Vaswani et al., arXiv
  1706.03762, Sec. 6.1, average the last 5); `like` is any state of the run."""
  steps = checkpoints.steps()[-last:]
  # One after another: two trees of parameters are in memory, not `last`.
  restored = (checkpoints.restore(like, step).params for step in steps)
  add = functools.partial(jax.tree.map, operator.add)
  total = functools.reduce(add, restored)
  return jax.tree.map(lambda x: (x / last).astype(x.dtype), total)
