"""`specdec_jax.load`, `generate` and `stream`, as a user calls them."""

import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

import specdec_jax
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import TextStream
from tests.assembly.tiny_api import NUM_NEW, TEXTS, generate
from tests.cli import tiny


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
    (['ab', 'ab' * 200], {}, r'prompt 2.*\d+ tokens'),
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


def test_all_names_can_be_completed():
  assert {*specdec_jax.__all__} <= {*dir(specdec_jax)}


def test_a_decoder_is_shown_without_its_weights(decoder):
  assert len(repr(decoder)) < 20_000


def test_no_texts_are_no_completions(decoder):
  assert generate(decoder, []) == []


@pytest.mark.parametrize(
  ('text', 'options', 'message'),
  [
    (['ab'], {}, 'text 1: messages'),
    ('ab', {'stop': 'ab'}, 'stop is a string'),
  ],
)
def test_a_stream_is_of_one_text(decoder, text, options, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.stream(decoder, text, **options)


def test_logits_that_are_no_numbers_are_said(tmp_path):
  broken = tiny.write_model(tmp_path / 'nan', change=tiny.burst)
  decoder = specdec_jax.load(broken, drafter='none')
  with pytest.raises(
    ValueError,
    match=r'prompt 1.*0 new.*\(NaN\)',
  ):
    generate(decoder, ['ab'])
