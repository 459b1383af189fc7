"""Two processes train as one process does on the same mesh."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from specdec_jax.sharding import mesh as meshes
from specdec_jax.training import loop, losses, optimizers, recipes
from specdec_jax.training.data import datasets
from tests import children, toy_t5
from tests.training import tiny_runs

WORKER = """
import json, pathlib, sys
import jax
from tests.training import test_two_processes

index, address, folder = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index))
print(json.dumps(test_two_processes.reports(pathlib.Path(folder))))
"""


def reports(folder):
  """What two steps and a validation report, by devices per copy of the model,
  of two devices; and the targets that a model writes."""
  found = {}
  for num_partitions in (1, 2):
    mesh = meshes.make(num_partitions=num_partitions, devices=jax.devices()[:2])
    rows = []
    with jax.set_mesh(mesh):
      loop.train(
        config=tiny_runs.CONFIG,
        dataset=datasets.from_token_files(
          str(folder / 'tokens'), batch_size=8, lengths=tiny_runs.LENGTHS
        ),
        optimizer=optimizers.adamw(0.003),
        loss_fn=losses.supervised_loss(tiny_runs.CONFIG),
        model_dir=folder / f'run_{num_partitions}',
        schedule=loop.Schedule(train_steps=2),
        report=lambda step, metrics, rows=rows: rows.append(
          {k: v for k, v in metrics.items() if 'seconds' not in k}
        ),
      )
      if num_partitions == 1:  # Rows are split over the processes.
        params = toy_t5.params(tiny_runs.CONFIG, seed=0)
        shardings = meshes.parameter_shardings(mesh, params)
        written = recipes.rewrite_targets(
          tiny_runs.CONFIG,
          jax.device_put(params, shardings),
          tiny_runs.examples(6),
          recipes.Rewriting(
            max_new_tokens=8,
            eos_id=tiny_runs.EOS,
            vocab_size=tiny_runs.CONFIG.vocab_size,
            batch_size=4,
          ),
        )
        rows.append({'written': written.targets.tokens.tolist()})
    found[str(num_partitions)] = rows
  return found


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tmp_path):
  """Whether they share the rows of a batch or, with a model axis that spans
  both, each need all of them."""
  tiny_runs.write_tokens(tmp_path / 'tokens', train=90, validation=20)
  with socket.socket() as sock:
    sock.bind(('localhost', 0))
    address = f'localhost:{sock.getsockname()[1]}'
  two = tmp_path / 'two'
  two.mkdir()
  (two / 'tokens').symlink_to(tmp_path / 'tokens')
  environment = children.environment() | {
    'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo'
  }
  workers = [
    subprocess.Popen(
      [sys.executable, '-c', WORKER, str(index), address, str(two)],
      env=environment,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    for index in range(2)
  ]
  try:
    expected = reports(tmp_path)
    results = [worker.communicate(timeout=180) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert not any(worker.returncode for worker in workers), results
  written = expected['1'].pop()
  for out, _ in results:
    found = json.loads(out.splitlines()[-1])
    assert found.keys() == expected.keys() == {'1', '2'}
    assert found['1'].pop() == written
    for name, rows in expected.items():
      assert [row.keys() for row in rows] == [r.keys() for r in found[name]]
      for ours, theirs in zip(found[name], rows, strict=True):
        np.testing.assert_allclose(
          list(ours.values()), list(theirs.values()), rtol=1e-5, err_msg=name
        )
