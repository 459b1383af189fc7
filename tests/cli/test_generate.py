"""`specdec generate`: what it prints, and what it writes."""

import functools
import itertools
import json
import math
import re

import pytest

from specdec_jax.assembly import gamma_memory, recording
from specdec_jax.assembly import trace_files as storage
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.cli import outputs
from specdec_jax.cli.commands import generate as command
from specdec_jax.launch import progress
from tests import slow
from tests.cli import tiny
from tests.cli.commands import DECODING_COMMANDS

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


def close(record: dict) -> dict:
  """A record without what rounding can change."""
  return record | {'log_probs': pytest.approx(record['log_probs'], abs=1e-4)}


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


def test_a_line_switches_a_limit_off(generate, tmp_path):
  path = tmp_path / 'own.jsonl'
  options = ('--json', '-', '--drafter', 'none', '--temperature', '1.5')
  own = {'prompt': 'ab', 'top_k': 0, 'top_p': 1.0, 'seed': 3}
  path.write_text(json.dumps(own))
  limits = ('--top_k', '1', '--top_p', '0.1')
  [record] = generate('--prompts', path, *options, *limits).records()
  path.write_text(json.dumps({'prompt': 'ab', 'seed': 3}))
  [free] = generate('--prompts', path, *options).records()
  [narrow] = generate('--prompts', path, *options, *limits).records()
  assert record['tokens'] == free['tokens'] != narrow['tokens']


def test_results_have_the_labels_of_their_lines(generate, tmp_path):
  path = tmp_path / 'labelled.jsonl'
  lines = [
    {'id': 'ü', 'prompt': 'the in ab', 'task': {'name': 'a'}},
    {'prompt': 'ab'},
    {'prompt': 'in', 'id': 7},
  ]
  path.write_text('\n'.join(map(json.dumps, lines)))
  options = ('--json', '-', '--drafter', 'none', '--batch_size', '2')
  drawn = ('--temperature', '1', '--num_return_sequences', '2')
  for more, count in ((), 1), (drawn, 2):
    records = generate('--prompts', path, *options, *more).records()
    expected = [line for line in lines for _ in range(count)]
    names = ('id', 'task', 'prompt')
    found = [{k: x[k] for k in names if k in x} for x in records]
    assert found == expected


def test_labels_that_json_cannot_say_are_refused(run, model, tmp_path):
  path = tmp_path / 'labelled.jsonl'
  for label in ('NaN', '"\\ud800"'):
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "a", "id": {label}}}')
    result = run('generate', '--model', model, '--prompts', path)
    tiny.assert_refused(result, 'line 2')


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


def test_a_line_has_settings_of_its_own(generate, tmp_path):
  path, options = tmp_path / 'own.jsonl', ('--json', '-', '--drafter', 'none')
  own = {
    **{'temperature': 1.5, 'top_k': 9, 'seed': 3, 'max_new_tokens': 5},
    **{'presence_penalty': 2.5, 'logit_bias': {5: 1.5}, 'min_new_tokens': 2},
  }
  lines = [{'prompt': 'the in ab'}, {'prompt': 'ab', **own}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  first, second = generate('--prompts', path, *options).records()
  flags = [each for name, x in own.items() for each in (f'--{name}', x)]
  [alone] = generate('--prompt', 'ab', *options, *flags).records()
  assert close(alone) == second
  [greedy] = generate('--prompt', 'the in ab', *options).records()
  assert close(greedy) == first
  lines[0]['stop'] = [first['text'][2]]
  path.write_text('\n'.join(map(json.dumps, lines)))
  stopped, _ = generate('--prompts', path, *options).records()
  assert stopped['stop'] == first['text'][2]
  assert stopped['finish_reason'] == 'stop'


def test_flags_and_lines_bind_texts_to_grammars(generate, tmp_path):
  pytest.importorskip('llguidance')
  regex = r'(the|[a-c]{2,3}) (in){1,2}\.'
  schema = {'type': 'object', 'properties': {'is_it': {'type': 'boolean'}}}
  schema |= {'required': ['is_it'], 'additionalProperties': False}
  lines, schema_file = tmp_path / 'own.jsonl', tmp_path / 'schema.json'
  schema_file.write_text(json.dumps(schema))
  lark = 'start: "in" "." | "the" "."'
  own = {'regex': regex}, {'json_schema': schema}, {'grammar': lark}, {}
  lines.write_text('\n'.join(json.dumps({'prompt': 'ab'} | x) for x in own))
  run = functools.partial(
    generate, '--json', '-', '--gamma', '3', **{'--max_new_tokens': 40}
  )
  bound, of_schema, of_lark, free = run('--prompts', lines).records()
  assert re.fullmatch(regex, bound['text'])
  assert [*json.loads(of_schema['text'])] == ['is_it']
  assert of_lark['text'] in ('in.', 'the.')
  assert not re.fullmatch(regex, free['text'])
  # A flag is for all lines, and a schema may lie in a file.
  for flag, found in (
    (('--regex', regex), bound),
    (('--json_schema', schema_file), of_schema),
    (('--grammar', lark), of_lark),
  ):
    [alone] = run('--prompt', 'ab', *flag).records()
    assert alone['text'] == found['text']
    assert alone['finish_reason'] == 'stop'


@pytest.mark.parametrize(
  ('own', 'words'),
  [
    ({'temprature': 1}, ("'temprature'", 'mean temperature?')),
    ({'temperature': 'hot'}, ('temperature', "'hot'")),
    ({'temperature': [1]}, ('line 2',)),
    ({'top_k': 2}, ('top_k 2', 'temperature 0')),
    ({'stop': 'ab'}, ('stop is a string',)),
    ({'seed': 1.5}, ('seed', '1.5')),
    ({'max_new_tokens': 0}, ('max_new_tokens', '0')),
    ({'repetition_penalty': -1}, ('repetition_penalty', '-1')),
    ({'bad_words_ids': [5]}, ('bad_words_ids', '[5]')),
    ({'regex': 'a', 'json_schema': {}}, ('exclude each other',)),
  ],
)
def test_wrong_settings_of_a_line_are_refused(run, model, tmp_path, own, words):
  path = tmp_path / 'own.jsonl'
  lines = [{'prompt': 'ab'}, {'prompt': 'ab', **own}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  result = run('generate', '--model', model, '--prompts', path)
  tiny.assert_refused(result, 'own.jsonl, line 2', *words)


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
    assert record | {'statistics': None} == close(other) | {'statistics': None}
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


def test_a_trace_records_a_batch(generate, tmp_path):
  path = tmp_path / 'trace.jsonl'
  records = generate(
    *('--json', '-', '--batch_size', '3', '--trace', path, '--seed', '5'),
    *('--gamma', '8'),
  ).records()
  traced = storage.read(path)
  assert traced.header['gamma'] == 8
  assert traced.header['temperature'] == 0
  assert (traced.header['seed'], traced.header['dtype']) == (5, 'float32')
  assert traced.header['drafter'] == 'prompt_lookup'
  assert (traced.header['lenience'], traced.header['verification']) == (
    1.0,
    'speculative_sampling',
  )
  # Nothing of the row that only fills the last batch.
  assert traced.rows == list(range(8))
  for row, record in enumerate(records):
    assert traced.prompts[row]['text'] == record['prompt']
    tokens = [
      token['token']
      for iteration in traced.iterations[row]
      for token in recording.committed(iteration)
    ]
    assert tokens == record['tokens']
    summary = traced.summarize(row)
    assert summary.num_target_runs == record['statistics']['target_runs']
    assert sum(summary.num_accepted) == record['statistics']['accepted']
  assert traced.summary['num_tokens'] == 64


@pytest.mark.parametrize('batch_size', ['1', '3'])
def test_colours_say_what_became_of_each_token(generate, tmp_path, batch_size):
  path = tmp_path / 'trace.jsonl'
  out = generate(
    *('--color', 'always', '--trace', path, '--batch_size', batch_size),
    *('--gamma', '8'),
  ).out
  verdicts = {
    token['verdict']
    for iterations in storage.read(path).iterations.values()
    for iteration in iterations
    for token in [*iteration['drafted'], iteration['next'] or {'verdict': ''}]
  }
  assert {'accepted', 'rejected', 'correction'} <= verdicts
  for style in ('\x1b[32m', '\x1b[9;31m', '\x1b[1;34m'):
    assert style in out
  # Each row stands under its prompt.
  prompts = [f'> {line["text"]}' for line in storage.read(path).prompts
             .values()]  # fmt: skip
  shown = tiny.without_styles(out).splitlines()
  assert [line for line in shown if line.startswith('> ')] == prompts


def test_without_colour_marks_say_it(generate, monkeypatch):
  monkeypatch.setenv('FORCE_COLOR', '1')
  monkeypatch.setenv('NO_COLOR', '1')
  out = generate('--drafter', 'uniform', '--gamma', '1').out
  assert '[-' in out
  assert '{+' in out
  assert '\x1b[31' not in out
  assert ';31m' not in out


@pytest.fixture
def fail_at(monkeypatch):
  """Makes the given batch of the next command, from 1, raise an error."""
  results = command._results

  def arrange(number, error):
    calls = itertools.count(1)

    def failing(*args):
      if next(calls) == number:
        raise error
      return results(*args)

    monkeypatch.setattr(command, '_results', failing)

  return arrange


@pytest.mark.parametrize(
  ('error', 'status', 'said'),
  [
    (ValueError('the third batch is cursed'), 2, 'cursed'),
    (KeyboardInterrupt(), 130, 'specdec: interrupted\n'),
  ],
)
def test_rows_decoded_before_an_error_are_kept(
  run, model, prompts_file, tmp_path, fail_at, error, status, said
):
  path = tmp_path / 'out.jsonl'
  fail_at(3, error)
  usual = ('--model', model, '--prompts', prompts_file, '--batch_size', '2')
  result = run(
    'generate', *usual, '--max_new_tokens', '4', '--json', path,
    '--trace', tmp_path / 'trace',
  )  # fmt: skip
  assert result.status == status
  assert said in result.err
  lines = tiny.begun(path).read_text().splitlines()
  assert len(lines) == 4
  assert result.out == ''.join(json.loads(x)['text'] + '\n' for x in lines)
  traced = storage.read(tiny.begun(tmp_path / 'trace'))
  assert traced.summary is None
  assert set(range(4)) <= set(traced.rows)


def test_old_results_stay_until_there_are_new_ones(
  run, model, prompts_file, tmp_path, fail_at
):
  json_path, trace_path = tmp_path / 'out.jsonl', tmp_path / 'trace.jsonl'
  link = tmp_path / 'link.jsonl'
  link.symlink_to(json_path)
  for path in (json_path, trace_path):
    path.write_text('of hours\n')
  json_path.chmod(0o640)
  call = lambda *options: run(
    'generate', '--model', model, '--prompts', prompts_file,
    '--max_new_tokens', '4', '--json', link, '--trace', trace_path, *options,
  )  # fmt: skip
  for number, kept in ((1, 0), (3, 2)):
    fail_at(number, ValueError('this batch is cursed'))
    assert call().status == 2
    assert json_path.read_text() == trace_path.read_text() == 'of hours\n'
    begun = list(tmp_path.glob('out.jsonl.partial-*'))
    assert [len(p.read_text().splitlines()) for p in begun] == [kept] * bool(
      kept
    )
  fail_at(0, None)  # No batch has the number 0.
  result = call()
  assert (result.status, result.err) == (0, '')
  assert len(json_path.read_text().splitlines()) == 8
  assert link.is_symlink()
  assert json_path.stat().st_mode & 0o777 == 0o640
  assert storage.read(trace_path).summary is not None


def test_a_file_has_one_writer(run, model, tmp_path):
  path = tmp_path / 'out.json'
  usual = ('--model', model, '--prompt', 'ab', '--max_new_tokens', '8')
  with outputs.reserved(str(path)):
    # A process that is killed now leaves nothing beside its results.
    assert list(tmp_path.iterdir()) == []
    for command in DECODING_COMMANDS:
      result = run(command, *usual, '--json', path)
      tiny.assert_refused(result, 'is writing', str(path))
    assert run('generate', *usual, '--json', '/dev/null').status == 0
  assert list(tmp_path.iterdir()) == []


def test_the_last_line_says_how_texts_ended(run, model, monkeypatch, tmp_path):
  monkeypatch.setattr(progress, 'is_watched', lambda: True)
  usual = ('generate', '--model', model, '--max_new_tokens', '8')
  told = run(*usual, '--prompt', 'ab')
  assert told.err.endswith(' tokens/s; ended at the token limit\n')
  path = tmp_path / 'prompts.jsonl'
  path.write_text(
    json.dumps({'prompt': 'ab'}) + '\n'
    + json.dumps({'prompt': 'ab', 'stop': [told.out[1:3]]}) + '\n'
  )  # fmt: skip
  told = run(*usual, '--prompts', path)
  expected = '; 1 ended at EOS or a stop string, 1 ended at the token limit\n'
  assert told.err.endswith(expected)
  assert outputs.ending(['nan']) == 'ended where no token could be drawn'
