"""`specdec_jax.load`, `generate` and `stream`, as a user calls them."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')


import specdec_jax
from specdec_jax import lazy
from specdec_jax.assembly import drafters, rules, running, usual
from specdec_jax.assembly.gamma_memory import RememberedGamma
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.checkpoints import huggingface
from specdec_jax.cli import main
from specdec_jax.text import text_files, vocabularies
from specdec_jax.text.vocabularies import TextStream
from tests import toy_eagle
from tests.cli import tiny

TEXTS = ['the in ab', 'ab', 'in the the', 'the ab ab ab', 'in']
NUM_NEW = 8


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('api') / 'tiny')


@pytest.fixture(scope='module')
def decoder(folder):
  return specdec_jax.load(folder, drafter='prompt_lookup', gamma=2)


def generate(decoder, texts, **options):
  usual = {'max_new_tokens': NUM_NEW, 'batch_size': 2}
  return list(specdec_jax.generate(decoder, texts, **usual | options))


@pytest.fixture(scope='module')
def completions(decoder):
  return generate(decoder, TEXTS)


def test_texts_keep_their_order_across_batches(decoder, completions):
  assert [each.prompt for each in completions] == TEXTS
  assert len({each.text for each in completions}) > 2
  # Of any iterable, row by row the same.
  few = generate(decoder, (text for text in TEXTS[3:5]))
  assert [each.tokens for each in few] == [
    each.tokens for each in completions[3:]
  ]


def test_statistics_and_log_probs_are_at_hand(completions):
  for each in completions:
    assert str(each) == each.text
    assert len(each.tokens) == len(each.log_probs) == NUM_NEW
    assert each.statistics['tokens'] == NUM_NEW
    assert each.statistics['target_runs'] <= NUM_NEW
    assert each.statistics['block_efficiency'] >= 1
    assert each.stop is None
    assert each.finish_reason == 'length'
    assert all(value < 0 for value in each.log_probs)
  assert sum(each.statistics['accepted'] for each in completions) > 0


@pytest.fixture(scope='module')
def compiled_events():
  """What jax says while it traces, lowers and compiles: the names so far."""
  events = []

  def listen(event: str, seconds: float, **_):
    if event.startswith('/jax/core/compile/'):
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  jax.jit(lambda x: x + 1)(jnp.zeros(3))
  assert len(events) >= 3
  yield events
  jax.monitoring.clear_event_listeners()


def test_nothing_is_compiled_twice(decoder, completions, compiled_events):
  compiled_events.clear()
  for limit in (1, NUM_NEW + 1, 64):
    other = generate(decoder, TEXTS[:2], max_new_tokens=limit, seed=limit)
    for one, each in zip(other, completions, strict=False):
      assert len(one.tokens) == limit
      assert one.tokens[:NUM_NEW] == each.tokens[:limit]
  generate(decoder, TEXTS[:2], stop=['zzz'])
  [first, _] = generate(decoder, TEXTS[:2], stop=[[completions[0].text[3]], []])
  assert first.stop
  assert compiled_events == []
  generate(decoder, TEXTS[:2], temperature=0.5)
  compiled_events.clear()
  for options in (
    {'temperature': 2.0, 'max_new_tokens': 3},
    {'temperature': 1.0, 'top_k': 3, 'seed': 5},
    {'temperature': 1.0, 'top_p': 0.5, 'stop': ['zzz']},
    {'temperature': [0, 1.0], 'min_p': 0.2, 'seed': [1, 2**32 - 1]},
  ):
    generate(decoder, TEXTS[:2], **options)
  assert compiled_events == []


@pytest.mark.slow
def test_batches_have_few_sizes(decoder, completions, compiled_events):
  generate(decoder, TEXTS, batch_size=4)
  compiled_events.clear()
  found = generate(decoder, TEXTS, batch_size=3)
  assert compiled_events == []
  for one, each in zip(found, completions, strict=True):
    assert one.tokens == each.tokens
    assert one.statistics == each.statistics


def test_a_text_has_settings_of_its_own(decoder, completions):
  options = {
    'temperature': [1.5, 0, None, 0.8, 2.0],
    'top_k': [None, None, None, 4, None],
    'top_p': [0.8, None, None, None, None],
    'seed': [3, 4, 5, 6, 3],
    'max_new_tokens': [8, 3, 5, 8, 8],
    'stop': [[], [], [completions[2].text[1]], [], []],
  }
  found = generate(decoder, TEXTS, **options)
  for i, (text, each) in enumerate(zip(TEXTS, found, strict=True)):
    own = {name: values[i] for name, values in options.items()}
    [alone] = generate(decoder, [text, text], **own)[:1]
    assert each.tokens == alone.tokens
    assert each.statistics == alone.statistics
    assert each.stop == alone.stop
  assert found[1].tokens == completions[1].tokens[:3]
  assert found[2].stop
  assert found[0].tokens != completions[0].tokens
  # A decoder that was loaded so decodes so.
  same = {'temperature': 1.5, 'top_p': 0.8, 'seed': 3}
  sampled = dataclasses.replace(
    decoder.sampled, sampling=Sampling(temperature=1.5, top_p=0.8)
  )
  [one, _] = generate(sampled, TEXTS[:2], seed=3)
  assert (
    one.tokens
    == found[0].tokens
    == generate(decoder, TEXTS[:2], **same)[0].tokens
  )


def test_a_text_is_processed_in_its_own_way(folder, decoder, completions):
  words = [list(completions[0].tokens[:2]), [completions[0].tokens[3]]]
  options = {
    'repetition_penalty': [None, 9.0, 1.0, 1.3, None],
    'no_repeat_ngram_size': [None, None, None, 2, 0],
    'bad_words_ids': [words, None, [], None, None],
    'max_new_tokens': [8, 8, 4, 8, 8],
  }
  found = generate(decoder, TEXTS, **options)
  for i, (text, each) in enumerate(zip(TEXTS, found, strict=True)):
    own = {name: values[i] for name, values in options.items()}
    [alone] = generate(decoder, [text, text], **own)[:1]
    assert each.tokens == alone.tokens
  changed = [
    x.tokens != y.tokens[: len(x.tokens)]
    for x, y in zip(found, completions, strict=True)
  ]
  assert changed == [True, True, False, True, False]
  # A decoder that was loaded so decodes so, with every drafter and in a stream.
  plain = specdec_jax.load(folder, drafter='none', repetition_penalty=9.0)
  [one] = generate(plain, TEXTS[1:2])
  assert one.tokens == found[1].tokens
  stream = specdec_jax.stream(plain, TEXTS[1], max_new_tokens=NUM_NEW)
  assert ''.join(stream) == one.text
  [none] = generate(plain, TEXTS[1:2], repetition_penalty=1.0)
  assert none.tokens == completions[1].tokens


def test_other_processors_compile_nothing(decoder, compiled_events):
  generate(decoder, TEXTS[:2], repetition_penalty=1.5, suppress_tokens=[3])
  compiled_events.clear()
  generate(decoder, TEXTS[:2], presence_penalty=0.5, logit_bias={5: 1.0})
  generate(decoder, TEXTS[:2], suppress_tokens=[[4], []])
  assert compiled_events == []


def test_some_texts_may_have_none_of_a_setting_that_is_a_list(decoder):
  texts = TEXTS[:1] * 2
  found = generate(decoder, texts, forced_eos_token_id=[2, None])
  alone = generate(decoder, texts, forced_eos_token_id=[[2], []])
  assert [x.tokens for x in found] == [x.tokens for x in alone]
  assert found[0].tokens[-1] == 2 != found[1].tokens[-1]
  # What a program makes of a table, though nothing stands in it.
  same = generate(decoder, texts, bad_words_ids=[None, None])
  assert same[0].tokens == found[1].tokens
  # Mappings may be listed, too, though a value of one text is a list as well.
  token = found[1].tokens[0]
  biases = [{(token,): -100.0}, {(token,): 0.0}]
  biased = generate(decoder, texts, sequence_bias=biases)
  assert token not in biased[0].tokens
  assert biased[1].tokens == found[1].tokens


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'temperature': -1.0}, 'temperature.*-1'),
    ({'temperature': [0.5, 'hot']}, "temperature.*'hot'"),
    ({'temperature': [0.5]}, 'temperature .*1 for 2'),
    ({'temperature': [[0.5], 1]}, r'temperature .*number, got \[0.5\]'),
    ({'temperature': True}, 'temperature .*number, got True'),
    ({'top_k': 3}, 'top_k 3 .*temperature 0'),
    ({'top_p': 1.5, 'temperature': 1.0}, 'top_p.*1.5'),
    ({'seed': [1, -1]}, 'seed.*-1'),
    ({'stop': [['a'], 'b']}, 'stop is a string'),
    ({'max_new_tokens': [4, 0]}, 'max_new_tokens.*0'),
    ({'repetition_penalty': 0}, 'repetition_penalty.*0'),
    ({'repetition_penalty': [1.5]}, 'repetition_penalty .*1 for 2'),
    ({'repetition_penality': 1.5}, "'repetition_penality'.*repetition_penalty"),
    ({'frequency_penalty': float('nan')}, 'frequency_penalty.*nan'),
    ({'min_new_tokens': 9}, 'min_new_tokens 9 exceeds .*8'),
    ({'no_repeat_ngram_size': 2.0}, 'no_repeat_ngram_size.*2.0'),
    ({'suppress_tokens': [99_999]}, '99999'),
    ({'suppress_tokens': [-1]}, 'suppress_tokens.*-1'),
    ({'suppress_tokens': '[5]'}, r"suppress_tokens .*list.*got '\[5\]'"),
    ({'bad_words_ids': [[]]}, 'bad_words_ids'),
    ({'logit_bias': {'a': 1.0}}, "logit_bias.*'a'"),
    ({'logit_bias': {5: float('inf')}}, 'logit_bias.*inf'),
    ({'logit_bias': {5: 1e300}}, 'logit_bias.*1e.300'),
    ({'repetition_penalty': 1e300}, 'repetition_penalty.*1e.300'),
  ],
)
def test_wrong_settings_are_said_at_once(decoder, options, message):
  with pytest.raises(ValueError, match=message):
    generate(decoder, TEXTS[:2], **options)


def test_lenient_greedy_decodes_with_the_limits_that_its_rule_reads(folder):
  lenient = {'verification': 'greedy', 'lenience': 0.5, 'top_p': 0.9}
  decoder = specdec_jax.load(folder, gamma=2, **lenient)
  [found] = generate(decoder, TEXTS[:1], repetition_penalty=1.5)
  assert len(found.tokens) == NUM_NEW
  for own in ({'top_k': 3}, {'top_p': [0.9, None]}):
    with pytest.raises(ValueError, match='changes nothing at temperature 0'):
      generate(decoder, TEXTS[:2], **own)


def test_either_name_of_the_least_length_clears_the_other():
  def least(stated, **given):
    settings = running.DecodeSettings(max_new_tokens=40, **given)
    made = settings.sampling(Sampling(**stated))
    # The same of a text with settings of its own.
    whole = running.DecodeSettings(max_new_tokens=40, texts=[given])
    assert whole.of_text(0).sampling(Sampling(**stated)) == made
    return made.min_length, made.min_new_tokens

  assert least({'min_length': 30}, min_new_tokens=0) == (None, 0)
  assert least({'min_new_tokens': 20}, min_length=5) == (5, None)
  assert least({'min_length': 30}, repetition_penalty=2.0) == (30, None)
  assert least({}, min_length=5, min_new_tokens=3) == (5, 3)
  # Of all texts one name, of a text the other.
  both = running.DecodeSettings(
    max_new_tokens=40, min_length=30, texts=[{'min_new_tokens': 2}, {}]
  )
  found = [both.of_text(i).sampling(Sampling()) for i in range(2)]
  assert [(x.min_length, x.min_new_tokens) for x in found] == [
    (None, 2),
    (30, None),
  ]


def test_a_stop_string_ends_a_text(decoder, completions):
  text = completions[0].text
  stop = text[3:5]
  [found] = generate(decoder, TEXTS[:1], stop=[stop, 'not in it'])
  assert found.finish_reason == 'stop'
  assert found.stop == stop
  assert found.text == text[: text.index(stop)]
  assert found.statistics['tokens'] == len(found.tokens) < NUM_NEW


def test_a_stream_is_the_text_in_pieces(decoder, completions):
  stream = specdec_jax.stream(decoder, TEXTS[0], max_new_tokens=NUM_NEW)
  assert stream.completion is None
  pieces = [next(stream), *stream]
  assert len(pieces) > 1
  assert ''.join(pieces) == completions[0].text
  found = stream.completion
  assert found.tokens == completions[0].tokens
  assert found.statistics == completions[0].statistics
  assert found.log_probs == pytest.approx(completions[0].log_probs, abs=1e-5)


def test_a_stream_holds_back_what_may_begin_a_stop_string(decoder, completions):
  text = completions[0].text
  for length in (2, 3):
    stop = text[-length:]
    place = text.index(stop)
    stream = specdec_jax.stream(
      decoder, TEXTS[0], max_new_tokens=NUM_NEW, stop=[stop]
    )
    assert ''.join(stream) == text[:place] == stream.completion.text
    assert stream.completion.stop == stop
  # What only began like one comes out in the end.
  stop = f'{text[-2:]}\n'
  stream = specdec_jax.stream(
    decoder, TEXTS[0], max_new_tokens=NUM_NEW, stop=[stop]
  )
  assert ''.join(stream) == text
  assert stream.completion.stop is None


def test_a_character_of_several_tokens_is_shown_whole():
  words = vocabularies.Vocabulary(tokenizer=tiny.make_tokenizer())
  read, shown = TextStream(), []
  for token in words.encode('ä€'):
    piece, read = vocabularies.stream_text(words, read, [token])
    shown.append(piece)
  assert ''.join(shown) == 'ä€'
  assert '\ufffd' not in shown


@pytest.mark.parametrize(
  ('texts', 'options', 'message'),
  [
    ('a text', {}, 'texts is a string'),
    ([b'ab'], {}, "text 1.*b'ab'"),
    (['ab', ' \n'], {}, 'text 2.*empty'),
    (
      ['ab', 'ab' * 200],
      {},
      r'prompt 2.*\d+ tokens',
    ),
    (['ab' * 60], {'max_new_tokens': 100}, 'lower max_new_tokens to'),
    (['ab'], {'max_new_tokens': 0}, 'max_new_tokens .* got 0'),
    (['ab'], {'batch_size': 0}, 'batch_size .* got 0'),
    (['ab'], {'seed': -1}, 'seed .* got -1'),
    (['ab'], {'stop': 'ab'}, 'stop is a string'),
    (['ab'], {'stop': ['']}, 'stop.*empty'),
    (['ab'], {'stop': ['a', None]}, 'stop.*None'),
    (['ab'], {'stop': 3}, 'stop is 3'),
    (['ab'], {'stop': iter(['a'])}, 'stop is .*iterator'),
    (['ab'], {'seed': 1.0}, 'seed should be an integer'),
    (['ab'], {'stop': ['<|im_end|>']}, r"'<\|im_end\|>'"),
    (['ab'], {'num_devices': 99}, '99: there are'),
    (['ab'] * 3, {'num_devices': 2, 'batch_size': 3}, '3 rows.*2 devices'),
    (['ab'], {'system': 'ab'}, 'system.*chat'),
    (['ab'], {'tools': [{}]}, 'tools.*text 1'),
    ([[]], {}, 'text 1.*messages'),
    (['ab', [{'content': 'ab'}]], {}, 'text 2.*"role"'),
    ([[{'role': 'user', 'content': {1}}]], {}, 'text 1: .*serializable'),
  ],
)
def test_what_cannot_be_decoded_is_said_at_once(
  decoder, texts, options, message
):
  usual = {'max_new_tokens': NUM_NEW, 'batch_size': 2}
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(decoder, texts, **usual | options)  # Not iterated.


def test_a_conversation_is_a_text(decoder):
  [chat] = generate(decoder, ['ab'], chat=True, system='in')
  turns = [
    {'role': 'system', 'content': 'in'},
    {'role': 'user', 'content': 'ab'},
    {'role': 'assistant', 'content': 'the'},
  ]
  found, longer = generate(decoder, [turns[:2], turns], tools=[{}])
  assert (found.tokens, found.prompt) == (chat.tokens, 'ab')
  assert longer.tokens != chat.tokens
  assert longer.prompt == 'the'
  stream = specdec_jax.stream(decoder, turns[:2], max_new_tokens=NUM_NEW)
  assert (''.join(stream), stream.completion.prompt) == (chat.text, 'ab')


def test_numbers_may_be_those_of_numpy(decoder):
  found = generate(
    decoder,
    TEXTS[:2],
    seed=np.arange(2),
    temperature=np.array([0, 0.5]),
    top_k=[None, np.int32(5)],
  )
  plain = {'temperature': [0, 0.5], 'top_k': [None, 5]}
  same = generate(decoder, TEXTS[:2], seed=range(2), **plain)
  assert found == same
  stream = specdec_jax.stream(
    decoder, TEXTS[0], max_new_tokens=np.int64(NUM_NEW), seed=np.uint32(0)
  )
  assert ''.join(stream) == found[0].text


def test_choices_may_be_those_of_numpy(folder):
  made, same = (
    specdec_jax.load(
      folder,
      gamma=number(3),
      max_ngram=number(2),
      temperature=1.0,
      top_k=number(4),
      suppress_tokens=array([5, 7]),
      logit_bias={number(6): 1.5},
      sequence_bias={(number(5), number(7)): -2.5},
    )
    for number, array in ((np.int64, np.array), (int, list))
  )
  assert made.recipe == same.recipe
  assert repr(made.sampling) == repr(same.sampling)
  assert made.at(np.int32(2)) is not None
  counts = {'batch_size': np.int64(2), 'max_new_tokens': np.int64(1)}
  specdec_jax.generate(made, TEXTS[:2], top_logprobs=np.int32(1), **counts)


def test_options_may_be_paths(folder, tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text('the in ab')
  made = specdec_jax.load(folder, drafter='suffix', suffix_text=path)
  assert made.params.drafter.tokens.max() > 0


def test_all_names_can_be_completed():
  assert {*specdec_jax.__all__} <= {*dir(specdec_jax)}


def test_a_decoder_is_shown_without_its_weights(decoder):
  assert len(repr(decoder)) < 20_000


def test_a_gamma_below_one_is_refused(decoder):
  generate(decoder, TEXTS[:1], temperature=0.5)  # Makes a decoder of samples.
  with pytest.raises(ValueError, match='gamma'):
    decoder.at(-1)
  for other in (None, 2.0, '2'):
    with pytest.raises(TypeError, match='integer'):
      decoder.at(other)


def test_no_texts_are_no_completions(decoder):
  assert generate(decoder, []) == []


def test_a_stream_is_of_one_text(decoder):
  with pytest.raises(ValueError, match='text 1: messages'):
    specdec_jax.stream(decoder, ['ab'])
  with pytest.raises(ValueError, match='stop is a string'):
    specdec_jax.stream(decoder, 'ab', stop='ab')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'max_ngrm': 2},
      "'max_ngrm'.*mean max_ngram",
    ),
    ({'drafter': 'modle'}, "'modle'.*prompt_lookup"),
    ({'verification': 'gready'}, "'gready'.*speculative_sampling"),
    ({'drafter': 'model'}, 'model needs a draft model'),
    (
      {'drafter': 'uniform', 'draft_model': '{folder}'},
      'draft model is for .*, not uniform',
    ),
    ({'draft_dtype': 'bfloat16'}, 'draft_dtype.*draft_model'),
    (
      {'drafter': drafters.NoDrafter(), 'draft_model': '{folder}'},
      'draft_model.*by name',
    ),
    ({'drafter': drafters.NoDrafter(), 'gamma': 2}, "called 'gamma'; they"),
    ({'dtype': 'float16'}, "is 'float16'.*'float32'"),
    ({'dtype': jnp.bfloat16}, "'float32'.*'bfloat16'"),
    ({'temperature': 'hot'}, "temperature.*'hot'"),
    (
      {'lenience': 0.5},
      'lenience 0.5 .*verification greedy',
    ),
    (
      {'verification': 'greedy', 'temperature': 1.0},
      'greedy.*temperature 0, got 1.0',
    ),
    ({'drafter': 'ngram'}, 'ngram needs ngram_text'),
    ({'drafter': 'ngram', 'ngram_text': 'nowhere'}, 'ngram_text.*nowhere'),
    ({'drafter': 'suffix', 'suffix_text': 'nowhere'}, 'suffix_text.*nowhere'),
    ({'drafter': 'grammar', 'gamma': 0}, 'gamma.*0'),
    ({'top_k': 3}, 'top_k 3 .*temperature 0'),
    ({'gamma': 'atuo'}, "'atuo'.*'auto'"),
    ({'max_ngram': 2.5}, 'max_ngram is 2.5, expected int'),
    ({'draft_model': 'ende-spec-drafter'}, 'ende-spec-drafter.*has none'),
    ({'gamma': 500}, 'gamma 500.*128'),
  ],
)
def test_choices_that_are_refused(folder, options, message):
  given = {
    name: value.format(folder=folder) if isinstance(value, str) else value
    for name, value in options.items()
  }
  with pytest.raises(ValueError, match=message):
    specdec_jax.load(folder, **given)


def test_an_eagle_head_of_another_vocabulary_is_refused(
  folder, completions, tmp_path
):
  def head(num_more: int) -> str:
    size = tiny.make_config().vocab_size + num_more
    sizes = toy_eagle.config(
      tiny.make_config(), vocab_size=size, draft_vocab_size=size
    )
    path = tmp_path / str(num_more)
    huggingface.save(path, sizes, toy_eagle.params(sizes, seed=1))
    return str(path)

  load = functools.partial(specdec_jax.load, folder, drafter='eagle')
  with pytest.raises(ValueError, match='264 logits'):
    load(draft_model=head(2000))
  padded = head(8)
  shutil.copy(f'{folder}/tokenizer.json', padded)
  [found] = generate(load(draft_model=padded), TEXTS[:1])
  assert found.tokens == completions[0].tokens
  # The weights say what they are for.
  unnamed = specdec_jax.load(folder, draft_model=padded)
  assert isinstance(unnamed.recipe.drafter, drafters.Eagle)
  path = Path(padded) / 'tokenizer.json'
  path.write_text(path.read_text().replace('<|im_start|>', '<|start|>'))
  with pytest.raises(ValueError, match=r"'<\|start\|>'"):
    load(draft_model=padded)


def test_choices_may_be_objects(folder, completions):
  decoder = specdec_jax.load(
    folder,
    drafter=drafters.DraftModel(
      model=Model(checkpoint=folder, dtype='float32'), gamma=3
    ),
    verification=rules.Greedy(),
  )
  [found] = generate(decoder, TEXTS[:1])
  assert found.tokens == completions[0].tokens
  assert found.statistics['alpha'] == 1.0
  named = specdec_jax.load(Path(folder), draft_model=folder, gamma=3)
  assert isinstance(named.recipe.drafter, drafters.DraftModel)
  # The weights are those of the target, read once.
  leaves = [named.params.target, named.params.drafter]
  assert leaves[0] is leaves[1]


def test_logits_that_are_no_numbers_are_said(tmp_path):
  broken = tiny.write_model(tmp_path / 'nan', change=tiny.burst)
  decoder = specdec_jax.load(broken, drafter='none')
  with pytest.raises(
    ValueError,
    match=r'prompt 1.*0 new.*\(NaN\)',
  ):
    generate(decoder, ['ab'])


def test_a_gamma_that_nobody_gives_is_plain_decoding(
  folder, tmp_path, monkeypatch, caplog
):
  """By the very program of plain decoding, and until something is known."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  caplog.set_level('INFO', logger='specdec_jax')
  auto = specdec_jax.load(folder)
  found = generate(auto, TEXTS)
  assert {(each.gamma, each.statistics['drafted']) for each in found} == {
    (0, 0)
  }
  assert [each.statistics['target_runs'] for each in found] == [NUM_NEW] * 5
  [sentence] = caplog.messages
  assert '`specdec bench` with the same options measures it' in sentence
  assert {key.recipe for key in auto.programs} == {auto.at(0).recipe}
  streamed = specdec_jax.stream(auto, TEXTS[0], max_new_tokens=NUM_NEW)
  assert ''.join(streamed) == found[0].text
  # What was measured holds for texts that may stop, and for streams.
  auto.gammas[2, 1] = RememberedGamma(gamma=3, source='bench')
  again = generate(auto, TEXTS, stop=['no such text'])
  assert {each.gamma for each in again} == {3}
  assert [each.tokens for each in again] == [each.tokens for each in found]
  # That bench chose 0 is said as such.
  auto.gammas[2, 1] = RememberedGamma(gamma=0, source='bench')
  generate(auto, TEXTS)
  assert 'bench chose 0 on 20' in caplog.messages[-1]


def test_to_measure_gamma_takes_the_extra_measure(folder, monkeypatch):
  decoder = specdec_jax.load(folder)
  monkeypatch.setattr(lazy, 'is_installed', lambda module: False)
  with pytest.raises(ValueError, match='needs the extra measure'):
    specdec_jax.generate(
      decoder, TEXTS, max_new_tokens=NUM_NEW, measure_gamma=True
    )


def test_what_changes_the_text_keeps_its_usual_gamma(folder):
  for more in ({'verification': 'top_beta'}, {'exact_bits': True}):
    decoder = specdec_jax.load(folder, **more)
    assert (decoder.is_auto, decoder.drafter.gamma) == (False, 8)
    with pytest.raises(ValueError, match='needs a gamma'):
      specdec_jax.load(folder, gamma='auto', **more)
  assert specdec_jax.load(folder).is_auto


@pytest.mark.parametrize(
  ('checkpoint', 'name'),
  [
    (None, 'prompt_lookup'),
    ('ende-nano', 'model'),
    ('ende-spec-drafter', 'spec_drafter'),
    ('ende-block', 'block'),
    ('smollm2-135m-eagle', 'eagle'),
    ('no such model', 'model'),
  ],
)
def test_weights_name_their_drafter(checkpoint, name):
  assert usual.drafter(checkpoint) == name


def test_shipped_targets_have_shipped_drafters():
  """Unless an option says that another is meant; the folders exist."""
  of = usual.shipped
  eagle, pair = 'smollm2-135m-eagle', 'ende-nano'
  assert of('smollm2-135m', {}) == (eagle, {'lookup': True})
  given = {'gamma': 3, 'lookup': False, 'max_ngram': None}
  assert of('smollm2-135m', given) == (eagle, given)
  # A tree is not copied, and an n-gram or several copies are looked up.
  assert of('smollm2-135m', {'tree': 8}) == (eagle, {'tree': 8})
  for name in ('max_ngram', 'num_continuations', 'ngram_text'):
    assert of('smollm2-135m', {name: 2}) == (None, {name: 2})
  assert of('ende-mini', {'gamma': 4}) == (pair, {'gamma': 4})
  assert of('./ende-mini', {}) == (None, {})
  # A drafter given by name has its own, and no more options than are given.
  assert of('smollm2-135m', {}, 'eagle') == (eagle, {})
  kinds = {
    'model': pair,
    'spec_drafter': 'ende-spec-drafter',
    'block': 'ende-block',
    'eagle': None,
  }
  for kind, name in kinds.items():
    assert of('ende-mini', {'gamma': 4}, kind) == (name, {'gamma': 4})
  # The pair of language models loses, so that it has to be asked for.
  assert of('lm-mini', {})[0] is None
  assert of('lm-mini', {}, 'model')[0] == 'lm-nano'


def test_a_shipped_target_drafts_unasked(tmp_path):
  """In Python and on the command line."""
  choice = specdec_jax.load('ende-mini', gamma=3).recipe.drafter
  nano = Model(checkpoint='ende-nano', dtype='float32')
  assert (choice.model, choice.gamma) == (nano, 3)
  path = tmp_path / 'trace.jsonl'
  flags = '--model=ende-mini --gamma=3 --max_new_tokens=4 --prompt=text'
  assert main.main(['generate', *flags.split(), f'--trace={path}']) == 0
  header = json.loads(path.read_text('utf-8').splitlines()[0])
  assert (header['drafter'], header['gamma']) == ('ende-nano', 3)


def test_what_is_remembered_is_copied(folder, completions, monkeypatch):
  decoder = specdec_jax.load(folder, drafter='suffix', gamma=4, pool_size=512)
  first = generate(decoder, TEXTS)
  tokens = [each.tokens for each in first]
  assert tokens == [each.tokens for each in completions]
  for each in first:
    assert each.context[-NUM_NEW:] == each.tokens

  def compile_nothing(self, *args):
    raise AssertionError('it is compiled already')

  monkeypatch.setattr(
    specdec_jax.decoding.program.Part, 'lower', compile_nothing
  )
  wiser = decoder.remember(each.context for each in first)
  num_runs = lambda found: [each.statistics['target_runs'] for each in found]
  again = generate(wiser, TEXTS)
  assert [each.tokens for each in again] == tokens
  # Of eight tokens, five and three, if the match is of the right text.
  assert sum(num_runs(again)) < 0.6 * sum(num_runs(first))
  assert num_runs(generate(decoder, TEXTS)) == num_runs(first)
  # Ids may come from an iterator, which is read once.
  same = decoder.remember(map(int, each.context) for each in first)
  pools = [each.params.drafter for each in (same, wiser)]
  jax.tree.map(np.testing.assert_array_equal, *pools)
  # Strings are remembered by their tokens.
  assert decoder.remember(['the in ab']).params.drafter.tokens.max() > 0


def test_who_does_not_remember_says_so(folder, decoder):
  with pytest.raises(ValueError, match='suffix'):
    decoder.remember(['the in ab'])
  forgetful = specdec_jax.load(folder, drafter='suffix')
  with pytest.raises(ValueError, match='is a string'):
    forgetful.remember('the in ab')
  with pytest.raises(ValueError, match='text 1 is neither a string nor ids: 5'):
    forgetful.remember([5, 6])
  for token in (-1, 10**6):
    for ids in ([2, token], iter([2, token])):
      with pytest.raises(ValueError, match='text 2 has ids'):
        forgetful.remember([[1], ids])


def test_a_text_is_read_once_for_all_gammas(folder, tmp_path, monkeypatch):
  (tmp_path / 'text').write_text('the in ab')
  read, paths = text_files.tokens_of_file, []
  monkeypatch.setattr(
    text_files,
    'tokens_of_file',
    lambda path, *args, **names: (
      paths.append(path) or read(path, *args, **names)
    ),
  )
  made = specdec_jax.load(
    folder, drafter='suffix', suffix_text=tmp_path / 'text'
  )
  pools = {id(each.params.drafter) for each in (made, made.at(3), made.sampled)}
  assert (len(paths), len(pools)) == (1, 1)


def test_plain_decoding_has_no_gamma(decoder):
  plain = decoder.at(0)
  assert plain.at(0).drafter.gamma == 0
  with pytest.raises(ValueError, match='no gamma'):
    plain.at(4)


def test_all_gammas_have_what_is_remembered(folder):
  auto = specdec_jax.load(folder, drafter='suffix', gamma='auto', pool_size=64)
  one = auto.at(3)
  wiser = auto.remember(['the in ab'])
  assert wiser.at(3).params.drafter is wiser.params.drafter
  assert wiser.at(3).parts is one.parts
  assert wiser.programs is one.programs
  assert wiser.at(0).params.drafter == ()
  sampled = one.sampled
  wiser = one.remember(['the in ab'])
  assert wiser.sampled.params is wiser.params
  assert wiser.sampled.parts is sampled.parts
