"""`specdec data write --prompts`: texts by a model, with what it computed."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from specdec_jax.checkpoints import loading
from specdec_jax.training.data import written_texts
from tests.cli import tiny

NEW = 12


@pytest.fixture
def rewrite(run, model, prompts_file):
  """Writes after eight prompts, in three parts."""

  def call(out, *options, **changes):
    usual = {
      '--model': model,
      '--prompts': prompts_file,
      '--out': out,
      '--max_new_tokens': NEW,
      '--batch_size': 2,
      '--part_size': 3,
    } | changes
    arguments = (each for item in usual.items() for each in item)
    return run('data', 'write', *arguments, *options)

  return call


def files(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


def by_prompt(folder) -> dict[str, tuple]:
  """Tokens, log-probabilities and streams of every text, by prompt."""
  found = {}
  for index in written_texts.part_indices(folder):
    part = written_texts.load_part(folder, index)
    for i, num_given in enumerate(part.prompt_lengths):
      span = slice(part.offsets[i], part.offsets[i + 1])
      tokens = part.tokens[span]
      arrays = part.log_probs[span], part.streams[span]
      found[tuple(tokens[:num_given].tolist())] = tokens, *arrays
  return found


def test_texts_are_those_of_generate(
  rewrite, generate, model, prompts_file, tmp_path
):
  """The model's own text, its log-probabilities, and the streams that these
  follow from; a run that lost a part writes the same bytes again."""
  out = tmp_path / 'out'
  done = rewrite(out, '--chat', '--layers', '1', '1')
  assert (done.status, done.err) == (0, '')
  assert len(done.out.splitlines()) == 3
  texts = by_prompt(out)
  assert len(texts) == 8
  found = loading.load(model)
  kernel = np.asarray(found.params['logits_dense']['kernel'])
  scale = np.asarray(found.params['decoder_norm']['scale'])
  expected = generate(
    '--chat', '--json=-', '--drafter=none', **{'--max_new_tokens': NEW}
  )
  for record in expected.records():
    ids = found.vocabulary.encode_chat(record['prompt'])
    tokens, log_probs, streams = texts[tuple(ids)]
    assert tokens[len(ids) :].tolist() == record['tokens']
    np.testing.assert_allclose(
      log_probs[len(ids) :], record['log_probs'], rtol=1e-5, atol=1e-5
    )
    assert not log_probs[: len(ids)].any()
    assert not streams[-1].any()
    x, twice = np.split(streams[:-1].astype(np.float32), 2, axis=1)
    np.testing.assert_array_equal(x, twice)
    x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5) * scale
    logits = jax.nn.log_softmax(x @ kernel)
    own = np.take_along_axis(
      np.asarray(logits), tokens[1:, None].astype(np.int64), axis=1
    )
    # Streams are rounded to bfloat16.
    np.testing.assert_allclose(
      own[len(ids) - 1 :, 0], log_probs[len(ids) :], atol=0.05
    )

  whole = files(out)
  shutil.rmtree(written_texts.part_path(out, 1))
  assert len(rewrite(out, '--chat', '--layers', '1', '1').out.splitlines()) == 1
  assert files(out) == whole
  again = rewrite(out, '--chat', '--layers', '1', '1')
  assert again.out == f'{out} is complete already\n'
  tiny.assert_refused(
    rewrite(out, '--chat', '--layers', '1', '1', '--seed=3'),
    'seed was 0',
    str(out),
  )
  # The texts follow what is stated beside the weights.
  stated = pathlib.Path(model) / 'generation_config.json'
  ids, (tokens, *_) = next(iter(texts.items()))
  token = int(tokens[len(ids)])
  try:
    stated.write_text(f'{{"suppress_tokens": [{token}]}}')
    refused = rewrite(out, '--chat', '--layers', '1', '1')
    tiny.assert_refused(refused, 'sizes and sampling', str(out))
    other = tmp_path / 'other'
    assert rewrite(other, '--chat', '--layers', '1', '1').status == 0
    for ids, (tokens, *_) in by_prompt(other).items():
      assert token not in tokens[len(ids) :]
  finally:
    stated.unlink()


@pytest.mark.slow
def test_parts_take_temperatures_in_turn(rewrite, tmp_path):
  out = tmp_path / 'out'
  done = rewrite(out, '--temperature', '0', '1.5')
  assert done.status == 0
  lines = done.out.splitlines()
  assert ['1.5' in line for line in lines] == [False, True, False]
  assert [len(written_texts.load_part(out, i)) for i in range(3)] == [2, 3, 3]
  greedy = tmp_path / 'greedy'
  assert rewrite(greedy).status == 0
  before, after = files(greedy), files(out)
  name = 'part-{:05}/tokens.npy'.format
  assert [before[name(i)] == after[name(i)] for i in range(3)] == [
    *(True, False, True)
  ]
  assert not (out / 'part-00000' / 'streams.npy').exists()


@pytest.mark.parametrize(
  ('options', 'changes', 'parts'),
  [
    (('--layers', '2'), {}, ('layer 2', '1 to 1')),
    ((), {'--model': 'ende-nano'}, ('ende-nano', 'has an encoder')),
    (('--layers', '1'), {'--model': 'lm-nano'}, ('lm-nano', 'Llama')),
    ((), {'--max_new_tokens': 500}, ('prompt 1', '500', '128')),
    (('--system', 'a'), {}, ('system', 'chat')),
  ],
)
def test_what_cannot_be_written(rewrite, tmp_path, options, changes, parts):
  out = tmp_path / 'out'
  tiny.assert_refused(rewrite(out, *options, **changes), *parts)
  assert not written_texts.part_indices(out)


def test_damage_is_named(rewrite, tmp_path):
  out = tmp_path / 'out'
  assert rewrite(out).status == 0
  path = written_texts.part_path(out, 0)
  tokens = np.load(path / 'tokens.npy')
  np.save(path / 'tokens.npy', tokens[:-1])
  with pytest.raises(ValueError, match=r'part-00000.*log_probs'):
    written_texts.load_part(out, 0)
  (path / 'tokens.npy').write_bytes(b'')
  with pytest.raises(ValueError, match=r'tokens\.npy.*missing'):
    written_texts.load_part(out, 0)
