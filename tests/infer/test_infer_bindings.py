"""What may be bound in gin files of `specdec infer`, and what is refused."""

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.infer.decoding import Decoding
from specdec_jax.launch import gin_launch
from tests.cli.tiny import assert_refused
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, gin_file


@pytest.mark.parametrize(
  ('more', 'bindings', 'parts'),
  [
    ((), {'MIXTURE_OR_TASK_NAME': '%gin.REQUIRED'}, ['MIXTURE_OR_TASK_NAME']),
    ((), {'MIXTURE_OR_TASK_NAME': "'no.jsonl'"}, ['no.jsonl']),
    ((), {'MIXTURE_OR_TASK_NAME': "'wmt_ende'"}, ['wmt_t2t_ende_v003']),
    ((), {'TASK_FEATURE_LENGTHS': "{'inputs': 4}"}, ["'targets': M"]),
    ((), {'TASK_FEATURE_LENGTHS': "{'inputs': 4, 'targets': 0}"}, ['got 0']),
    ((), {'Decoding.batch_sise': 4}, ['batch_sise']),
    ((), {'Decoding.batch_size': 0}, ['batch_size', '0']),
    (
      (),
      {'TASK_FEATURE_LENGTHS': "{'inputs': 12, 'targets': 1000000000}"},
      [
        'out of memory',
        'Decoding.batch_size',
        'TASK_FEATURE_LENGTHS',
        '--dry_run',
      ],
    ),
    ((), {'Decoding.top_p': 0.9}, ['top_p 0.9']),
    ((), {'Decoding.top_k': 4}, ['top_k 4']),
    ((), {'TEMPERATURE': 1.0}, ['uses TEMPERATURE', 'Decoding.temperature']),
    ((), {'Decoding.refill_size': 9}, ['9 rows', 'batch of 8']),
    (['--shard_id=2'], {'infer.num_shards': 2}, ['shard_id 2', '2 shards']),
    ((), {'infer.num_shards': 10**5}, ['num_shards is 100000', '99999']),
    ((), {'CHECKPOINT_PATH': "'nowhere'"}, ["'nowhere'"]),
    ((), {'MODEL': "'t5_1_1_small'"}, ['85', '32128']),
    ((), {'device_mesh.num_devices': 9}, ['9', 'there are 8']),
    (
      (),
      {'device_mesh.num_devices': 8, 'device_mesh.num_partitions': 8},
      ['8 devices', 'heads of 4'],
    ),
    (
      (),
      {'device_mesh.num_devices': 8, 'Decoding.batch_size': 9},
      ['batch of 9', '8'],
    ),
    (
      [gin_file('verification/greedy.gin')],
      {'Decoding.temperature': 0.5},
      ['temperature 0', '0.5'],
    ),
    ((), {'Decoding.temperature': 1e-38}, ['at least 1e-06', '1e-38']),
    (
      [gin_file('verification/speculative_sampling.gin')],
      {'rules.SpeculativeSampling.lenience': 0.5},
      ['lenience 0.5', 'verification greedy'],
    ),
    (['--gin_file=nowhere.gin'], {}, ['nowhere.gin']),
    ([f'--profile={__file__}'], {}, [__file__, 'name a folder']),
    (['--gin.DTYPE'], {}, ['--gin.DTYPE=VALUE']),
    ((), {'INFER_OUTPUT_DIR': "''"}, ['INFER_OUTPUT_DIR is empty']),
    (['--process_count=2'], {}, ['--process_index']),
    (['--coordinator_address=here'], {}, ['HOST:PORT']),
  ],
)
def test_bad_input_is_one_sentence(
  run, t5, task, tmp_path, more, bindings, parts
):
  command = argv(t5, task, tmp_path / 'out', *more)
  command += [f'--gin.{name}={value}' for name, value in bindings.items()]
  assert_refused(run(*command), *parts)
  assert not list((tmp_path / 'out').glob('*.jsonl*'))


@pytest.mark.parametrize('seed', [-1, 2**32, 1.5, True])
def test_a_seed_is_an_integer_of_32_bits(seed):
  with pytest.raises(ValueError, match=f'seed should be .* got {seed}'):
    Decoding(seed=seed)


@pytest.mark.parametrize('rule', ['lenient_greedy', 'top_beta'])
def test_relaxed_rules_are_taken_as_shipped(run, t5, task, tmp_path, rule):
  rule_file = gin_file(f'verification/{rule}.gin')
  assert run(*argv(t5, task, tmp_path, rule_file, '--dry_run')).status == 0


def test_a_rule_may_be_bound_as_a_function(run, t5, task, tmp_path):
  own = tmp_path / 'own.gin'
  own.write_text(
    'from __gin__ import dynamic_registration\n'
    'from specdec_jax import verification\n'
    'from specdec_jax.assembly import rules\n'
    'from specdec_jax.infer import decoding\n'
    'decoding.Decoding.make_rule = @rules.Custom\n'
    'rules.Custom.function = @verification.greedy\n'
    'verification.greedy.lenience = %LENIENCE\n'
  )
  command = argv(t5, task, tmp_path, f'--gin_file={own}', '--dry_run')
  assert run(*command, '--gin.LENIENCE=1.0').status == 0
  relaxed = ('--gin.LENIENCE=0.5', '--gin.Custom.temperature=1.0')
  assert run(*command, *relaxed).status == 0


@pytest.mark.parametrize(
  'name',
  [
    str(path.relative_to(infer_runs.ROOT / 'gin_configs'))
    for folder in ('drafters', 'models', 'tasks', 'verification')
    for path in sorted((infer_runs.ROOT / 'gin_configs' / folder).glob('*.gin'))
  ],
)
def test_every_gin_file_can_be_read(name):
  text = (infer_runs.ROOT / 'gin_configs' / name).read_text()
  required = [
    f"{macro} = 'b'"
    for macro in ('DRAFTER_CHECKPOINT_PATH', 'DRAFTER_TEXT')
    if macro in text and not name.startswith('models/')
  ]
  given = gin_launch.Configuration(
    files=[
      str(infer_runs.ROOT / 'gin_configs' / each)
      for each in ('models/as_stored.gin', 'runs/infer.gin', name)
    ],
    bindings=[
      "MIXTURE_OR_TASK_NAME = 'task.jsonl'",
      "TASK_FEATURE_LENGTHS = {'inputs': 4, 'targets': 4}",
      "CHECKPOINT_PATH = 'a'",
      "INFER_OUTPUT_DIR = 'd'",
      *required,
    ],
  )
  gin_launch.parse(given)
  assert 'infer.infer.output_dir' in gin_launch.bindings()
  assert '# Device: ' in text
  assert name in text or 'as_stored' in name
