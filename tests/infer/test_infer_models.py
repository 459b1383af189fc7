"""Drafters as gin files name them."""

import jax
import jax.numpy as jnp
import pytest

import specdec_jax
from specdec_jax.assembly import gamma_memory, models, settled_gamma
from specdec_jax.assembly.drafters import DraftModel, SpecDrafter
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Context
from specdec_jax.infer import decoding, gammas
from specdec_jax.models import families, presets
from specdec_jax.sharding import mesh
from tests import toy
from tests.cli import tiny
from tests.infer import infer_runs


def target_of(model: Model, *, is_dry: bool = False) -> Target:
  config = models.read_config(model)
  return Target(
    name=model.checkpoint,
    config=config,
    vocabulary=None if is_dry else models.read_vocabulary(model, config),
    sampling=TextSettings(temperature=1.0),
  )


@pytest.mark.parametrize('is_dry', [False, True])
def test_a_draft_model_gets_logits_of_its_targets_size(make_model, is_dry):
  num_tokens = len(tiny.make_tokens())
  wide = make_model('wide', vocab_size=num_tokens + 7)
  wider = make_model('wider', vocab_size=num_tokens + 9)
  target = target_of(Model(checkpoint=wide), is_dry=is_dry)
  drafting = DraftModel(model=Model(checkpoint=wider)).make(target, Fixed(4))
  assert drafting.config.vocab_size == num_tokens + 9

  def draft(params, keys, context):
    state = drafting.drafter.init(params, toy.prompt([[3, 4]]), 16)
    return drafting.drafter.propose(params, keys, context, state)[0]

  shape = jax.eval_shape(
    draft,
    families.param_shapes(drafting.config),
    jax.random.split(jax.random.key(0), 1),
    Context(tokens=jnp.zeros((1, 16), jnp.int32), lengths=jnp.full(1, 2)),
  )
  assert shape.probs.shape == (1, 4, num_tokens + 7)


def test_a_dry_run_knows_padding_from_another_vocabulary():
  target = target_of(Model(checkpoint='', sizes='t5_1_1_small'), is_dry=True)
  with pytest.raises(ValueError, match=r'32128 .*250112'):
    DraftModel(model=Model(checkpoint='', sizes='mt5_small')).make(
      target, Fixed(4)
    )


def test_a_dry_run_of_a_t5gemma(capfd, monkeypatch, tmp_path):
  """The file of 9B, with the sizes of S, which drafts for itself."""
  monkeypatch.setenv('COLUMNS', '200')
  pytest.importorskip('gin')
  done = tiny.run(
    capfd,
    'infer',
    infer_runs.gin_file('models/t5gemma_9b.gin'),
    infer_runs.gin_file('runs/infer.gin'),
    infer_runs.gin_file('drafters/model.gin'),
    "--gin.MODEL='t5gemma_s'",
    "--gin.CHECKPOINT_PATH='nowhere'",
    "--gin.DRAFTER_CHECKPOINT_PATH='nowhere'",
    "--gin.DRAFTER_MODEL='t5gemma_s'",
    '--gin.drafters.DraftModel.gamma=4',
    "--gin.MIXTURE_OR_TASK_NAME='task.jsonl'",
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 512, 'targets': 128}",
    f"--gin.INFER_OUTPUT_DIR='{tmp_path}'",
    '--gin.device_mesh.num_devices=1',
    '--dry_run',
  )
  assert done.status == 0, done
  rows = infer_runs.dry_run_rows(done.out)
  config = presets.preset('t5gemma_s')
  leaves = jax.tree.leaves(families.param_shapes(config))
  size = sum(leaf.size for leaf in leaves)
  for name in ('target parameters', 'drafter parameters'):
    assert rows[name] == [size, 2 * size, 2 * size]
  # Keys and values of both, in bfloat16: 1 + 128 + 4 + 1 of the decoder, and
  # 512 of the encoder.
  width = config.num_kv_heads * config.head_dim * config.num_decoder_layers
  caches = 2 * 2 * 2 * width * (512 + 134) * 32
  assert caches < rows['caches and state'][1] < 1.01 * caches
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('target', 'draft'),
  [
    ('qwen2_5_7b', 'qwen2_5_0_5b'),
    ('qwen3_8b', 'qwen3_0_6b'),
    ('llama_3_1_8b', 'llama_3_2_1b'),
  ],
)
def test_public_sizes_draft_for_each_other(target, draft):
  seen = target_of(Model(checkpoint='', sizes=target), is_dry=True)
  drafting = DraftModel(model=Model(checkpoint='', sizes=draft)).make(
    seen, Fixed(4)
  )
  assert drafting.config == presets.preset(draft, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
  ('num_new', 'tried_gammas'),
  [(233, (0, 2, 5, 11, 23)), (234, (0, 2, 5, 11)), (256, (0,))],
)
def test_a_gamma_without_positions_is_not_tried(
  num_new, tried_gammas, monkeypatch
):
  """Of 256; nor is it taken if it was remembered of shorter texts."""
  pytest.importorskip('sentencepiece')
  drafter = SpecDrafter(model=Model(checkpoint='ende-spec-drafter'))
  job = decoding.outline(
    Model(checkpoint='ende-mini'),
    decoding.Decoding(make_drafter=lambda: drafter, batch_size=1),
    {'inputs': 64, 'targets': num_new},
    'predict',
    mesh.device_mesh(num_devices=1),
  )
  assert job.decoder.tried_gammas == tried_gammas
  for gamma in (11, 23):
    choice = RememberedGamma(gamma=gamma, source='bench')
    monkeypatch.setattr(
      gamma_memory, 'recall', lambda where, choice=choice: choice
    )
    job.decoder.gammas.clear()  # What this process has recalled.
    expected = gamma if gamma in tried_gammas else 0
    assert gammas.remembered(job)[0] == expected


def test_what_bench_remembers_serves_infer(monkeypatch):
  pytest.importorskip('sentencepiece')
  drafter = DraftModel(model=Model(checkpoint='ende-nano'))
  job = decoding.outline(
    Model(checkpoint='ende-mini'),
    decoding.Decoding(make_drafter=lambda: drafter, batch_size=1),
    {'inputs': 64, 'targets': 24},
    'predict',
    mesh.device_mesh(num_devices=1),
  )
  loaded = specdec_jax.load(
    'ende-mini', draft_model='ende-nano', dtype='bfloat16'
  )
  place = settled_gamma.place(loaded, 1, 1)
  choice = RememberedGamma(gamma=5, source='bench')
  monkeypatch.setattr(
    gamma_memory, 'recall', lambda where: choice if where == place else None
  )
  assert gammas.remembered(job) == (5, choice.sentence)


@pytest.mark.parametrize('num_devices', [0, -1, '1'])
def test_a_mesh_has_devices(num_devices):
  with pytest.raises(ValueError, match=f'num_devices {num_devices!r}: there'):
    mesh.device_mesh(num_devices=num_devices)
