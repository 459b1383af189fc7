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

  Lines of later steps stay until a line of their step, or of a later one,
  replaces them. `tensorboard --logdir` reads the files beside it, which are
  written to a local disk where the clu package and the TensorFlow that it needs
  are installed. The folder is made if need be.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / NAME
  lines = read_log(path)
  # Later lines are of a run that was killed, which takes these steps again.
  kept = [line for line in lines if line['step'] <= step]
  outdated = [line for line in lines if line['step'] > step]
  # The file can also end in half a line, and an object of a bucket cannot grow.
  in_bucket = is_in_bucket(path)
  is_clean = not in_bucket and not path.is_file()
  writer = None
  if not in_bucket:
    with contextlib.suppress(ImportError):
      from clu import metric_writers

      writer = metric_writers.SummaryWriter(str(folder))

  def write(step: int, metrics: Mapping[str, float]) -> None:
    nonlocal is_clean, outdated
    rounded = {name: float(f'{value:.6g}') for name, value in metrics.items()}
    line = {'step': step, **rounded}
    if is_clean:
      with path.open('a', encoding='utf-8') as file:
        file.write(json.dumps(line) + '\n')
    else:
      # Written anew in a bucket, and while lines of a killed run are behind.
      kept.append(line)
      outdated = [other for other in outdated if other['step'] > step]
      with replacing.file(path) as partial:
        texts = [json.dumps(each) + '\n' for each in (*kept, *outdated)]
        partial.write_text(''.join(texts), encoding='utf-8')
      is_clean = not in_bucket and not outdated
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
