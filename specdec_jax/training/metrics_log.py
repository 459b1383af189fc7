"""A run's metrics on disk: JSON lines, and TensorBoard's files through clu."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAME = 'metrics.jsonl'


class MetricsLog(NamedTuple):
  """Where metrics go.

  Attributes:
    write: `(step, metrics)`, floats by name.
    close: flushes.
  """

  write: Callable[[int, Mapping[str, float]], None]
  close: Callable[[], None]


def open_log(folder: Path, *, step: int) -> MetricsLog:
  """A log that goes on after a step.

  Lines of later steps are dropped: a run that was killed takes these steps
  again. `tensorboard --logdir` reads the files beside it, which are written
  where the clu package and the TensorFlow that it needs are installed.

  Args:
    folder: the run's, made if need be.
    step: steps taken so far.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / NAME
  kept = [line for line in read_log(path) if line['step'] <= step]
  file = path.open('w', encoding='utf-8')
  for line in kept:
    file.write(json.dumps(line) + '\n')
  writer = _clu_writer(folder)

  def write(step: int, metrics: Mapping[str, float]) -> None:
    rounded = {name: float(f'{value:.6g}') for name, value in metrics.items()}
    file.write(json.dumps({'step': step, **rounded}) + '\n')
    file.flush()
    if writer is not None:
      writer.write_scalars(step, dict(metrics))

  def close() -> None:
    file.close()
    if writer is not None:
      writer.close()

  return MetricsLog(write, close)


def read_log(path: Path) -> list[dict[str, Any]]:
  """The lines so far; what a kill left unfinished is not one."""
  lines = []
  if path.is_file():
    for text in path.read_text(encoding='utf-8').splitlines():
      try:
        lines.append(json.loads(text))
      except ValueError:
        break
  return lines


def _clu_writer(folder: Path) -> Any:
  """clu's writer, or None where it cannot be imported."""
  try:
    from clu import metric_writers
  except ImportError:
    return None
  return metric_writers.SummaryWriter(str(folder))
