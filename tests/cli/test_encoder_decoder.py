"""Encoder-decoders under the command, with random weights."""

import json

import pytest

from specdec_jax.checkpoints import huggingface
from tests import toy_gemma
from tests.cli import tiny

T5 = ('--model', 'random:t5_nano', '--prompt', 'eight words or so', '--dtype')


def tokens(run, *options) -> list[int]:
  result = run(
    'generate', *T5, 'float32', '--max_new_tokens', '8', '--json', '-', *options
  )
  assert (result.status, result.err) == (0, '')
  (record,) = result.records()
  return record['tokens']


def test_a_t5_speculates_as_it_decodes_plainly(run):
  expected = tokens(run, '--drafter', 'none')
  assert len(expected) == 8
  drafted = tokens(run, '--draft_model', 'random:t5_nano', '--gamma', '3')
  assert drafted == expected


def test_an_encoder_decoder_needs_a_drafter_of_its_kind(run):
  result = run('generate', *T5, 'float32', '--draft_model', 'random:lm_nano')
  assert result.status == 2
  assert 'random:lm_nano decoder-only' in result.err


def write_t5gemma(folder, *, seed: int, width: int, **sizes) -> str:
  """A random T5Gemma of bytes, as transformers writes it; its path."""
  tokens = tiny.make_tokens()
  config = toy_gemma.encoder_decoder(
    len(tokens), embed_dim=width, mlp_dim=2 * width, **sizes
  )
  params = toy_gemma.params(config, seed=seed, scale=0.7)
  huggingface.save(folder, config, params)
  tiny.make_tokenizer().save(str(folder / 'tokenizer.json'))
  settings = {'eos_token': tokens[1], 'chat_template': tiny.TEMPLATE}
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return str(folder)


@pytest.fixture(scope='module')
def t5gemmas(tmp_path_factory) -> tuple[str, str]:
  """Two sizes with one vocabulary, a large one and a small one."""
  folder = tmp_path_factory.mktemp('t5gemma')
  return (
    write_t5gemma(folder / 'large', seed=1, width=24),
    write_t5gemma(folder / 'small', seed=2, width=8, num_layers=1),
  )


@pytest.mark.slow
def test_a_small_t5gemma_drafts_for_a_large_one(run, t5gemmas, prompts_file):
  large, small = t5gemmas

  def decoded(*drafter):
    result = run(
      'generate', '--model', large, *drafter,
      *('--prompts', prompts_file, '--temperature', '0'),
      *('--max_new_tokens', '12', '--dtype', 'float32', '--json', '-'),
    )  # fmt: skip
    assert (result.status, result.err) == (0, '')
    return [record['tokens'] for record in result.records()]

  plain = decoded('--drafter', 'none')
  assert max(len(set(row)) for row in plain) > 3
  assert decoded('--draft_model', small, '--gamma', '3') == plain
  # Its own draft model: every guess is right, and the window is left behind.
  assert decoded('--draft_model', large, '--gamma', '3') == plain
