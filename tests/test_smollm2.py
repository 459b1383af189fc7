"""SmolLM2-135M through the compiled loops.

Greedy decoding gives Hugging Face's tokens, speculation changes none of them,
and a row is the same whatever batch it is in.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest

import specdec_jax
from specdec_jax import drafters, verification
from specdec_jax.base import Params
from specdec_jax.checkpoints import loading
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import families
from specdec_jax.sampling import logits
from specdec_jax.text import prompts
from tests import slow

pytestmark = [pytest.mark.smollm2, pytest.mark.optimized]

RECORDS = json.loads(
  (pathlib.Path(__file__).parent / 'golden/smollm2_greedy.json').read_text(
    encoding='utf-8'
  )
)['records']
GREEDY = logits.standardize(temperature=0.0)


@functools.cache
def model():
  try:
    return loading.load('smollm2-135m')
  except (ImportError, ValueError) as error:
    pytest.skip(f'SmolLM2 is not installed: {error}')


def make_prompt(rows, *, num_new, row_ids=None, width=None):
  return prompts.pack(
    rows,
    config=model().config,
    max_new_tokens=num_new,
    width=width,
    row_ids=row_ids,
  )


@functools.cache
def compiled_plain(max_len):
  loaded = model()

  @jax.jit
  def generate(params, prompt):
    return autoregressive.generate(
      Params(params),
      jax.random.key(0),
      prompt,
      method=Method(
        target=families.language_model(loaded.config),
        logits_to_probs=GREEDY,
        eos_id=loaded.vocabulary.eos_ids,
      ),
      max_len=max_len,
    )

  return functools.partial(generate, loaded.params)


@functools.cache
def compiled_speculative(max_len, temperature=0.0, num_layers=None):
  """With one width of call, full of drafts or not: half of the loop to compile.
  The command's test has both."""
  loaded = model()
  num_layers = num_layers or loaded.config.num_layers
  config = dataclasses.replace(loaded.config, num_layers=num_layers)
  drafter = drafters.prompt_lookup(gamma=4, max_ngram=3, min_ngram=1)

  @jax.jit
  def generate(params, prompt):
    return speculative.generate(
      Params(params),
      jax.random.key(0),
      prompt,
      method=Method(
        target=families.language_model(config),
        drafter=drafter._replace(may_abstain=False),
        verify_fn=verification.speculative_sampling,
        logits_to_probs=logits.standardize(temperature=temperature, top_p=0.95)
        if temperature
        else GREEDY,
        eos_id=loaded.vocabulary.eos_ids,
      ),
      max_len=max_len,
    )

  return functools.partial(generate, loaded.params)


def new_tokens(output, prompt, row):
  start = int(prompt.decoder_lengths[row])
  return np.asarray(output.tokens)[row, start : int(output.lengths[row])]


@slow.parametrize('side', ['plain', 'speculative'], now=['speculative'])
def test_greedy_tokens_are_those_of_hugging_face(side):
  """All prompts at once, so with ragged rows too. Every fourth is read in
  `golden/test_huggingface_goldens.py` to the end of its text."""
  num_new, records = 16, RECORDS
  prompt = make_prompt([r['prompt_ids'] for r in records], num_new=num_new)
  max_len = prompt.decoder_tokens.shape[1] + num_new
  if side == 'plain':
    output = compiled_plain(max_len)(prompt)
  else:
    output = compiled_speculative(max_len)(prompt)
  for row, record in enumerate(records):
    np.testing.assert_array_equal(
      new_tokens(output, prompt, row),
      record['output_ids'][:num_new],
      err_msg=record['text'],
    )
  if side == 'speculative':
    statistics = output.statistics
    assert np.sum(statistics.num_accepted) > 0
    assert np.sum(statistics.num_target_runs) < np.sum(statistics.num_tokens)


@pytest.mark.slow
def test_a_batch_gives_row_by_row_what_batch_one_gives():
  """Sampled, by the first layers: what a batch may change is how products of
  these sizes are rounded. Through all layers greedy rows are Hugging Face's,
  which were decoded one by one."""
  by_length = sorted((r['prompt_ids'] for r in RECORDS), key=len)
  rows = by_length[:: max(1, len(by_length) // 8)][:8]
  assert len({len(row) for row in rows}) > 4
  width, num_new = max(map(len, rows)), 12
  generate = compiled_speculative(width + num_new, 1.0, num_layers=2)
  together = make_prompt(rows, num_new=num_new)
  output = generate(together)
  texts = set()
  for i in (0, 2, 5, 7):
    row = rows[i]
    alone = make_prompt([row], num_new=num_new, row_ids=[i], width=width)
    expected = new_tokens(generate(alone), alone, 0)
    np.testing.assert_array_equal(new_tokens(output, together, i), expected)
    texts.add(tuple(expected))
  assert len(texts) == 4


@pytest.mark.slow
def test_the_shipped_eagle_changes_no_token_of_the_suite():
  """Of two prompts of each category that is not long; and it is of use."""
  examples = pytest.importorskip('experiments.suite.examples')
  model()
  own = examples.own()
  del own['long input']
  texts = [
    examples.shown(example, False)
    for category in own.values()
    for example in category[:2]
  ]
  found = {}
  for drafter, options in {
    'none': {},
    'eagle': {'draft_model': 'smollm2-135m-eagle', 'gamma': 3},
  }.items():
    decoder = specdec_jax.load('smollm2-135m', drafter=drafter, **options)
    found[drafter] = specdec_jax.generate(
      decoder, texts, max_new_tokens=24, chat=True, batch_size=len(texts) // 2
    )
  pairs = list(zip(*found.values(), strict=True))
  for plain, drafted in pairs:
    assert plain.tokens == drafted.tokens
  total = lambda name: sum(drafted.statistics[name] for _, drafted in pairs)
  assert total('tokens') > 1.5 * total('target_runs')


@pytest.mark.slow
def test_a_block_drafter_changes_no_token_of_200_prompts():
  """A drafter that begins as SmolLM2's last layers, before any training; the
  prompts are of several lengths."""
  block_start = pytest.importorskip('specdec_jax.training.block_start')
  loaded = model()
  gamma, num_new = 4, 8
  config = dataclasses.replace(
    block_start.block_config(
      target='smollm2-135m', block_size=gamma, markov_rank=16
    ),
    dtype=loaded.config.dtype,
  )
  ids = jax.numpy.arange(config.draft_vocab_size, dtype=jax.numpy.int32)
  whole = loading.read(loading.locate('smollm2-135m'), dtype=jax.numpy.float32)
  own = block_start.initial_params(config, jax.random.key(0), *whole, ids)
  bound = families.bind(loaded.config, config, width=gamma + 1)
  params = Params(loaded.params, jax.jit(bound.join)(loaded.params, own))
  # Pieces of the records' texts, of 4 to 11 tokens.
  texts = [r['prompt_ids'] + r['output_ids'] for r in RECORDS]
  rows = [text[-4 * i :][: 3 + i] for i in range(1, 9) for text in texts][:200]
  max_len = 11 + num_new

  @jax.jit
  def generate(params, prompt):
    return speculative.generate(
      params,
      jax.random.key(0),
      prompt,
      method=Method(
        target=bound.target,
        drafter=drafters.autoregressive(
          drafters.block(bound.model),
          gamma=gamma,
          logits_to_probs=GREEDY,
          is_argmax=True,
        ),
        verify_fn=verification.speculative_sampling,
        logits_to_probs=GREEDY,
        eos_id=loaded.vocabulary.eos_ids,
      ),
      max_len=max_len,
    )

  prompt = make_prompt(rows, num_new=num_new, width=11)
  output = generate(params, prompt)
  expected = compiled_plain(max_len)(prompt)
  assert len({tuple(row) for row in rows}) == len(rows) == 200
  for row in range(len(rows)):
    np.testing.assert_array_equal(
      new_tokens(output, prompt, row), new_tokens(expected, prompt, row)
    )
  assert np.sum(output.statistics.num_accepted) > 0
