"""Training in slices ends with the weights of training in one go."""

import os
import sys
import time

import pytest

from experiments.pretrained import on_gpu
from tests.cli import tiny


def arguments(folder, name, minutes) -> list[str]:
  return [
    *('eagle', f'--target={folder / "model"}'),
    *(f'--prompts={folder / "prompts.txt"}', f'--out={folder / name}'),
    *('--layers', '1', '2', '3', '--steps', '12', '6', '--rows', '8'),
    *('--max_new_tokens', '16', f'--minutes={minutes}', '--gin'),
    *('DRAFT_VOCAB_SIZE=64', 'BATCH_SIZE=8', 'LENGTH=64', 'NUM_KV_HEADS=1'),
    *('EVAL_PERIOD=4', 'CHECKPOINT_PERIOD=2', 'loop.Schedule.log_period=2'),
  ]


@pytest.mark.slow
def test_slices_end_with_the_weights_of_one_call(tmp_path):
  pytest.importorskip('matplotlib')
  tiny.write_model(tmp_path / 'model', num_layers=3)
  prompts = [f'{"the in " * (i % 5)}ab{i}' for i in range(40)]
  (tmp_path / 'prompts.txt').write_text('\n'.join(prompts))
  started = time.monotonic()
  assert on_gpu.main(arguments(tmp_path, 'whole', 30)) == 0
  # A third of what all of it took, and more if nothing is done in that time.
  minutes = (time.monotonic() - started) / 60 / 3
  statuses = []
  while 0 not in statuses:
    statuses.append(on_gpu.main(arguments(tmp_path, 'sliced', minutes)))
    minutes *= 1.2
  assert {*statuses} == {75, 0}
  whole, sliced = (
    (tmp_path / name / 'weights' / 'model.safetensors').read_bytes()
    for name in ('whole', 'sliced')
  )
  assert sliced == whole
  assert (tmp_path / 'sliced' / 'curve.svg').stat().st_size > 1000
  # Nothing is left to do; another command's work is not taken for it.
  assert on_gpu.main(arguments(tmp_path, 'sliced', 0)) == 0
  other = [*arguments(tmp_path, 'sliced', 0), 'DECAY=0.5']
  assert on_gpu.main(other) == 2


def test_a_stage_that_fails_ends_the_slice(tmp_path, capsys):
  """With its exit status; nothing after it is run."""
  stages = {'texts': ['generate', '--model', 'none such'], 'first': ['version']}
  assert on_gpu.run_slice(stages, tmp_path, 600) == 2
  assert not any(tmp_path.iterdir())
  assert capsys.readouterr().out.endswith('failed\n')


def test_a_command_that_does_not_stop_is_killed(monkeypatch):
  monkeypatch.setattr(on_gpu, '_SECONDS_TO_STOP', 0.2)
  reader, writer = os.pipe()
  ignoring = (
    'import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); '
    f'os.write({writer}, b"x"); time.sleep(600)'
  )
  command = [sys.executable, '-c', ignoring]
  with on_gpu.subprocess.Popen(command, pass_fds=[writer]) as run:
    os.read(reader, 1)
    on_gpu._interrupt(run)
  assert run.returncode == -9
  os.close(reader)
  os.close(writer)
