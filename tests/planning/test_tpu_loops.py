"""What the compiler of TPUs makes of the loops that
`tests/decoding/test_compilation.py` has compiled for the CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

from specdec_jax import lazy
from tests.decoding.test_compilation import TPU_PROGRAMS, TREE_PROGRAMS

pytestmark = pytest.mark.optimized

_TPU_PROGRAM = """
import jax
from jax.experimental import topologies
from specdec_jax.planning import hlo
from specdec_jax import lazy
from tests.decoding import test_compilation as t
from tests.planning import copies

topology = topologies.get_topology_desc(
  platform='tpu', topology_name='v4:1x1x1', chips_per_host_bounds=[1, 1, 1])
device = jax.sharding.SingleDeviceSharding(topology.devices[0])
on_device = lambda tree: jax.tree.map(
  lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), tree)

def check(name, batch_size, run, arguments):
  text = jax.jit(run).lower(*on_device(arguments)).compile().as_text()
  assert 'dynamic-update-slice' in text
  # Fusions lay out an operand anew on its way to a product, which is no copy.
  found = copies.in_loops(hlo.Program(text), t.cache_size(batch_size))
  print(name, batch_size, 'cache copies in the loop:', len(found))
  assert not found, found

for name, batch_size in t.TPU_PROGRAMS:
  rule = t.RULES[t.lossless(name)]
  method, *arguments = t.loop_of(name, rule, batch_size)
  check(name, batch_size, lambda params, state: t.speculative.run(
    params, state, method=method), arguments)
for name, batch_size in t.TREE_PROGRAMS:
  run, *arguments = t.tree_loop_of(name, batch_size)
  check('tree, ' + name, batch_size, run, arguments)
for beams in lazy.installed('tests.contrib.beams.test_compiled_beams:PROGRAMS'):
  for name, batch_size, program in beams:
    run, *arguments = program()
    check(name, batch_size, run, arguments)
"""


@pytest.mark.slow
def test_the_tpu_compiler_accepts_the_loop_and_copies_no_cache():
  """Compiles for a TPU v4 chip that need not be there."""
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('needs libtpu: pip install -e ".[tpu]"')
  env = {
    **os.environ,
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v4-8',
    'JAX_PLATFORMS': 'cpu',
  }
  result = subprocess.run(
    [sys.executable, '-c', _TPU_PROGRAM],
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr[-3000:]
  num_programs = len(TPU_PROGRAMS + TREE_PROGRAMS)
  for beams in lazy.installed(
    'tests.contrib.beams.test_compiled_beams:PROGRAMS'
  ):
    num_programs += len(beams)
  assert result.stdout.count('loop: 0') == num_programs
