"""`generate --stop`: a row ends with the token that completes a string, as with
an end token, whoever drafts and whatever an iteration accepted beyond it."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('sentencepiece')

import specdec_jax
from specdec_jax import arrays
from specdec_jax.assembly import recording
from specdec_jax.assembly import trace_files as storage
from specdec_jax.text import sentencepiece_vocabulary, stop_strings
from specdec_jax.text.vocabularies import Vocabulary
from tests import slow
from tests.cli import tiny

NUM_TOKENS = 24


def first_by_trying(vocabulary, stops, tokens):
  """How many tokens are needed for a string, by decoding every beginning."""
  for count in range(1, len(tokens) + 1):
    text = vocabulary.decode(tokens[:count])
    if found := [(text.find(stop), stop) for stop in stops if stop in text]:
      place, stop = min(found)
      return count, text[:place], stop
  return None, vocabulary.decode(tokens), None


@pytest.fixture(params=['byte pairs', 'sentencepiece'])
def vocabulary(request):
  if request.param == 'byte pairs':
    return Vocabulary(tokenizer=tiny.make_tokenizer())
  folder = request.config.rootpath / 'tests' / 'golden' / 't5x'
  return sentencepiece_vocabulary.load(folder / 'tiny_sp.model', extra_ids=0)


def test_the_first_occurrence_in_random_texts(vocabulary):
  """In pieces of any size, with strings over several tokens and characters over
  several bytes."""
  rng = np.random.default_rng(0)
  num_found = 0
  for _ in range(100):
    tokens = rng.integers(3, vocabulary.vocab_size, 40).tolist()
    if rng.integers(2):
      tokens += vocabulary.encode(' the café in', add_special_tokens=False)
      tokens += rng.integers(3, vocabulary.vocab_size, 5).tolist()
    text = vocabulary.decode(tokens)
    place = int(rng.integers(len(text)))
    stops = [text[place : place + 3], 'café', 'xyz']
    if '\N{REPLACEMENT CHARACTER}' in stops[0]:
      stops = stops[1:]
    count, before, stop = first_by_trying(vocabulary, stops, tokens)
    found = stop_strings.text_of(vocabulary, stops, tokens)
    assert found == (before, stop)
    reading, read = stop_strings.Reading(), 0
    for start in range(0, len(tokens), 7):
      part = tokens[start : start + 7]
      reading, kept = stop_strings.read_on(vocabulary, stops, reading, part)
      read += len(part) if kept is None else kept
      if kept is not None:
        break
    assert read == (count or len(tokens))
    num_found += count is not None
  assert num_found > 30


@pytest.fixture
def generate(generate):
  limit = {'--max_new_tokens': NUM_TOKENS}
  return lambda *options: generate('--json', '-', *options, **limit).records()


def cut_by_hand(records, stops):
  """What `--stop` has to leave of records without it."""
  vocabulary = Vocabulary(tokenizer=tiny.make_tokenizer())
  for record in records:
    count, text, stop = first_by_trying(vocabulary, stops, record['tokens'])
    yield {
      'tokens': record['tokens'][:count],
      'text': text,
      'stop': stop,
    }


DRAFTERS = {
  'none': ('--drafter', 'none'),
  'prompt_lookup': (),
  'model': ('--draft_model', '{model}', '--gamma', '5'),
}


@slow.parametrize('drafter', DRAFTERS, now=['model'])
def test_a_row_ends_with_the_string(generate, model, tmp_path, drafter):
  options = [each.format(model=model) for each in DRAFTERS[drafter]]
  whole = generate('--batch_size', '8', *options)
  # Two characters from the middle of the first and of the last text.
  stops = [record['text'][9:11] for record in (whole[0], whole[-1])]
  expected = list(cut_by_hand(whole, stops))
  assert {record['stop'] for record in expected} >= {stops[0]}
  path = tmp_path / 'trace.jsonl'
  given = [each for stop in stops for each in ('--stop', stop)]
  for batch_size in ('1', '3'):
    found = generate(
      *given, *options, '--batch_size', batch_size, '--trace', path
    )
    names = ('tokens', 'text', 'stop')
    assert [{n: r[n] for n in names} for r in found] == expected
    for record in found:
      assert record['finish_reason'] == ('stop' if record['stop'] else 'length')
      # Nothing after the string is counted, nor decoded for long.
      assert len(record['log_probs']) == len(record['tokens'])
      assert record['statistics']['tokens'] == len(record['tokens'])
      assert record['statistics']['target_runs'] <= len(record['tokens'])
    traced = storage.read(path)
    assert traced.header['stop'] == stops
    for row, record in enumerate(found):
      tokens = [
        token['token']
        for iteration in traced.iterations[row]
        for token in recording.committed(iteration)
      ]
      assert tokens == record['tokens']
      summary = traced.summarize(row)
      statistics = record['statistics']
      assert summary.num_target_runs == statistics['target_runs']
      assert sum(summary.num_accepted) == statistics['accepted']
      assert sum(summary.num_tested) == statistics['tested']
      assert summary.num_drafted == statistics['drafted']
  if drafter == 'model':  # Which agrees with itself: blocks of six.
    assert any(len(r['tokens']) % 6 for r in found if r['stop'])


@pytest.mark.slow
def test_nan_behind_the_string_ends_nothing(model):
  plain = specdec_jax.load(model, drafter='none')
  decode = lambda decoder, **how: next(
    specdec_jax.generate(decoder, ['the in ab'], max_new_tokens=12, **how)
  )
  tokens = decode(plain).tokens
  new = [i for i, token in enumerate(tokens) if token not in tokens[:i]]
  last = next(i for i in new[1:] if i - 1 in new)
  stop = [plain.vocabulary.decode([tokens[last - 1]])]
  # After the token behind the string, logits are NaN.
  table = jnp.zeros(plain.target.vocab_size).at[tokens[last]].set(jnp.nan)

  def broken(decoder):
    own = decoder.method.target

    def extend(params, tokens, cache, at=None, **more):
      logits, cache = own.extend(params, tokens, cache, at, **more)
      fed = tokens if at is None else arrays.take(tokens, at[:, None])
      return logits + table[fed][..., None], cache

    target = own._replace(extend=extend)
    method = dataclasses.replace(decoder.method, target=target)
    return decoder.with_method(method)

  expected = decode(broken(plain), stop=stop)
  drafted = broken(specdec_jax.load(model, draft_model=model, gamma=6))
  assert decode(drafted, stop=stop).tokens == expected.tokens
  with pytest.raises(ValueError, match='NaN'):
    decode(drafted)


@pytest.mark.slow
def test_sampled_rows_keep_their_draws(generate):
  options = ('--temperature', '1', '--seed', '3', '--batch_size', '8')
  whole = generate(*options)
  stops = [whole[2]['text'][4:6]]
  expected = [record['tokens'] for record in cut_by_hand(whole, stops)]
  found = generate(*options, '--stop', stops[0])
  assert [record['tokens'] for record in found] == expected
  # On devices that share the rows, too.
  found = generate(*options, '--stop', stops[0], '--num_devices', '2')
  assert [record['tokens'] for record in found] == expected


def test_colours_end_there_too(run, model, generate):
  text = generate()[0]['text']
  stop = text[9:11]
  result = run('generate', '--model', model, '--prompt', 'the in ab',
               '--max_new_tokens', NUM_TOKENS, '--color', 'always',
               '--stop', stop)  # fmt: skip
  shown = tiny.without_styles(result.out)
  assert result.status == 0
  assert text[: text.find(stop)] in shown


def test_a_special_token_is_no_stop(run, model):
  result = run('generate', '--model', model, '--prompt', 'ab',
               '--max_new_tokens', '4', '--stop', '<|im_end|>')  # fmt: skip
  tiny.assert_refused(result, "'<|im_end|>' is a special")


@pytest.fixture
def t5_vocabulary(request):
  folder = request.config.rootpath / 'tests' / 'golden' / 't5x'
  return sentencepiece_vocabulary.load(folder / 'tiny_sp.model')


@pytest.mark.parametrize('stop', ['\n', 'yes\n', '\t', '{', '</s>', 'ﬁ', 'é'])
def test_what_no_token_spells_is_refused(t5_vocabulary, stop):
  with pytest.raises(ValueError, match=r'never occurs.*no tokens spell') as e:
    stop_strings.check_vocabulary([stop], t5_vocabulary)
  assert repr(stop) in str(e.value)
  byte_pairs = Vocabulary(tokenizer=tiny.make_tokenizer())
  stop_strings.check_vocabulary([stop], byte_pairs)


@pytest.mark.parametrize('stop', ['.', ' yes', '. ', 's j', '<extra_id_0>'])
def test_what_tokens_spell_is_accepted(t5_vocabulary, stop, caplog):
  stop_strings.check_vocabulary([stop], t5_vocabulary)
  assert not caplog.messages


def test_what_tokens_may_spell_is_told(t5_vocabulary, caplog):
  """A lone space, then a word: the vocabulary never writes it so, but a model
  may."""
  for _ in range(2):
    stop_strings.check_vocabulary(['  '], t5_vocabulary)
  [line] = caplog.messages
  assert "'  ' may never occur: this vocabulary writes 'a  a' as 'a a'" in line
  ids = [t5_vocabulary.tokens().index(piece) for piece in ('▁', '▁yes')]
  assert stop_strings.text_of(t5_vocabulary, ['  '], [4, *ids]) == (
    'then',
    '  ',
  )


def test_every_door_refuses_what_no_token_spells(run, make_model, tmp_path):
  tokens = [token for token in tiny.make_tokens() if token != 'Ċ']
  tokenizer = tiny.make_tokenizer(tokens)
  model = make_model('without_line_breaks', tokenizer=tokenizer)
  path = tmp_path / 'prompts.jsonl'
  path.write_text(json.dumps({'prompt': 'in', 'stop': ['\n']}))
  part = "the stop string '\\n' never occurs"
  for command in (
    ('generate', '--prompt', 'in', '--stop', '\n'),
    ('generate', '--prompts', path),
    ('chat', '--stop', '\n'),
  ):
    result = run(*command, '--model', model, '--drafter', 'none')
    tiny.assert_refused(result, part)
  decoder = specdec_jax.load(model, drafter='none')
  for call in (
    lambda: specdec_jax.generate(decoder, ['in'], stop=['\n']),
    lambda: specdec_jax.generate(decoder, ['in', 'in'], stop=[['in'], ['\n']]),
    lambda: specdec_jax.stream(decoder, 'in', stop=['\n']),
    lambda: specdec_jax.Conversation(decoder, stop=['\n']),
  ):
    with pytest.raises(ValueError, match='never occurs'):
      call()


def test_a_model_whose_stop_no_token_spells_says_so(make_model, caplog):
  tokens = [token for token in tiny.make_tokens() if token != 'Ċ']
  tokenizer = tiny.make_tokenizer(tokens)
  model = make_model('states_line_breaks', tokenizer=tokenizer)
  path = pathlib.Path(model, 'generation_config.json')
  path.write_text(json.dumps({'stop_strings': ['\n', 'in']}))
  decoder = specdec_jax.load(model, drafter='none')
  assert decoder.stop == ('in',)
  [line] = [text for text in caplog.messages if 'stop_strings' in text]
  assert "the stop string '\\n' never occurs" in line


@pytest.fixture
def stating(make_model):
  """Writes what one model states, and loads it."""

  def load(stops):
    model = make_model('with_stops', max_positions=512)
    path = pathlib.Path(model, 'generation_config.json')
    path.write_text(json.dumps({'stop_strings': stops}))
    return specdec_jax.load(model, drafter='none')

  return load


def test_a_model_states_strings_that_others_replace(run, stating):
  pytest.importorskip('jinja2')
  text, usual = 'the in ab', {'max_new_tokens': NUM_TOKENS}
  decode = lambda decoder, **how: [
    each.text for each in specdec_jax.generate(decoder, [text], **usual, **how)
  ]
  [whole] = decode(stating([]))
  own, other = whole[9:11], whole[3:5]
  cut, shorter = (whole[: whole.find(stop)] for stop in (own, other))
  for stated in (own, ['never so', own]):
    assert decode(stating(stated)) == [cut]
  decoder = stating([own])
  assert ''.join(specdec_jax.stream(decoder, text, **usual)) == cut
  assert decode(decoder, stop=[]) == [whole]
  assert decode(decoder, stop=[other]) == [shorter]
  each = specdec_jax.generate(
    decoder, [text] * 3, stop=[None, [], [other]], batch_size=3, **usual
  )
  assert [found.text for found in each] == [cut, whole, shorter]
  flags = ('--drafter', 'none', '--prompt', text)
  limit = ('--max_new_tokens', NUM_TOKENS, '--model', decoder.model.checkpoint)
  for more, expected in ((), cut), (('--stop', other), shorter):
    told = run('generate', *flags, *limit, *more)
    assert (told.out, told.err) == (f'{expected}\n', '')
  answers = [
    specdec_jax.Conversation(decoder, **usual, **how).send(text)
    for how in ({}, {'stop': []})
  ]
  assert answers[1].stop is None
  assert own in answers[1].text or answers[0].text == answers[1].text


def test_a_special_token_that_a_model_states_ends_texts(stating):
  decoder = stating(['<|im_start|>', 'the'])
  assert decoder.stop == ('the',)
  vocabulary = decoder.vocabulary
  ends = [vocabulary.id_to_text(i) for i in vocabulary.eos_ids]
  assert ends == ['<|im_end|>', '<|endoftext|>', '<|im_start|>']
  with pytest.raises(ValueError, match=r'generation_config.json: stop_strings'):
    stating([3])
