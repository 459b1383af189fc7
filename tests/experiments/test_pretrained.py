"""From runs to shipped folders and their cards, on tiny models."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('orbax.checkpoint')
pytest.importorskip('sentencepiece')
pytest.importorskip('sacrebleu')

import specdec_jax
from experiments.pretrained import card, measurement, measuring
from experiments.pretrained.__main__ import main
from specdec_jax.assembly.rules import Greedy
from specdec_jax.base import Params
from specdec_jax.checkpoints import formats, loading, orbax, pretrained
from specdec_jax.decoding import autoregressive
from specdec_jax.decoding.method import Method
from specdec_jax.launch import compilation_cache
from specdec_jax.sampling import logits
from specdec_jax.text import vocabulary_files
from specdec_jax.training.data import written_texts
from tests import toy, toy_block, toy_eagle, toy_t5
from tests.cli import tiny

# Wider than the vocabulary of the goldens, which has 85 pieces.
V = 128
SIZES = {'relpos_num_buckets': 32, 'relpos_max_distance': 128}
CONFIG = toy_t5.config(V, **SIZES)
GIN = """
# Macros:
MODEL = 'tiny'
MODEL_DIR = '/a/machine/runs/{name}'
OPTIMIZER = @optimizers.adafactor()
TOKENS = \\
    ['{tokens}',
     '{tokens}_of_another_task']
TRAIN_STEPS = 100
"""
TEXTS = ('the cat', 'a dog and a cat', 'the end', 'one two', 'a b c d e f')


def write_run(folder, config, params, tokens, words):
  folder.mkdir()
  orbax.save(folder / 'model', config, params)
  if words is not None:
    vocabulary_files.write(folder / 'model', words)
  lines = [
    {'step': 50, 'nats': 3.5, 'targets': 7200.0, 'targets_per_second': 1.0},
    {'step': 50, 'validation_nats': 3.0, 'validation_accuracy': 0.25},
    {'step': 100, 'nats': 2.5, 'targets': 3600.0, 'targets_per_second': 1.0},
    {'step': 100, 'validation_nats': 2.0, 'validation_accuracy': 0.5},
  ]
  (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  gin = GIN.format(name=folder.name, tokens=tokens)
  (folder / 'config.gin').write_text(gin)


@pytest.fixture(scope='module')
def folder(request, tmp_path_factory):
  """A target, a perturbed copy of it that drafts, and another."""
  folder = tmp_path_factory.mktemp('runs')
  golden = request.config.rootpath / 'tests' / 'golden' / 't5x'
  words = vocabulary_files.read(golden / 'tiny_sp.model', extra_ids=0)
  tokens = folder / 'tokens'
  split = {'examples': 9, 'target_tokens': 99, 'sha256': 'f00'}
  for path in (tokens, folder / 'tokens_of_another_task'):
    path.mkdir(exist_ok=True)
    description = json.dumps({'splits': {'train': split}})
    (path / 'tokens.json').write_text(description)
  release = {'version': '1.0', 'codename': 'toy'}
  manifest = json.dumps({'archive': {'release': release}})
  (folder / 'manifest.json').write_text(manifest)
  params = toy_t5.params(CONFIG, seed=0)
  key = jax.random.key(1)
  for name, scale in (('target', 0.0), ('near', 0.05), ('far', 0.2)):
    noisy = jax.tree.map(
      lambda x, scale=scale: x + scale * jax.random.normal(key, x.shape),
      params,
    )
    write_run(folder / name, CONFIG, noisy, tokens, words)
  block = toy_block.config(V, max_positions=80, **SIZES)
  weights = toy_block.params(block, seed=0)
  write_run(folder / 'block', block, weights, tokens, None)
  lines = [json.dumps({'inputs': t, 'targets': t[::-1]}) for t in TEXTS]
  (folder / 'test.jsonl').write_text('\n'.join(lines))
  return folder


@pytest.fixture
def shipped(tmp_path, monkeypatch):
  monkeypatch.setattr(pretrained, 'FOLDER', tmp_path / 'pretrained')
  monkeypatch.setattr(compilation_cache, 'enable', lambda: None)
  return tmp_path / 'pretrained'


def ship(folder, name, *runs):
  return main(
    [
      'ship',
      *(f'--run={folder / run}' for run in runs),
      f'--name={name}',
      f'--manifest={folder / "manifest.json"}',
      '--device=an abacus',
    ]
  )


@pytest.mark.slow
def test_a_pair_is_shipped_and_measured(folder, shipped, capsys):
  assert ship(folder, 'toy-mini', 'target') == 0
  assert ship(folder, 'toy-nano', 'far', 'near') == 0
  assert pretrained.names() == ('toy-mini', 'toy-nano')
  assert sorted(p.name for p in shipped.rglob('*') if p.is_file()) == sorted(
    ['spiece.model', 'tokenizer_config.json']
    + 2 * ['README.md', 'card.json', 'config.json', 'model.safetensors']
  )
  text = (shipped / 'toy-nano' / 'README.md').read_text()
  assert '/a/machine' not in text
  assert str(folder) not in text
  for words in (
    'an abacus',
    'Debian 1.0 (toy)',
    '### far',
    '### near',
    '`f00`',
    '- `tokens_of_another_task`: 9 examples',
    "/tokens_of_another_task'], TRAIN_STEPS 100",
  ):
    assert words in text
  assert '100 steps, 10,800 target tokens, 3.0 hours' in text
  assert '| 50 | 2.0 | 3.500 | 3.000 | 0.250 |' in text
  bench = {
    **dict.fromkeys(measuring._BENCH, 1.5),
    **{'model': 'toy-mini', 'drafter': 'toy-nano'},
  }
  (shipped.parent / 'bench.json').write_text(json.dumps(bench))
  capsys.readouterr()
  assert (
    main(
      [
        *('measure', '--target=toy-mini', '--drafter=toy-nano'),
        f'--plain_drafter={folder / "far" / "model"}',
        f'--task={folder / "test.jsonl"}',
        *('--metric=bleu', '--gamma=2', '--max_new_tokens=12'),
        *('--batch_size=3', f'--bench={shipped.parent / "bench.json"}'),
      ]
    )
    == 0
  )
  found = json.loads(capsys.readouterr().out)
  task = f'{folder.name}/test.jsonl'
  assert found['toy-mini']['test'][task]['bleu'] < 20
  drafting = found['toy-nano']['drafting'][task]
  [decoding] = drafting['decoding']
  assert decoding['rows'] == len(TEXTS)
  assert decoding['rows_that_differ_from_greedy'] == 0
  for each in drafting['alpha'].values():
    near, far = (drafter['value'] for drafter in each['drafters'])
    assert 0 <= far < near <= 1
    assert each['difference']['value'] == pytest.approx(near - far)
  # The same rate from what was accepted, on other positions of the same text.
  greedy = drafting['alpha']['greedy']['drafters'][0]['value']
  rate = decoding['accepted_per_tested']['value']
  assert rate == pytest.approx(greedy, abs=0.15)
  assert card.load('toy-nano')['drafting'] == {task: drafting}
  text = (shipped / 'toy-nano' / 'README.md').read_text()
  assert f'{greedy:.3f} (' in text
  assert f'in 0 of {len(TEXTS)} rows' in text
  assert '1.50 times as many (predicted 1.50' in text


@pytest.mark.slow
def test_rows_that_differ_are_counted(folder, shipped, monkeypatch, capsys):
  """A lenient rule is not greedy decoding, and the card says so."""
  monkeypatch.setattr(measurement, 'RULE', Greedy(lenience=1e-6))
  assert ship(folder, 'toy-mini', 'target') == 0
  capsys.readouterr()
  status = main(
    [
      *('measure', '--target=toy-mini', f'--drafter={folder / "block/model"}'),
      f'--task={folder / "test.jsonl"}',
      *('--gamma=2', '--max_new_tokens=12', '--batch_size=5'),
    ]
  )
  assert status == 0
  found = json.loads(capsys.readouterr().out)
  assert 'test' not in found['toy-mini']
  [drafting] = found[str(folder / 'block/model')]['drafting'].values()
  [decoding] = drafting['decoding']
  assert decoding['rows_that_differ_from_greedy'] > 0


def test_what_cannot_be_shipped(folder, shipped, tmp_path, capsys):
  copy = tmp_path / 'run'
  shutil.copytree(folder / 'target', copy)
  shutil.rmtree(copy / 'model')
  assert ship(tmp_path, 'toy-mini', 'run') == 2
  assert 'no finished run' in capsys.readouterr().err
  assert ship(folder, 'toy-mini', 'target') == 0
  assert ship(folder, 'toy-mini', 'target') == 2
  assert 'already exists' in capsys.readouterr().err
  (shipped / 'spiece.model').write_bytes(b'another')
  assert ship(folder, 'toy-nano', 'near') == 2
  assert 'not the vocabulary' in capsys.readouterr().err
  assert pretrained.names() == ('toy-mini',)


def test_a_shipped_model_is_trained_further(folder, shipped, tmp_path):
  assert ship(folder, 'toy-mini', 'target') == 0
  shutil.copytree(folder / 'near', tmp_path / 'further')
  with (tmp_path / 'further/config.gin').open('a') as gin:
    gin.write("\nINITIAL_CHECKPOINT_PATH = 'toy-mini'\n")
  arguments = ['--run', str(tmp_path / 'further'), '--name=toy-mini']
  arguments += ['--manifest', str(folder / 'manifest.json'), '--device=two']
  (shipped / 'toy-mini' / formats.DRAFT_VOCABULARY).write_text('{"ids": [1]}')
  assert main(['ship', *arguments, '--overwrite']) == 0
  assert (shipped / 'toy-mini' / formats.DRAFT_VOCABULARY).is_file()
  runs = [run['run'] for run in card.load('toy-mini')['training']]
  assert runs == ['target', 'further']


# Linen's LayerNorm promotes bfloat16 to float32 by itself.
@jax.numpy_dtype_promotion('standard')
def test_other_networks_are_shipped_in_our_format(
  folder, shipped, tmp_path, capsys
):
  config = dataclasses.replace(CONFIG, num_encoder_layers=0)
  words = vocabulary_files.read(folder / 'target' / 'model')
  weights = toy_t5.params(config, seed=3)
  write_run(tmp_path / 'lm', config, weights, folder / 'tokens', words)
  assert ship(tmp_path, 'lm-toy', 'lm') == 2
  assert 'no manifest' in capsys.readouterr().err
  assert pretrained.names() == ()
  shutil.copy(folder / 'manifest.json', tmp_path)
  assert ship(tmp_path, 'lm-toy', 'lm') == 0
  assert ship(folder, 'draft-toy', 'block') == 0
  model = loading.load('lm-toy', dtype=jnp.bfloat16)
  assert not model.config.num_encoder_layers
  drafter = formats.read_config(shipped / 'draft-toy')
  assert drafter.max_positions == 80
  card_text = (shipped / 'draft-toy' / 'README.md').read_text()
  assert 'It only drafts' in card_text


def write_eagle_run(folder, target):
  """A drafter for the target, and a run that says it learned from its texts."""
  texts = folder / 'texts'
  folder.mkdir()
  about = {'model': 'tiny', 'dtype': 'bfloat16', 'prompts_sha256': 'f00'}
  written_texts.begin(texts, about | {'temperatures': [0.0, 0.7]})
  tokens = [np.arange(5), np.arange(7)]
  part = written_texts.join(
    tokens, [2, 3], [np.zeros(len(text)) for text in tokens], None
  )
  written_texts.save_part(texts, 0, part)
  sizes = toy_eagle.config(
    tiny.make_config(num_layers=2), norm_before_next=True
  )
  orbax.save(folder / 'model', sizes, toy_eagle.params(sizes, seed=1))
  lines = [
    {'step': 10, 'nats': 4.5, 'alpha_1': 0.25, 'alpha_2': 0.125}
    | {'targets': 7200.0, 'targets_per_second': 2.0},
    {'step': 10, 'validation_nats': 5.0, 'validation_accuracy': 0.5}
    | {'validation_alpha_2': 0.0625, 'validation_alpha_1': 0.375},
  ]
  (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  gin = f"TARGET = '{target}'\nTEXTS = '{texts}'\nTRAIN_STEPS = 10\n"
  (folder / 'config.gin').write_text(gin)


@pytest.mark.slow
def test_an_eagle_drafter_is_shipped_and_drafts_by_its_name(
  shipped, tmp_path, capfd
):
  pytest.importorskip('matplotlib')
  model = tiny.write_model(tmp_path / 'model', num_layers=2)
  write_eagle_run(tmp_path / 'run', model)
  command = (
    *('ship', f'--run={tmp_path / "run"}', '--name=toy-eagle'),
    *('--device=an abacus', '--limits=Poems.', '--license=As its target.'),
  )
  assert main(command) == 0
  # Once more, over its own card.
  assert main([*command, '--overwrite']) == 0
  assert sorted(path.name for path in (shipped / 'toy-eagle').iterdir()) == [
    *('README.md', 'card.json', 'config.json', 'curve.svg'),
    'model.safetensors',
  ]
  rows = [
    {**dict.fromkeys(card._OF_SUITE), 'target': 'tiny', 'drafter': drafter}
    | {'category': 'chat', 'tokens_per_target_run': 1.75, 'speedup': 1.25}
    for drafter in ('toy-eagle', 'toy-eagle+lookup', 'prompt_lookup', 'ngram')
  ]
  suite = {'device': 'an abacus', 'dtype': 'float32', 'rows': rows}
  (tmp_path / 'suite.json').write_text(json.dumps(suite))
  command = ['suite', f'--suite={tmp_path / "suite.json"}']
  assert main([*command, '--name=toy-eagle']) == 0
  capfd.readouterr()
  assert main([*command, '--name=other']) == 2
  assert 'drafter other' in capfd.readouterr().err
  text = (shipped / 'toy-eagle' / 'README.md').read_text()
  for words in (
    'EAGLE-3 drafter for ',
    "It can draft 263 of the target's 264 tokens",
    'temperatures 0, 0.7 in turn, 7 tokens written; SHA-256 of the prompts',
    '| 10 | 1.0 | 4.500 | 5.000 | 0.500 | 0.375 | 0.062 |',
    '![The learning curve](curve.svg)',
    '## The benchmark suite with tiny',
    '| chat | toy-eagle+lookup |',
    '| chat | prompt_lookup |',
    '## Limits\n\nPoems.\n',
    '## License\n\nAs its target.\n',
  ):
    assert words in text, words
  assert str(tmp_path) not in text
  assert 'ngram' not in text

  found = {}
  for name, more in (
    ('plain', ('--drafter', 'none')),
    (
      'eagle',
      ('--drafter', 'eagle', '--draft_model', 'toy-eagle', '--gamma', 2),
    ),
  ):
    result = tiny.run(
      capfd,
      *('generate', '--model', model, '--prompt', 'the in the in', *more),
      *('--max_new_tokens', 12, '--json', '-'),
    )
    assert result.status == 0, result
    [found[name]] = result.records()
  assert found['eagle']['tokens'] == found['plain']['tokens']
  assert found['eagle']['statistics']['drafted'] > 0
  decoder = specdec_jax.load(
    model, drafter='eagle', draft_model='toy-eagle', gamma=2
  )
  [completion] = specdec_jax.generate(
    decoder, ['the in the in'], max_new_tokens=12
  )
  assert list(completion.tokens) == found['plain']['tokens']


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [0.0, 0.9])
def test_sums_over_given_texts_are_those_of_the_distributions(temperature):
  num_words = 8
  to_probs = logits.standardize(temperature=temperature)
  target = toy.toy(num_words)
  weights = [toy.toy_params(num_words, seed=seed) for seed in (1, 2)]
  weights.append(toy.perturb(weights[0], seed=3))
  params = Params(weights[0], tuple(weights))
  prompt = toy.prompt([[1, 2, 3], [4, 2]], row_ids=np.arange(2))
  output = jax.jit(
    lambda params: autoregressive.generate(
      params,
      jax.random.key(0),
      prompt,
      method=Method(target=target, logits_to_probs=to_probs, eos_id=0),
      max_len=14,
    )
  )(params)
  sums, counts = jax.jit(
    lambda params: measurement.row_sums(
      params,
      prompt,
      output.tokens,
      output.lengths,
      target=target,
      draft_models=[target] * 3,
      logits_to_probs=to_probs,
    )
  )(params)
  np.testing.assert_array_equal(
    counts, np.asarray(output.lengths) - np.asarray(prompt.decoder_lengths)
  )
  np.testing.assert_allclose(sums[0], counts, rtol=1e-6)  # The target itself.
  for found, tree in zip(sums[1:], weights[1:], strict=True):
    for row, length in enumerate(np.asarray(output.lengths)):
      text = np.asarray(output.tokens[row])
      begin = int(prompt.decoder_lengths[row])
      pairs = np.stack(
        [text[begin - 2 : length - 2], text[begin - 1 : length - 1]]
      )
      p, q = (
        np.asarray(to_probs(np.asarray(each['table'])[pairs[0], pairs[1]]))
        for each in (weights[0], tree)
      )
      expected = np.minimum(p, q).sum()
      assert found[row] == pytest.approx(expected, rel=1e-5)
  assert (np.asarray(sums[1]) < 0.9 * np.asarray(counts)).all()
