"""Trace records against the decode that they describe."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import verification
from specdec_jax.assembly import recording
from specdec_jax.base import Draft, Prompt, Verification
from specdec_jax.decoding import step_values
from specdec_jax.decoding.speculative import StepInfo
from tests import slow
from tests.assembly import tiny_decodes as tiny

_CASES = {
  'model': ('model', verification.speculative_sampling, 1.0),
  'lookup': ('lookup', verification.speculative_sampling, 1.0),
  'lookup_greedy': ('lookup', verification.greedy, 0.0),
  'block': ('model', verification.block_verification, 1.0),
}


def _trace(infos, prompt=None, pieces=tiny.pieces):
  state = recording.init(tiny.prompt() if prompt is None else prompt)
  records = []
  for info in infos:
    new, state = recording.iteration_records(info, state, pieces)
    records.extend(new)
  return records


@functools.cache
def _decodes(name):
  """Infos, output and records of a few decodes."""
  drafter, verify_fn, temperature = _CASES[name]
  decodes = []
  for seed in range(3):
    infos, output = tiny.decode(
      drafter, verify_fn, temperature=temperature, seed=seed
    )
    decodes.append((infos, output, _trace(infos)))
  return decodes


@slow.parametrize('name', _CASES, now=['lookup', 'block'])
def test_committed_tokens_are_the_output(name):
  for _, output, records in _decodes(name):
    for b, row_id in enumerate(tiny.prompt().row_ids.tolist()):
      tokens = tiny.prompt().decoder_tokens[b].tolist()
      tokens = tokens[: int(tiny.prompt().decoder_lengths[b])]
      mine = [r for r in records if r['row'] == row_id]
      for record in mine:
        assert record['start'] == len(tokens)
        block = recording.committed(record)
        assert record['committed'] == len(block)
        tokens += [token['token'] for token in block]
      assert tokens == output.tokens[b, : output.lengths[b]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize('name', _CASES)
def test_totals_are_the_statistics(name):
  for _, output, records in _decodes(name):
    statistics = output.statistics
    for b, row_id in enumerate(tiny.prompt().row_ids.tolist()):
      mine = [r for r in records if r['row'] == row_id]
      summary = recording.summarize(mine, tiny.GAMMA)
      assert summary.num_tokens == statistics.num_tokens[b]
      assert summary.num_target_runs == statistics.num_target_runs[b]
      assert summary.num_drafted == statistics.num_drafted[b]
      assert list(summary.num_tested) == statistics.num_tested[b].tolist()
      assert list(summary.num_accepted) == statistics.num_accepted[b].tolist()


@pytest.mark.parametrize('name', _CASES)
def test_numbers_are_those_of_the_step(name):
  for infos, _, records in _decodes(name):
    rows = tiny.prompt().row_ids.tolist()
    for record in records:
      info, b = infos[record['iteration']], rows.index(record['row'])
      p = np.asarray(info.target_probs[b])
      for i, token in enumerate(record['drafted']):
        assert np.float32(token['p']) == p[i, token['token']]
        accept_prob = info.verification.accept_probs[b, i]
        assert np.float32(token['accept_prob']) == accept_prob
        if info.draft.probs is None:
          assert token['q'] == 1.0
        else:
          q = info.draft.probs[b, i, token['token']]
          assert np.float32(token['q']) == q
        if info.verification.uniforms is None:
          assert token['u'] is None
        else:
          u = info.verification.uniforms[b, i]
          assert np.float32(token['u']) == u
      if record['next']:
        position = int(info.verification.num_accepted[b])
        expected = p[position, record['next']['token']]
        assert np.float32(record['next']['p']) == expected


@pytest.mark.parametrize('name', ['model', 'lookup'])
def test_accepted_means_below_the_ratio(name):
  verdicts = []
  for *_, records in _decodes(name):
    for token in (t for r in records for t in r['drafted']):
      u, q, p = (np.float32(token[key]) for key in ('u', 'q', 'p'))
      verdicts.append(token['verdict'])
      if token['verdict'] in ('accepted', 'rejected'):
        assert (u * q < p) == (token['verdict'] == 'accepted')
  assert {'accepted', 'rejected', 'discarded'} <= set(verdicts)


def test_the_cases_show_every_verdict():
  found = set()
  for name in _CASES:
    for *_, records in _decodes(name):
      for record in records:
        found |= {token['verdict'] for token in record['drafted']}
        found.add(record['next'] and record['next']['verdict'])
  assert found == {*recording.DRAFT_VERDICTS, *recording.NEXT_VERDICTS, None}


def test_finished_rows_have_no_records():
  infos, output = tiny.decode('lookup', max_lengths=(5, tiny.MAX_LEN))
  records = _trace(infos)
  runs = output.statistics.num_target_runs.tolist()
  assert runs[0] < runs[1]
  for row_id, num_runs in zip([40, 7], runs, strict=True):
    mine = [r['iteration'] for r in records if r['row'] == row_id]
    assert mine == list(range(num_runs))


def test_eos_truncates():
  eos, other = tiny.EOS_ID, 5
  info = _info(
    drafted=[[other, eos, 6, 7]], num_accepted=[4], counts=[2], starts=[3]
  )
  [record] = _trace([info], _one_row())
  verdicts = [token['verdict'] for token in record['drafted']]
  assert verdicts == ['accepted', 'accepted', 'truncated', 'truncated']
  assert record['next'] is None
  assert record['committed'] == 2


def test_a_rejection_beyond_the_end_is_truncated():
  info = _info(
    drafted=[[5, tiny.EOS_ID, 6]], num_accepted=[2], counts=[2], starts=[3]
  )
  [record] = _trace([info], _one_row())
  verdicts = [token['verdict'] for token in record['drafted']]
  assert verdicts == ['accepted', 'accepted', 'truncated']
  summary = recording.summarize([record], 3)
  assert summary.num_drafted == 2
  assert summary.num_tested == (1, 1, 0)


def test_without_a_draft_the_token_is_plain():
  info = _info(drafted=[[]], num_accepted=[0], counts=[1], starts=[3])
  [record] = _trace([info], _one_row())
  assert record['drafted'] == []
  assert record['next']['verdict'] == 'plain'
  assert recording.summarize([record], 0).alpha is None


def test_not_a_number_becomes_null():
  info = _info(drafted=[[5, 6]], num_accepted=[0], counts=[1], starts=[3])
  target_probs = info.target_probs.at[0, 1].set(jnp.nan)
  [record] = _trace([info.replace(target_probs=target_probs)], _one_row())
  assert [token['p'] is None for token in record['drafted']] == [False, True]


def test_texts_join_over_split_characters():
  # Each token is one byte, as in a byte-level vocabulary.
  text = 'né €🙂!'
  data = list(text.encode())
  infos, start = [], 3
  for i in range(0, len(data), 2):
    infos.append(
      _info(
        drafted=[[data[i], 0xC3]],
        next_token=data[i + 1 : i + 2] or [0x21],
        num_accepted=[1],
        counts=[2 if i + 1 < len(data) else 1],
        starts=[start],
        vocab_size=256,
      )
    )
    start += 2
  records = _trace(infos, _one_row(), _byte_pieces)
  shown = [t['text'] for r in records for t in recording.committed(r)]
  assert ''.join(shown) == text
  assert len(shown) == len(data)


def test_gather_compiles_once():
  infos, _ = tiny.decode('model')
  step_values.gather.clear_cache()
  _trace(infos)
  assert step_values.gather._cache_size() == 1
  values = jax.eval_shape(step_values.gather, infos[0])
  assert all(leaf.ndim <= 2 for leaf in jax.tree.leaves(values))


def test_gathered_values_give_the_same_records():
  infos, _ = tiny.decode('model')
  assert _trace([step_values.gather(info) for info in infos]) == _trace(infos)


def test_prompt_records():
  first, second = recording.prompt_records(tiny.prompt(), ['a', 'b'])
  assert first == {
    'type': 'prompt',
    'row': 40,
    'text': 'a',
    'num_tokens': 3,
  }
  assert (second['row'], second['num_tokens']) == (7, 5)
  assert recording.prompt_records(tiny.prompt(), ['a']) == [first]


def test_prompt_records_of_an_encoder():
  prompt = _one_row().replace(encoder_tokens=jnp.array([[8, 9, 0]], jnp.int32))
  [record] = recording.prompt_records(prompt, ['a'])
  assert (record['num_tokens'], record['num_encoder_tokens']) == (3, 2)


def test_header_keeps_its_own_keys():
  names = {'target': 't', 'drafter': 'd', 'verification': 'v', 'gamma': 2}
  header = recording.header(**names, device='cpu')
  assert header['version'] == recording.VERSION
  assert header['device'] == 'cpu'


def _one_row():
  return Prompt(
    encoder_tokens=None,
    decoder_tokens=jnp.array([[1, 5, 6]], jnp.int32),
    decoder_lengths=jnp.array([3], jnp.int32),
    row_ids=jnp.array([0], jnp.int32),
  )


def _info(
  *,
  drafted,
  num_accepted,
  counts,
  starts,
  next_token=(9,),
  vocab_size=tiny.VOCAB_SIZE,
):
  gamma, batch_size = 4, len(drafted)
  tokens = [[*row, *[0] * (gamma - len(row))] for row in drafted]
  weights = jax.random.uniform(
    jax.random.key(0), (batch_size, gamma + 1, vocab_size)
  )
  return StepInfo(
    draft=Draft(
      tokens=jnp.array(tokens, jnp.int32),
      probs=None,
      lengths=jnp.array([len(row) for row in drafted], jnp.int32),
    ),
    verification=Verification(
      num_accepted=jnp.array(num_accepted, jnp.int32),
      next_token=jnp.array(next_token, jnp.int32),
      accept_probs=jnp.ones((batch_size, gamma), jnp.float32),
    ),
    target_probs=weights / weights.sum(-1, keepdims=True),
    starts=jnp.array(starts, jnp.int32),
    counts=jnp.array(counts, jnp.int32),
  )


def _byte_pieces(ids):
  """Characters belong to the byte that completes them."""
  pieces, done = [], ''
  for i in range(len(ids)):
    text = bytes(ids[: i + 1]).decode(errors='replace')
    is_held = text.endswith('\N{REPLACEMENT CHARACTER}')
    pieces.append('' if is_held else text[len(done) :])
    done = done if is_held else text
  pieces[-1] += bytes(ids).decode(errors='replace')[len(done) :]
  return pieces
