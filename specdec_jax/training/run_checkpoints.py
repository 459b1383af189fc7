"""Checkpoints of a run: the full state that it needs to resume exactly."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping
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
from specdec_jax.launch import agreement, processes
from specdec_jax.models.families import DrafterConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.sharding import mesh as meshes
from specdec_jax.training.losses import ArrayTree

if TYPE_CHECKING:
  from orbax.checkpoint import CheckpointManager

_FOLDER = 'checkpoints'
# Holds the step of a checkpoint between two regular ones.
_EXTRA = 'extra_checkpoint'
_SETTINGS = 'settings.json'
# Of the sums that make a digest; two have 64 bits together.
_NUM_LANES = 2


@base.value
class Run:
  """The state of a run, as in a checkpoint.

  Attributes:
    step: the number of steps so far, int32; it is also the next batch's number.
    params: float32 parameters.
    opt_state: the optimiser's state.
    rng_key: the key from which all steps derive theirs.
  """

  step: Array
  params: ArrayTree
  opt_state: ArrayTree
  rng_key: Array


def partition(params: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
  """Splits parameters into trained ones and integers, such as the ids of a
  draft vocabulary. Each tree has None in place of the other's leaves."""
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
  """Shards a run over the current mesh, if any: parameters, and optimiser state
  of the same shapes, by `sharding.rules`; the rest is replicated."""
  mesh = jax.sharding.get_mesh()
  if mesh.empty:
    return run
  shardings = meshes.parameter_shardings(mesh, run.params)
  # A tree of shardings has the structure of the run.
  replicated: ArrayTree = NamedSharding(mesh, PartitionSpec())
  trained, _ = partition(run.params)
  # Adafactor's factored moments have other shapes than their parameter.
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda x, param, sharding: (
      sharding if x.shape == param.shape else replicated
    ),
    run.opt_state,
    trained,
    meshes.parameter_shardings(mesh, trained),
    transform_non_params=lambda x: replicated,
  )
  run_shardings = Run(
    step=replicated, params=shardings, opt_state=opt_state, rng_key=replicated
  )
  return jax.device_put(run, run_shardings)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The checkpoints in a run's folder; see `open_run`."""

  folder: Path
  manager: 'CheckpointManager'
  keep: int

  def steps(self) -> list[int]:
    """Lists the steps with a complete checkpoint, ascending."""
    return sorted(self.manager.all_steps())

  def regular_steps(self) -> list[int]:
    """Lists the steps without that of an extra checkpoint."""
    extra = self._extra_step()
    return [step for step in self.steps() if step != extra]

  def save(self, run: Run, *, is_extra: bool = False) -> None:
    """Writes a checkpoint of the run's step, atomically; OSError if the disk is
    full, in which case earlier checkpoints are unchanged. An extra one, of a
    run that is stopped between two regular ones, is deleted after the next."""
    ocp = orbax.import_orbax()
    step = int(run.step)
    processes.ask_first(lambda: self._note_extra(step, is_extra))
    tree = _as_tree(run)
    tree['digest'] = digest(tree)
    with full_disk.named(self.folder, tree):
      args = ocp.args.StandardSave(tree)
      self.manager.save(step, args=args)
      self.manager.wait_until_finished()
    self.prune()

  def prune(self) -> None:
    """Deletes all but the newest `keep` regular checkpoints, and an extra one
    that is not the newest of all."""
    steps = self.steps()
    regular = self.regular_steps()
    retained = {*regular[-self.keep :], *steps[-1:]}
    for step in steps:
      if step not in retained:
        self.manager.delete(step)

  def _note_extra(self, step: int, is_extra: bool) -> None:
    path = self.folder / _EXTRA
    if is_extra:
      replacing.write_text(path, f'{step}\n')
    elif path.is_file() and path.read_text(encoding='utf-8') == f'{step}\n':
      path.unlink()

  def _extra_step(self) -> int:
    """Reads the step of the extra checkpoint, the same in all processes; -1
    without one."""
    path = self.folder / _EXTRA
    step = -1
    if processes.is_first() and path.is_file():
      step = int(path.read_text(encoding='utf-8'))
    return processes.number_of_first(step)

  def restore(self, like: Run, step: int) -> Run:
    """Reads a checkpoint, with the shapes and shardings of `like`; ValueError
    if it is of another run, or its arrays do not have the stored digest."""
    expected = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      _as_tree(like),
    )
    folder = self._folder(step)
    try:
      stored = orbax.open_tree(folder / 'default')
      # Earlier versions wrote no digest.
      has_digest = 'digest' in stored
      if has_digest:
        sharding = expected['step'].sharding
        expected['digest'] = jax.ShapeDtypeStruct(
          (_NUM_LANES,), jnp.uint32, sharding=sharding
        )
      tree = stored_arrays.read_tree(stored, expected, source=str(folder))
      if has_digest:
        written = np.asarray(tree.pop('digest'))
        if (written != np.asarray(digest(tree))).any():
          raise ValueError('its arrays are not those that were written')
    except ValueError as error:
      cause = error.__cause__
      if isinstance(cause, PermissionError | ConnectionError):
        raise cause from None  # The checkpoint itself may be intact.
      raise ValueError(
        f'{self.folder}: the checkpoint of step {step} is of another '
        f'configuration or optimiser, or is damaged: {error}'
      ) from error
    return Run(**tree | {'rng_key': jax.random.wrap_key_data(tree['rng_key'])})

  def restore_newest(self, like: Run, say: Callable[[str], None]) -> Run | None:
    """Reads the newest readable checkpoint; None if there are no checkpoints.

    Newer ones, which are damaged, are renamed, so that the run can write those
    steps again; `say` is called for each. Raises ValueError if there are
    checkpoints and none of them can be read.
    """
    unread: list[tuple[int, ValueError]] = []
    for step in reversed(self.steps()):
      run, error = None, ValueError('another process cannot read it')
      try:
        run = self.restore(like, step)
      except ValueError as raised:
        error = raised
      # All processes resume from the same step, which each of them can read.
      if _is_everywhere(run is not None):
        break
      unread.append((step, error))
    else:
      if unread:
        raise unread[0][1]
      return None
    for newer, error in unread:
      renamed = self.folder / f'damaged_checkpoint_{newer}'
      if processes.is_first():
        remove_tree(renamed)
        self._folder(newer).rename(renamed)
      say(
        f'{self.folder}: the checkpoint of step {newer} cannot be read and is '
        f'now {renamed.name}; training goes back to step {step} '
        f'({error.__cause__ or error})'
      )
    # All processes wait for the first to move them before they list the steps.
    if unread and _is_everywhere(True):
      self.manager.reload()
    return run

  def _folder(self, step: int) -> Path:
    return self.folder / _FOLDER / str(step)

  def tell_changes(
    self, settings: Mapping[str, str], say: Callable[[str], None]
  ) -> None:
    """Reports the settings that changed since the run was started, if any, and
    stores the current ones."""
    path = self.folder / _SETTINGS
    changes = ''
    if self.steps() and path.is_file():
      before = json.loads(path.read_text(encoding='utf-8'))
      changes = agreement.differences(before, settings, '{} was {}, now {}')
    if changes:
      say(
        f'{self.folder}: the run resumes with other settings, so that its '
        f'next steps differ from those with the earlier ones: {changes}'
      )
    text = json.dumps(dict(settings), indent=2) + '\n'
    replacing.write_text(path, text)


def digest(tree: ArrayTree) -> Array:
  """Computes a digest of the bits and the order of a tree's arrays, uint32
  `[2]`; it does not depend on how they are sharded."""
  return _digest(jax.tree.leaves(tree))


@jax.jit
def _digest(leaves: list[Array]) -> Array:
  # The sum of a hash of every element's bits and position: sums modulo 2**32 do
  # not depend on the order, and a changed element has another hash, as `_mixed`
  # is a bijection.
  lanes = [jnp.uint32(0)] * _NUM_LANES
  for number, leaf in enumerate(leaves):
    bits = _bits(leaf)
    position = jnp.full(bits.shape, number * 0x9E3779B9 % 2**32, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
      index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
      position += index * jnp.uint32(stride % 2**32)
      stride *= bits.shape[axis]
    for lane in range(_NUM_LANES):
      salted = _mixed(position + jnp.uint32(lane * 0x7F4A7C15))
      hashes = _mixed(bits ^ salted)
      lanes[lane] += hashes.sum(dtype=jnp.uint32)
  return jnp.stack(lanes)


def _bits(array: Array) -> Array:
  """Returns an array's bits as uint32; 8 bytes become two, on a new axis."""
  if jnp.issubdtype(array.dtype, jnp.floating):
    # tensorstore may omit a chunk of -0.0, which is then read as 0.0.
    array = jnp.where(array == 0, jnp.zeros_like(array), array)
  if array.dtype == bool:
    return array.astype(jnp.uint32)
  num_bits = 8 * min(4, array.dtype.itemsize)
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{num_bits}'))
  return bits.astype(jnp.uint32)


def _mixed(x: Array) -> Array:
  """Mixes the bits of uint32, one to one; MurmurHash3's `fmix32`, by Austin
  Appleby (https://github.com/aappleby/smhasher, in the public domain)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def _is_everywhere(flag: bool) -> bool:
  """Tells whether a flag is true in all processes; they wait for each other."""
  return bool(multihost_utils.process_allgather(np.asarray(flag)).all())


@contextlib.contextmanager
def open_run(
  model_dir: str | os.PathLike[str],
  config: T5Config | DrafterConfig,
  *,
  vocabulary: Path | None = None,
  keep: int = 3,
) -> Iterator[Checkpoints]:
  """Opens the checkpoints of a new run, or of one to resume, exclusively.

  Creates the folder if needed. Its `model.json` states the network, and its
  `vocabulary.sha256` the SentencePiece model, if there is one. The newest
  `keep` checkpoints are kept.

  Raises ValueError if the folder has another network or vocabulary, is open
  already, or as `orbax.text_of`; ImportError without orbax-checkpoint.
  """
  ocp = orbax.import_orbax()
  folder = user_path(model_dir).absolute()
  managed = orbax.text_of(folder / _FOLDER)
  folder.mkdir(parents=True, exist_ok=True)
  options = ocp.CheckpointManagerOptions(
    max_to_keep=None,  # See `Checkpoints.prune`.
    # A full disk is reported at the step whose checkpoint does not fit.
    enable_async_checkpointing=False,
    cleanup_tmp_directories=True,
  )
  with contextlib.ExitStack() as stack:
    # The first process checks for all, and its error ends the others, too,
    # which would otherwise wait for it at the next collective.
    lock = one_writer(folder / '.lock', folder)
    processes.ask_first(lambda: stack.enter_context(lock))
    processes.ask_first(lambda: _check_network(folder, config))
    processes.ask_first(lambda: _check_vocabulary(folder, vocabulary))
    opened = ocp.CheckpointManager(managed, options=options)
    manager = stack.enter_context(opened)
    checkpoints = Checkpoints(folder, manager, keep)
    yield checkpoints
    # A run killed before it deleted the oldest checkpoint has one too many.
    checkpoints.prune()


def _check_network(folder: Path, config: T5Config | DrafterConfig) -> None:
  """Writes the network's config, or compares it, but for dropout and dtype."""
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
  steps = checkpoints.regular_steps()[-last:]
  # One at a time, so that only two trees of parameters are in memory.
  restored = (checkpoints.restore(like, step).params for step in steps)
  add = functools.partial(jax.tree.map, operator.add)
  total = functools.reduce(add, restored)
  return jax.tree.map(lambda x: (x / last).astype(x.dtype), total)
