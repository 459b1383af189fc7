"""A process of several reads the slices of its own devices and no others."""

import socket
import subprocess
import sys

import jax.numpy as jnp

from specdec_jax.checkpoints import t5x
from specdec_jax.checkpoints.t5x import legacy
from tests import children

# Prints the rows of an array that this process holds.
WORKER = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from specdec_jax.checkpoints import t5x

index, address, path = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(index))
mesh = jax.make_mesh((8,), ('model',), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec('model'))
leaf = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
array = t5x.read_target(path, {'x': leaf})['x']
rows = {s.index[0].start: s.data.tolist()[0] for s in array.addressable_shards}
print([rows[start] for start in sorted(rows)])
"""


def test_chunks_of_other_processes_are_not_needed(tmp_path, monkeypatch):
  monkeypatch.setattr(legacy, '_CHUNK_ELEMENTS', 16)
  values = jnp.arange(32.0).reshape(8, 4)
  with socket.socket() as sock:
    sock.bind(('localhost', 0))
    address = f'localhost:{sock.getsockname()[1]}'
  environment = children.environment(num_devices=4) | {
    'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo'
  }
  workers = []
  for index in range(2):
    path = t5x.write_target(tmp_path / str(index), {'x': values}, step=1)
    chunks = path / 'target.x'
    assert {p.name for p in chunks.iterdir()} == {'.zarray', '0.0', '1.0'}
    (chunks / f'{1 - index}.0').unlink()
    command = [sys.executable, '-c', WORKER, str(index), address, str(path)]
    workers.append(
      subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
      )
    )
  try:
    results = [worker.communicate(timeout=120) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert [worker.returncode for worker in workers] == [0, 0], results
  assert [out.strip() for out, _ in results] == [
    str(values[:4].tolist()),
    str(values[4:].tolist()),
  ]
