"""T5X's own `infer` with the plug-in against the same with its own sampler.

These run where T5X can be imported, on one device and on a mesh of four, each
in a process of its own (`t5x_runs`).
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import audit
from specdec_jax.checkpoints import t5x as t5x_checkpoints
from specdec_jax.models import families, t5
from tests import goodness_of_fit, toy, toy_t5
from tests.integrations.t5x.t5x_gins import gin_files


def _has_t5x() -> bool:
  """A folder that is called t5x, as one of the goldens is, is no package."""
  spec = importlib.util.find_spec('t5x')
  return spec is not None and spec.origin is not None


pytestmark = [
  pytest.mark.t5x,
  pytest.mark.skipif(not _has_t5x(), reason='needs T5X'),
]
ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / 'tests' / 'golden' / 't5x'
KINDS = ('encoder_decoder', 'decoder_only')
DTYPES = ('float32', 'bfloat16')
NUM_DEVICES = (1, 4)
TASK = 'golden_sentences'
LOOKUP = {'drafter': 'prompt_lookup', 'gamma': 3}
MODEL = {'drafter': 'model', 'gamma': 3}
# XLA otherwise keeps results in float32 where a program rounds them to
# bfloat16 and back, in other places of other programs.
AS_WRITTEN = '--xla_allow_excess_precision=false'
TINY = {
  'vocab_size': 5,
  'embed_dim': 8,
  'num_heads': 2,
  'head_dim': 4,
  'mlp_dim': 12,
}


def config(kind: str) -> t5.T5Config:
  """The sizes of `t5x_runs.network`."""
  return t5.T5Config(
    vocab_size=128,
    embed_dim=64,
    num_encoder_layers=2 * (kind == 'encoder_decoder'),
    num_decoder_layers=2,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
  )


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory) -> dict[str, str]:
  """Paths of the target's and the drafter's checkpoint of every kind."""
  folder = tmp_path_factory.mktemp('checkpoints')
  paths = {'encoder_decoder': str(GOLDEN / 't5x_orbax' / 'checkpoint_7')}
  for kind in KINDS:
    sizes = config(kind)
    if kind in paths:
      params = t5x_checkpoints.read_target(
        paths[kind], families.param_shapes(sizes)
      )
      draft = toy.perturb(params, seed=3, scale=0.02)
    else:
      params = toy_t5.params(sizes, seed=5)
      draft = toy.perturb(params, seed=3, scale=0.02)
      paths[kind] = str(
        t5x_checkpoints.write_target(folder / kind, params, step=3)
      )
    paths[f'{kind} draft'] = str(
      t5x_checkpoints.write_target(
        folder / f'{kind}_draft',
        draft,
        step=9,
        format='orbax' if kind == 'decoder_only' else 'legacy',
      )
    )
  return paths


def launch(command: list[str], num_devices: int, flag: str = '', **kwargs):
  """Runs a command where T5X sees `num_devices` devices, with one more flag of
  XLA."""
  flags = f'--xla_force_host_platform_device_count={num_devices} {flag}'
  env = os.environ | {
    'XLA_FLAGS': flags,
    'JAX_PLATFORMS': 'cpu',
    'TF_CPP_MIN_LOG_LEVEL': '3',
    'PYTHONPATH': f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}',
  }
  return subprocess.run(
    [sys.executable, *command],
    env=env,
    capture_output=True,
    text=True,
    **kwargs,
  )


def run_jobs(
  jobs: dict[str, dict],
  folder,
  num_devices: int,
  *,
  flag: str = '',
  code: int = 0,
):
  """Runs them all in one process; where each wrote."""
  paths = {name: folder / name for name in jobs}
  listing = folder / 'jobs.json'
  listing.write_text(
    json.dumps([{'out': str(paths[n]), **job} for n, job in jobs.items()])
  )
  done = launch(
    ['-m', 'tests.integrations.t5x.t5x_runs', str(listing)],
    num_devices,
    flag,
    cwd=ROOT,
  )
  assert done.returncode == code, done.stderr[-4000:]
  return paths


@pytest.fixture(scope='module')
def crashed(tmp_path_factory, checkpoints):
  """A run that was killed after its first chunk of two."""
  folder = tmp_path_factory.mktemp('crashed')
  job = _sampled(checkpoints)
  run_jobs({'restarted': job | {'crash_after': 1}}, folder, 1, code=17)
  return folder, job


def _sampled(checkpoints):
  return {
    'kind': 'encoder_decoder',
    'dtype': 'float32',
    'checkpoint': checkpoints['encoder_decoder'],
    'settings': MODEL | {'temperature': 0.7},
    'draft': checkpoints['encoder_decoder draft'],
  }


@pytest.fixture(scope='module')
def outputs(tmp_path_factory, checkpoints):
  """Everything that one device and four are asked for, by name."""
  by_devices = {}
  for num_devices in NUM_DEVICES:
    jobs = {}
    for kind in KINDS:
      for dtype in DTYPES:
        base = {
          'kind': kind,
          'dtype': dtype,
          'checkpoint': checkpoints[kind],
          'num_partitions': 2 if num_devices > 1 else 1,
        }
        name = f'{kind}-{dtype}'
        draft = {'draft': checkpoints[f'{kind} draft']}
        jobs[f'{name}-own'] = base
        jobs[f'{name}-lookup'] = base | {'settings': LOOKUP}
        jobs[f'{name}-model'] = base | {'settings': MODEL} | draft
        if num_devices == 1 and dtype == 'float32':
          jobs |= _single_device_jobs(name, base, draft, checkpoints[kind])
    folder = tmp_path_factory.mktemp(f'devices_{num_devices}')
    by_devices[num_devices] = run_jobs(jobs, folder, num_devices)
  return by_devices


@pytest.fixture(scope='module')
def as_written(tmp_path_factory, checkpoints):
  """Those in bfloat16 on one device, without excess precision."""
  jobs = {}
  for kind in KINDS:
    base = {
      'kind': kind,
      'dtype': 'bfloat16',
      'checkpoint': checkpoints[kind],
    }
    draft = {'draft': checkpoints[f'{kind} draft']}
    jobs[f'{kind}-own'] = base
    jobs[f'{kind}-none'] = base | {'settings': {'drafter': 'none'}}
    jobs[f'{kind}-lookup'] = base | {'settings': LOOKUP}
    jobs[f'{kind}-model'] = base | {'settings': MODEL} | draft
  folder = tmp_path_factory.mktemp('as_written')
  return run_jobs(jobs, folder, 1, flag=AS_WRITTEN)


def _single_device_jobs(name, base, draft, checkpoint):
  model = base | {'settings': MODEL} | draft
  jobs = {
    f'{name}-decode_fn': base | {'decode_fn': LOOKUP},
    f'{name}-additive': model | {'is_additive': True},
    f'{name}-itself': model | {'draft': checkpoint},
    f'{name}-sampled': model | {'settings': MODEL | {'temperature': 0.7}},
  }
  for shard in range(2):
    shard_args = {'shard_id': shard, 'num_shards': 2}
    jobs[f'{name}-own-{shard}'] = base | shard_args
    jobs[f'{name}-model-{shard}'] = model | shard_args
  return jobs


def read(folder, *, shard: int = 0, num_shards: int = 1) -> str:
  name = f'{TASK}-predict_with_aux.jsonl-{shard:05}-of-{num_shards:05}'
  assert (folder / f'{name}.COMPLETED').exists()
  return (folder / name).read_text()


def without_aux(text: str) -> str:
  """The same lines, byte by byte, but for what is in `aux`."""
  lines = []
  for line in text.splitlines(keepends=True):
    before, marker, aux = line.partition(', "aux": ')
    assert marker
    assert json.loads(aux.rstrip('\n')[:-1])
    lines.append(before)
  return '\n'.join(lines)


def total(text: str, counter: str) -> int:
  return sum(json.loads(line)['aux'][counter] for line in text.splitlines())


@pytest.mark.parametrize('num_devices', NUM_DEVICES)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('drafter', ['lookup', 'model'])
def test_greedy_output_is_that_of_t5x(
  outputs, kind, dtype, drafter, num_devices
):
  paths = outputs[num_devices]
  own = read(paths[f'{kind}-{dtype}-own'])
  speculative = read(paths[f'{kind}-{dtype}-{drafter}'])
  pairs = zip(
    without_aux(speculative).splitlines(),
    without_aux(own).splitlines(),
    strict=True,
  )
  # XLA may round less than the programs say, and two programs elsewhere.
  num_different = sum(one != other for one, other in pairs)
  most = {'encoder_decoder': 1, 'decoder_only': 4}
  assert num_different <= (most[kind] if dtype == 'bfloat16' else 0)
  assert len(own.splitlines()) == 16
  assert total(speculative, 'num_accepted') > 0
  if (kind, drafter) != ('encoder_decoder', 'lookup'):
    assert total(speculative, 'num_target_runs') < total(
      speculative, 'num_tokens'
    )


@pytest.mark.parametrize('drafter', ['none', 'lookup', 'model'])
@pytest.mark.parametrize('kind', KINDS)
def test_bfloat16_output_is_that_of_t5x_without_excess_precision(
  as_written, kind, drafter
):
  own = read(as_written[f'{kind}-own'])
  speculative = read(as_written[f'{kind}-{drafter}'])
  assert without_aux(speculative) == without_aux(own)
  assert len(own.splitlines()) == 16
  assert (total(speculative, 'num_accepted') > 0) == (drafter != 'none')


@pytest.mark.parametrize('kind', KINDS)
def test_cache_writes_that_add_give_other_output(outputs, kind):
  paths = outputs[1]
  assert without_aux(read(paths[f'{kind}-float32-additive'])) != without_aux(
    read(paths[f'{kind}-float32-own'])
  )


@pytest.mark.parametrize('kind', KINDS)
def test_decode_fn_of_the_stock_models(outputs, kind):
  paths = outputs[1]
  assert without_aux(read(paths[f'{kind}-float32-decode_fn'])) == without_aux(
    read(paths[f'{kind}-float32-own'])
  )


@pytest.mark.parametrize('kind', KINDS)
def test_the_target_as_its_own_drafter_accepts_everything(outputs, kind):
  text = read(outputs[1][f'{kind}-float32-itself'])
  assert total(text, 'num_accepted') == total(text, 'num_drafted') > 50
  other = read(outputs[1][f'{kind}-float32-model'])
  assert total(other, 'num_accepted') < total(other, 'num_drafted')


@pytest.mark.parametrize('kind', KINDS)
def test_shards(outputs, kind):
  paths = outputs[1]
  texts = []
  for shard in range(2):
    sharding = {'shard': shard, 'num_shards': 2}
    name = f'{kind}-float32-model-{shard}'
    texts.append(without_aux(read(paths[name], **sharding)))
    own = read(paths[f'{kind}-float32-own-{shard}'], **sharding)
    assert texts[-1] == without_aux(own)
  whole = without_aux(read(paths[f'{kind}-float32-own']))
  together = sorted('\n'.join(texts).splitlines())
  assert together == sorted(whole.splitlines())


def test_a_restart_goes_on_where_the_crash_was(crashed, outputs):
  folder, job = crashed
  unfinished = folder / 'restarted' / f'tmp-{TASK}-00000-of-00001'
  names = [path.name for path in unfinished.iterdir()]
  assert [n[-20:] for n in names if n.endswith('.COMPLETED')] == [
    'chunk00000.COMPLETED'
  ]
  paths = run_jobs({'restarted': job}, folder, 1)
  assert read(paths['restarted']) == read(
    outputs[1]['encoder_decoder-float32-sampled']
  )


@pytest.mark.parametrize('kind', KINDS)
def test_samples_follow_the_law_of_t5x_s_own_sampler(tmp_path, kind):
  num_rows = 20_000
  base = {'kind': kind, 'num_rows': num_rows}
  settings = {'temperature': 1.0, 'gamma': 2}
  paths = run_jobs(
    {
      'own': base,
      'model': base | {'settings': MODEL | settings},
      'lookup': base | {'settings': LOOKUP | settings},
      'block': base
      | {'settings': MODEL | settings | {'verification': 'block'}},
      'rbg': base | {'settings': MODEL | settings, 'key_impl': 'rbg'},
      'unsafe_rbg': base
      | {'settings': LOOKUP | settings, 'key_impl': 'unsafe_rbg'},
      # A distribution that must be told apart.
      'warm': base | {'settings': MODEL | settings | {'temperature': 1.2}},
    },
    tmp_path,
    1,
  )
  sizes = t5.T5Config(
    num_encoder_layers=int(kind == 'encoder_decoder'),
    num_decoder_layers=1,
    **TINY,
  )
  after = goodness_of_fit.teacher(
    toy_t5.families.language_model(sizes),
    toy_t5.params(sizes, seed=1),
    (0,),
    sampling=goodness_of_fit.Sampling(),
    num_new=3,
    encoder_row=(3, 4, 2, 1) if kind == 'encoder_decoder' else None,
  )
  reports = {}
  for name, path in paths.items():
    tokens = np.load(f'{path}.npy')
    is_eos = tokens == 1
    counts = np.where(is_eos.any(1), is_eos.argmax(1) + 1, 3)
    drawn = np.where(np.arange(3) < counts[:, None], tokens, -1)
    reports[name] = audit.audit(
      lambda prompt, num, seed, drawn=drawn: drawn,
      lambda prefix: after(prefix[1:]),
      [(0,)],
      num_tokens=3,
      seeds=(0,),
      eos_ids=(1,),
      false_alarm_rate=goodness_of_fit.FALSE_ALARM_RATE,
    )
  print({name: report.p_value for name, report in reports.items()})
  for name in reports.keys() - {'warm'}:
    assert not reports[name].is_rejected, (name, reports[name])
  assert reports['warm'].is_rejected


@pytest.mark.parametrize(
  ('kind', 'added'),
  [
    ('encoder_decoder', ['encoder_decoder', 'draft_model_encoder_decoder']),
    ('encoder_decoder', ['decode_fn']),
    ('decoder_only', ['decoder_only', 'draft_model_decoder_only']),
    ('decoder_only', ['decoder_only']),
  ],
)
def test_gin_files_join_a_model_gin(
  checkpoints, outputs, tmp_path, kind, added
):
  """The command of docs/t5x.md, with more files and bindings."""
  model, draft = gin_files(kind, tmp_path)
  t5x_dir = pathlib.Path(importlib.util.find_spec('t5x').origin).parents[1]
  gins = ROOT / 'gin_configs'
  files = [model, 't5x/configs/runs/infer.gin']
  files += [str(gins / 't5x' / f'{name}.gin') for name in added]
  bindings = {
    'MIXTURE_OR_TASK_NAME': TASK,
    'MIXTURE_OR_TASK_MODULE': 'tests.integrations.t5x.t5x_runs',
    'TASK_FEATURE_LENGTHS': {'inputs': 16, 'targets': 16},
    'CHECKPOINT_PATH': checkpoints[kind],
    'INFER_OUTPUT_DIR': str(tmp_path / 'out'),
    'DROPOUT_RATE': 0.0,
    'DatasetConfig.batch_size': 8,
    'RestoreCheckpointConfig.dtype': 'float32',
    'infer.checkpoint_ds_iter': False,
    'infer.mode': 'predict_with_aux',
  }
  if kind == 'decoder_only':
    # Its model gin samples at temperature 1, and so the plug-in would.
    bindings['temperature_sample.temperature'] = 0.0
  if len(added) == 2:
    files.append(draft)
    bindings['DRAFT_CHECKPOINT_PATH'] = checkpoints[f'{kind} draft']
  command = ['-m', 't5x.infer', f'--gin_search_paths={t5x_dir},{gins}']
  command += [f'--gin_file={name}' for name in files]
  command += [f'--gin.{name}={value!r}' for name, value in bindings.items()]
  done = launch(command, 1, cwd=t5x_dir)
  assert done.returncode == 0, done.stderr[-4000:]
  own = read(outputs[1][f'{kind}-float32-own'])
  assert without_aux(read(tmp_path / 'out')) == without_aux(own)
  # The user's own transformation ran, and saw the target alone.
  assert 'draft' not in (tmp_path / 'noted').read_text().split()


def test_golden_weights_are_float32():
  """Or the comparison in float32 would not be one."""
  params = t5x_checkpoints.read_target(
    GOLDEN / 't5x_orbax', families.param_shapes(config('encoder_decoder'))
  )
  kernel = params['decoder']['logits_dense']['kernel']
  assert kernel.dtype == jnp.float32
  assert np.any(np.asarray(kernel) != np.asarray(kernel.astype(jnp.bfloat16)))
