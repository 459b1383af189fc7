"""T5s under the command, and acceptance by decree. Their weights are random."""

import json

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


def test_simulated_figures_say_so_everywhere(run, model, tmp_path):
  path = tmp_path / 'figures.json'
  result = run(
    'bench',
    *('--model', model, '--draft_model', model, '--prompt', 'the in the'),
    *('--simulate_alpha', '0', '--max_new_tokens', '6', '--gamma', '2'),
    *('--repeats', '1', '--plain_dtypes', 'float32', '--json', path),
  )
  assert (result.status, result.err) == (0, '')
  figures = json.loads(path.read_text())
  assert figures['is_simulated']
  assert figures['verification'] == 'simulated'
  assert figures['simulate_alpha'] == 0
  assert figures['identical'] is None
  # The draft model is the target, and yet nothing passes.
  assert figures['alpha'] == 0
  assert figures['target_runs'] == 6
  assert 'SIMULATED acceptance of 0' in result.out
  assert 'not compared: simulated' in result.out


def test_an_encoder_decoder_needs_a_drafter_of_its_kind(run):
  result = run('generate', *T5, 'float32', '--draft_model', 'random:lm_nano')
  assert result.status == 2
  assert 'is an encoder-decoder and random:lm_nano decoder-only' in result.err
