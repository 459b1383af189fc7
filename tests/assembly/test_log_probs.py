"""Log-probabilities of what was decoded and of what else could have come, for
accepted, corrected and bonus tokens alike."""

import collections

import jax
import numpy as np
import pytest

pytest.importorskip('safetensors')
pytest.importorskip('tokenizers')

import specdec_jax
from specdec_jax import base
from specdec_jax.assembly import (
  completions,
  log_probs,
  packing,
  recording,
  running,
)
from specdec_jax.models import families
from tests import slow
from tests.cli import tiny

TEXTS = ['the in ab', 'ab', 'in the the', 'the ab ab ab', 'in'] * 2
NUM_NEW, TOP = 40, 3
# The model drafts for itself, and is wrong now and then.
ROUNDED = {'draft_dtype': 'bfloat16', 'gamma': 3}
WAY = {'repetition_penalty': 1.3, 'top_k': 5, 'suppress_tokens': [7]}


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('log_probs') / 'tiny')


def decode(decoder, **options):
  """Completions, and of each row the tokens that its iterations recorded."""
  settings = running.DecodeSettings(
    max_new_tokens=NUM_NEW, batch_size=len(TEXTS), top_logprobs=TOP, **options
  )
  [batch] = packing.pack(decoder, TEXTS, settings)
  decoder, records = running.decoder_for(decoder, batch), []
  run = running.compile_decode(decoder, batch, settings)
  output = jax.device_get(run(batch, [records.append]))
  scored = log_probs.of_batch(decoder, batch, output, settings)
  tokens = collections.defaultdict(list)
  for record in records:
    tokens[record['row']] += recording.committed(record)
  made = [
    completions.of_row(decoder, batch, output, row, scored)
    for row in range(len(TEXTS))
  ]
  return batch, made, [tokens[row] for row in range(len(TEXTS))]


@slow.parametrize(
  ('drafting', 'temperature'),
  [
    (ROUNDED, 1.0),
    ({'drafter': 'prompt_lookup', 'gamma': 3}, 0.0),
    ({'num_continuations': 2, 'gamma': 3, 'verification': 'traversal'}, 0.0),
  ],
  now=[(ROUNDED, 1.0)],
)
def test_all_kinds_of_tokens_have_those_of_the_loop(
  folder, drafting, temperature
):
  limits = WAY if temperature else {**WAY, 'top_k': None}
  if 'draft_dtype' in drafting:
    drafting = {**drafting, 'draft_model': folder}
  decoder = specdec_jax.load(
    folder, temperature=temperature, **drafting, **limits
  )
  _, made, recorded = decode(decoder)
  kinds = collections.Counter()
  for each, tokens in zip(made, recorded, strict=True):
    assert [token['token'] for token in tokens] == [*each.tokens]
    raw = [dict(top) for top in each.top_log_probs]
    own = [dict(top) for top in each.top_processed_log_probs]
    for i, token in enumerate(tokens):
      kinds[token['verdict']] += 1
      # The loop's own: of the model, and p, by which it was judged or drawn.
      told = raw[i].get(token['token'], each.log_probs[i])
      assert told == pytest.approx(each.log_probs[i], abs=1e-4)
      if temperature:
        p = np.exp(each.processed_log_probs[i])
        assert p == pytest.approx(token['p'], abs=1e-5)
      else:
        assert max(own[i], key=own[i].get) == token['token']
      assert 7 not in own[i]
  assert min(kinds[kind] for kind in ('accepted', 'correction', 'bonus')) > 0


@pytest.mark.slow
def test_the_likeliest_are_those_of_one_call(folder):
  """Against a forward of whole texts, sorted by numpy."""
  decoder = specdec_jax.load(folder, drafter='none', **{**WAY, 'top_k': None})
  batch, made, _ = decode(decoder)
  model = families.language_model(decoder.config)
  width = batch.prompt.decoder_tokens.shape[1] + NUM_NEW
  extend, best = jax.jit(model.extend), 0
  for row, each in enumerate(made):
    start = int(batch.prompt.decoder_lengths[row])
    text = [*batch.prompt.decoder_tokens[row, :start].tolist(), *each.tokens]
    fed = np.array(text + [0] * (width - len(text)), np.int32)[None]
    first = base.Prompt(
      encoder_tokens=None,
      decoder_tokens=fed[:, :1],
      decoder_lengths=np.array([1], np.int32),
      row_ids=np.array([0], np.int32),
    )
    cache = model.init(decoder.params.target, first, width + 1)
    [found], _ = extend(decoder.params.target, fed, cache)
    places = np.asarray(found, np.float64)[start - 1 : len(text) - 1]
    places = places[:, : decoder.parts.target_info.vocab_size]
    for i, logits in enumerate(places):
      before = text[: start + i]
      seen = np.isin(np.arange(logits.size), before)
      penalty = np.where(logits < 0, 1.3, 1 / 1.3)
      processed = np.where(seen, logits * penalty, logits)
      processed[7] = -np.inf
      for values, top in (
        (logits, each.top_log_probs[i]),
        (processed, each.top_processed_log_probs[i]),
      ):
        norm = np.log(np.sum(np.exp(values)))
        order = np.argsort(-values)[:TOP]
        assert [token for token, _ in top] == order.tolist()
        np.testing.assert_allclose(
          [value for _, value in top], values[order] - norm, atol=1e-4
        )
      best += each.tokens[i] == each.top_processed_log_probs[i][0][0]
  assert best == sum(len(each.tokens) for each in made)


def test_who_asks_for_none_gets_none(folder):
  decoder = specdec_jax.load(folder, drafter='none')
  ask = lambda **options: next(
    specdec_jax.generate(decoder, TEXTS[:1], max_new_tokens=4, **options)
  )
  assert ask().top_log_probs is None
  found = ask(top_logprobs=2)
  assert [len(top) for top in found.top_log_probs] == [2] * 4
  assert found.tokens == tuple(top[0][0] for top in found.top_log_probs)
  # No more than there are.
  most = decoder.parts.target_info.vocab_size
  every = ask(top_logprobs=10**6).top_log_probs
  assert [len(top) for top in every] == [most] * 4
  with pytest.raises(ValueError, match=r'top_logprobs.*0'):
    ask(top_logprobs=0)


def test_limits_of_a_lenient_rule_count(folder):
  """It reads probabilities at temperature 1, though its text is greedy."""
  lenient = {'verification': 'greedy', 'lenience': 0.5, 'top_k': 2}
  decoder = specdec_jax.load(folder, gamma=2, **lenient)
  [found] = specdec_jax.generate(
    decoder, TEXTS[:1], max_new_tokens=4, top_logprobs=5
  )
  assert [len(top) for top in found.top_log_probs] == [5] * 4
  assert [len(top) for top in found.top_processed_log_probs] == [2] * 4
