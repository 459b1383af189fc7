"""A run's metrics on disk: JSON lines, and TensorBoard's files through clu."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from specdec_jax.files import replacing
from specdec_jax.files.paths import is_in_bucket

NAME = 'metrics.jsonl'


@contextlib.contextmanager
def open_log(
  folder: Path, *, step: int
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
  """Opens `(step, metrics)`, which writes a log that goes on after a step.

  Lines of later steps are dropped: they are of a run that was killed, which
  takes these steps again. `tensorboard --logdir` reads the files beside it,
  which are written to a local disk where the clu package and the TensorFlow
  that it needs are installed. The folder is made if need be.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / NAME
  in_bucket = is_in_bucket(path)
  lines = [line for line in read_log(path) if line['step'] <= step]

  def write_all() -> None:
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    replacing.write_text(path, text)

  if path.is_file():
    write_all()
  writer = None
  if not in_bucket:
    with contextlib.suppress(ImportError):
      from clu import metric_writers

      writer = metric_writers.SummaryWriter(str(folder))

  def write(step: int, metrics: Mapping[str, float]) -> None:
    rounded = {name: float(f'{value:.6g}') for name, value in metrics.items()}
    lines.append({'step': step, **rounded})
    if in_bucket:  # Its objects cannot grow.
      write_all()
    else:
      with path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(lines[-1]) + '\n')
    if writer is not None:
      writer.write_scalars(step, dict(metrics))

  try:
    yield write
  finally:
    if writer is not None:
      writer.close()


def read_log(path: Path) -> list[dict[str, float]]:
  """Reads the lines so far, without one that a kill left unfinished."""
  lines = []
  if path.is_file():
    for text in path.read_text(encoding='utf-8').splitlines():
      try:
        lines.append(json.loads(text))
      except ValueError:
        break
  return lines
