"""Settings of all texts of a call, and of single ones, as a user gives them."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

import specdec_jax
from specdec_jax.assembly import running
from specdec_jax.assembly.text_settings import TextSettings
from tests.assembly.tiny_api import NUM_NEW, TEXTS, generate


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
    decoder.sampled, sampling=TextSettings(temperature=1.5, top_p=0.8)
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
  def least(stated, **fields):
    usual = TextSettings(**stated)
    settings = running.DecodeSettings(
      max_new_tokens=40, text=TextSettings(**fields)
    )
    sampling = settings.sampling(usual)
    # The same of a text with settings of its own.
    by_text = running.DecodeSettings(max_new_tokens=40, texts=[fields])
    assert by_text.of_text(0).sampling(usual) == sampling
    return sampling.min_length, sampling.min_new_tokens

  assert least({'min_length': 30}, min_new_tokens=0) == (None, 0)
  assert least({'min_new_tokens': 20}, min_length=5) == (5, None)
  assert least({'min_length': 30}, repetition_penalty=2.0) == (30, None)
  assert least({}, min_length=5, min_new_tokens=3) == (5, 3)
  # Of all texts one name, of a text the other.
  both = running.DecodeSettings(
    max_new_tokens=40,
    text=TextSettings(min_length=30),
    texts=[{'min_new_tokens': 2}, {}],
  )
  found = [both.of_text(i).sampling(TextSettings()) for i in range(2)]
  assert [(x.min_length, x.min_new_tokens) for x in found] == [
    (None, 2),
    (30, None),
  ]


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
