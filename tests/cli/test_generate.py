"""`specdec generate`: what it decodes and prints."""

import json
import math

import pytest

from specdec_jax.assembly import gamma_memory
from specdec_jax.assembly.gamma_memory import RememberedGamma
from tests import slow
from tests.cli import tiny

GREEDY_DRAFTERS = {
  'prompt_lookup': ('--gamma', '8'),
  'uniform': ('--drafter', 'uniform', '--gamma', '2'),
  'model': ('--draft_model', '{model}', '--gamma', '2'),
  'model, rounded': (
    *('--draft_model', '{model}', '--gamma', '2', '--draft_dtype', 'bfloat16'),
  ),
  'ngram': ('--drafter', 'ngram', '--ngram_text', '{text}', '--gamma', '2'),
  'block': ('--verification', 'block', '--gamma', '2'),
  'greedy': ('--verification', 'greedy', '--gamma', '2'),
}
_PLAIN: list[dict] = []


@pytest.fixture
def plain(generate):
  """What every drafter has to give: decoded once, row by row."""
  if not _PLAIN:
    _PLAIN.extend(generate('--json', '-', '--drafter', 'none').records())
  return _PLAIN


@pytest.mark.slow
def test_models_whose_logits_are_padded_differently(generate, make_model):
  wide = make_model('wide', vocab_size=len(tiny.make_tokens()) + 7)
  wider = make_model('wider', vocab_size=len(tiny.make_tokens()) + 9)
  prompt = ('--prompt', 'the in ab')
  expected = generate(*prompt, '--drafter', 'none', **{'--model': wide}).out
  for other in (wide, wider):
    draft_model = ('--draft_model', other, '--gamma', '2')
    assert generate(*prompt, *draft_model, **{'--model': wide}).out == expected


def test_json_has_the_promised_keys(generate, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  gamma_memory.remember({}, RememberedGamma(gamma=3, source='bench'))
  assert gamma_memory.recall({}).gamma == 3
  record, *more = generate(
    *('--prompt', 'the in ab', '--json', '-', '--forget')
  ).records()
  assert gamma_memory.recall({}) is None
  assert more == []
  assert set(record) == {
    *('prompt', 'text', 'finish_reason', 'tokens', 'log_probs', 'statistics'),
    'gamma',
  }
  # Nothing was measured, so that nothing is drafted.
  assert (record['gamma'], record['statistics']['drafted']) == (0, 0)
  assert record['prompt'] == 'the in ab'
  assert len(record['tokens']) == len(record['log_probs']) == 8
  assert all(value < 0 for value in record['log_probs'])
  vocabulary = tiny.make_tokenizer()
  assert record['text'] == vocabulary.decode(record['tokens'])
  statistics = record['statistics']
  assert statistics['tokens'] == 8
  assert 1 <= statistics['target_runs'] <= 8
  assert statistics['block_efficiency'] == 8 / statistics['target_runs']


def test_json_has_the_likeliest_tokens_if_asked_for(generate):
  sampling = ('--temperature', '0.5', '--top_k', '2', '--drafter', 'none')
  options = ('--prompt', 'the in ab', '--json', '-', *sampling)
  [record] = generate(*options, '--top_logprobs', '2').records()
  for i, token in enumerate(record['tokens']):
    raw, processed = map(
      dict, (record['top_log_probs'][i], record['top_processed_log_probs'][i])
    )
    weights = {each: math.exp(x / 0.5) for each, x in raw.items()}
    total = sum(weights.values())
    assert len(raw) == 2
    assert processed == pytest.approx(
      {each: math.log(x / total) for each, x in weights.items()}, abs=1e-4
    )
    for name, tops in (('log_probs', raw), ('processed_log_probs', processed)):
      assert record[name][i] == pytest.approx(tops[token], abs=1e-4)


def test_limits_that_are_switched_off(generate):
  """As by 0 and 1 in transformers and vLLM, also for greedy text."""
  options = ('--prompt', 'the in ab', '--json', '-', '--drafter', 'none')
  off = ('--top_k', '0', '--top_p', '1', '--min_p', '0', '--typical_p', '1')
  for temperature in ('0', '1.5'):
    drawn = ('--temperature', temperature)
    [record] = generate(*options, *drawn).records()
    [same] = generate(*options, *drawn, *off).records()
    assert same == record


def test_texts_of_several_lines_are_apart_in_a_pipe(generate, tmp_path):
  path = tmp_path / 'prompts.jsonl'
  newline = tiny.make_tokens().index('Ċ')
  own = {'logit_bias': {newline: 1000}, 'max_new_tokens': 2}
  lines = [{}, {}, own, {}, {}]
  path.write_text('\n'.join(json.dumps({'prompt': 'ab'} | x) for x in lines))
  options = ('--prompts', path, '--drafter', 'none', '--batch_size', '2')
  found = generate(*options).out
  [text] = {x['text'] for x in generate(*options, '--json', '-').records()} - {
    '\n\n'
  }
  assert found == f'{text}\n{text}\n\n\n\n\n\n{text}\n{text}\n'


def test_a_second_run_compiles_nothing(run, model, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder = tmp_path / 'specdec_jax' / 'compiled'
  argv = ('--model', model, '--prompt', 'the in ab', '--max_new_tokens', '8')
  first = run('generate', *argv)
  compiled = {*folder.glob('*-cache')}
  assert compiled
  assert run('generate', *argv) == first
  assert {*folder.glob('*-cache')} == compiled


def test_the_text_is_that_of_the_json(generate, tmp_path):
  path = tmp_path / 'out.jsonl'
  out = generate('--json', path).out
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert len(records) == 8
  assert out == ''.join(f'{record["text"]}\n' for record in records)
  # Recording a trace takes another way to the same text.
  assert generate('--trace', tmp_path / 'trace.jsonl').out == out
  assert generate('--batch_size', '3', '--trace', path).out == out


@pytest.mark.slow
@pytest.mark.parametrize(
  'sampling',
  [(), ('--temperature', '0.9', '--top_k', '60', '--top_p', '0.95')],
  ids=['greedy', 'sampled'],
)
def test_a_batch_gives_row_by_row_what_batch_one_gives(generate, sampling):
  options = ('--json', '-', '--seed', '7', *sampling)
  alone = generate(*options).records()
  together = generate(*options, '--batch_size', '8').records()
  encode = tiny.make_tokenizer().encode
  assert len({len(encode(record['prompt']).ids) for record in alone}) > 1
  assert len({tuple(record['tokens']) for record in alone}) > 4
  for record, other in zip(alone, together, strict=True):
    assert record | {'statistics': None} == tiny.but_for_rounding(other) | {
      'statistics': None
    }
  if sampling:
    assert alone != generate('--json', '-', '--seed', '8', *sampling).records()


def test_a_batch_larger_than_the_prompts(generate):
  few = generate('--prompt', 'ab', '--json', '-').records()
  many = generate('--prompt', 'ab', '--json', '-', '--batch_size', '999')
  assert many.records() == few


@slow.parametrize(
  'name', GREEDY_DRAFTERS, now=['prompt_lookup', 'model', 'block']
)
def test_no_drafter_changes_greedy_tokens(
  generate, plain, model, prompts_file, name
):
  options = [
    each.format(model=model, text=prompts_file)
    for each in GREEDY_DRAFTERS[name]
  ]
  assert {record['statistics']['drafted'] for record in plain} == {0}
  # In a batch the result is the same and comes sooner.
  batched = ('--json', '-', '--batch_size', '8')
  drafted = generate(*batched, *options).records()
  assert sum(record['statistics']['drafted'] for record in drafted) > 0
  assert [record['tokens'] for record in drafted] == [
    record['tokens'] for record in plain
  ]
  if name == 'model':
    assert {record['statistics']['alpha'] for record in drafted} == {1.0}


@pytest.mark.slow
def test_drafts_that_end_early_change_no_greedy_token(
  generate, plain, make_model
):
  batched = ('--json', '-', '--batch_size', '8')
  weak = make_model('weak', change=tiny.weaker)
  drafted = generate(
    *batched, '--draft_model', weak, '--gamma', '6', '--min_prob', '0.1'
  ).records()
  assert [record['tokens'] for record in drafted] == [
    record['tokens'] for record in plain
  ]
  runs, proposed = (
    sum(record['statistics'][name] for record in drafted)
    for name in ('target_runs', 'drafted')
  )
  assert runs < proposed < 6 * runs


@pytest.mark.slow
def test_min_p_of_one_leaves_the_likeliest(generate, plain):
  batched = ('--json', '-', '--batch_size', '8', '--temperature', '1')
  sampled = generate(*batched).records()
  assert [r['tokens'] for r in sampled] != [r['tokens'] for r in plain]
  found = generate(*batched, '--min_p', '1').records()
  assert [r['tokens'] for r in found] == [r['tokens'] for r in plain]


@pytest.mark.slow
def test_a_mesh_changes_nothing(generate, tmp_path):
  expected = generate('--json', '-').records()
  options = ('--json', '-', '--batch_size', '4', '--num_devices')
  whole = generate(*options, '4').records()
  stepwise = generate(*options, '2', '--trace', tmp_path / 'trace').records()
  for record, *others in zip(expected, whole, stepwise, strict=True):
    assert [other['tokens'] for other in others] == [record['tokens']] * 2


def test_special_tokens_are_hidden(generate, make_model, tmp_path):
  def prefer_specials(tensors):
    kernel = tensors['logits_dense/kernel']
    kernel[:, :3] = 30 * kernel[:, 3:6]

  model = make_model('special', change=prefer_specials, eos_token=None)
  path = tmp_path / 'trace.jsonl'
  options = ('--json', path, '--max_new_tokens', '24')
  colored = generate(*options, '--color', 'always', **{'--model': model})
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert any(set(record['tokens']) & {0, 1, 2} for record in records)
  assert not any('<|' in record['text'] for record in records)
  assert '<|' not in colored.out


def test_eos_ends_a_row_and_is_no_text(generate, make_model):
  """Even where the tokenizer does not know it as special."""
  expected = generate('--json', '-', '--drafter', 'none').records()
  by_id = dict(enumerate(tiny.make_tokens()))
  *start, eos = expected[3]['tokens'][:4]
  assert eos not in start
  model = make_model('ended', eos_token=by_id[eos], chat_template=None)
  found = generate('--json', '-', **{'--model': model}).records()
  assert found[3]['tokens'] == [*start, eos]
  assert found[3]['finish_reason'] == 'stop'
  assert found[3]['text'] == tiny.make_tokenizer().decode(start)


def test_chat_applies_the_template(generate):
  told = generate('--prompt', 'ab', '--chat', '--json', '-').records()[0]
  text = '<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n'
  written = generate('--prompt', text, '--json', '-').records()[0]
  assert told['tokens'] == written['tokens']
  assert told['prompt'] == 'ab'
  plain = generate('--prompt', 'ab', '--json', '-').records()[0]
  assert plain['tokens'] != told['tokens']


def test_the_system_speaks_first(generate):
  given = ('--prompt', 'ab', '--chat', '--system', 'the in', '--json', '-')
  told = generate(*given).records()[0]
  text = (
    '<|im_start|>system\nthe in<|im_end|>\n<|im_start|>user\nab<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  written = generate('--prompt', text, '--json', '-').records()[0]
  assert told['tokens'] == written['tokens']


@pytest.mark.slow
def test_samples_of_a_prompt_are_draws_of_their_own(generate):
  options = ('--json', '-', '--temperature', '1', '--seed', '7')
  records = generate(
    *options, '--num_return_sequences', '3', '--batch_size', '8'
  ).records()
  assert [record['sample'] for record in records] == [0, 1, 2] * 8
  prompts = [record['prompt'] for record in generate(*options).records()]
  assert [record['prompt'] for record in records[::3]] == prompts
  texts = [tuple(record['tokens']) for record in records]
  assert all(len(set(texts[i : i + 3])) == 3 for i in range(0, 24, 3))
  # A row's draws depend on its number alone.
  repeated = generate(
    *options, '--num_return_sequences', '3', '--batch_size', '5'
  ).records()
  assert [tuple(record['tokens']) for record in repeated] == texts
  alone = generate(*options, '--prompt', prompts[0]).records()
  assert tuple(alone[0]['tokens']) == texts[0]


def test_bfloat16_decodes(generate):
  exact = generate('--json', '-').records()
  rounded = generate('--json', '-', '--dtype', 'bfloat16').records()
  assert [len(r['tokens']) for r in rounded] == [8] * 8
  assert [r['log_probs'] for r in rounded] != [r['log_probs'] for r in exact]


@pytest.mark.slow
def test_lenience_accepts_more(generate):
  options = ('--drafter', 'uniform', '--gamma', '1', '--temperature', '1')

  def count(*more):
    records = generate('--json', '-', *options, *more).records()
    return sum(record['statistics']['accepted'] for record in records)

  assert count('--lenience', '0.01') > count()
