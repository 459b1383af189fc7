"""What the plug-in decodes and restores, on stand-ins for T5X's objects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.rules import RULES
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.checkpoints import orbax
from specdec_jax.contrib.block_heads.network import BlockHeadsConfig
from specdec_jax.integrations import t5x
from specdec_jax.integrations.t5x import decoding, t5_networks
from specdec_jax.models import families
from tests import slow, toy, toy_block, toy_eagle, toy_t5
from tests.integrations.t5x.test_t5x_protocol import (
  GOLDEN,
  LENGTH,
  Model,
  Network,
  Sizes,
  Vocabulary,
  golden_sizes,
)

EOS = 6
ENCODER_ROWS = [[3, 4, 3, 4, 1], [5, 1], [6, 6, 2, 1], [4, 2, 5, 1]]
# T5X's inputs: the start token, and what is forced where it is not 0.
INPUTS = [
  [0, 5, 0, 6, 0, 3, 0, 0],
  [0, 0, 0, 2, 4, 0, 0, 2],
  [0, 3, 4, 0, 0, 0, 0, 0],
  [0, 6, 6, 0, 2, 0, 6, 6],
]


@pytest.fixture(scope='module')
def target():
  config = t5_networks.config_of(Network(Sizes()))
  return toy_t5.params(config, seed=8), config


def decode(params, inputs, **settings):
  """Tokens of `speculative_decode`, int32 `[B, L]`."""
  encoder_tokens = toy.prompt([[0]] * 4, encoder_rows=ENCODER_ROWS)
  decodes, _ = jax.jit(
    lambda params: t5x.speculative_decode(
      inputs=jnp.asarray(inputs),
      cache={},
      tokens_to_logits=Model().step(params, encoder_tokens.encoder_tokens),
      eos_id=EOS,
      **settings,
    )
  )(params)
  return np.asarray(decodes[:, 0])


def one_by_one(params, config, inputs, eos_id: int):
  """As T5X reads `inputs`: a token at a time, and forced where it is not 0."""
  model = toy.compiled(families.language_model(config))
  prompt = toy.prompt([[0]] * 4, encoder_rows=ENCODER_ROWS)
  cache = model.init(params, prompt, LENGTH + 1)
  tokens, ended = np.zeros((4, 1), np.int32), np.zeros(4, bool)
  forced = np.pad(np.asarray(inputs), ((0, 0), (0, 1)))
  rows = []
  for column in forced.T[1:]:
    logits, cache = model.extend(params, jnp.asarray(tokens), cache)
    best = np.asarray(jnp.argmax(logits[:, 0], axis=-1), np.int32)
    rows.append(np.where(ended, 0, np.where(column, column, best)))
    # An EOS that was forced ends nothing.
    ended = ended | ((column == 0) & (best == eos_id))
    tokens = rows[-1][:, None].astype(np.int32)
  return np.stack(rows, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize('drafter', ['prompt_lookup', 'none'])
def test_forced_tokens_stand_at_their_places(target, drafter):
  params, config = target
  expected = one_by_one(params, config, INPUTS, EOS)
  found = decode(params, INPUTS, gamma=2, drafter=drafter)
  np.testing.assert_array_equal(found, expected)
  # What was forced is there, whatever stands between.
  assert found[0, [0, 2, 4]].tolist() == [5, 6, 3]


@pytest.mark.parametrize('drafter', ['prompt_lookup', 'none'])
def test_forced_tokens_stand_whatever_processors_say(target, drafter):
  told = {
    # An EOS too, so that no row ends.
    'suppress_tokens': [2, EOS],
    'no_repeat_ngram_size': 2,
    'forced_decoder_ids': [[4, 5]],
  }
  tokens, counts = _decoded(target, drafter=drafter, gamma=2, **told)
  assert not counts['has_nan'].any()
  np.testing.assert_array_equal(np.where(INPUTS, tokens, 0), INPUTS)
  # Between them, processors count.
  free = tokens[np.equal(INPUTS, 0)]
  assert not {2, EOS} & {*free.tolist()}
  assert tokens[:, 4].tolist() == [5, 4, 5, 2]


@pytest.fixture(scope='module')
def plain(target):
  """Plain decoding through the plug-in."""
  return _decoded(target, drafter='none')


@pytest.fixture(scope='module')
def own_settings(tmp_path_factory):
  """What each drafter needs besides its name."""
  folder = tmp_path_factory.mktemp('drafters')
  (folder / 'text').write_text('2 3 2 3 2 4')
  block_model = toy_block.config(
    Sizes().vocab_size, num_encoder_layers=1, num_decoder_layers=1
  )
  heads = BlockHeadsConfig(embed_dim=Sizes().emb_dim, gamma=4, mlp_dim=8)
  for name, config, params in (
    ('spec_drafter', block_model, toy_block.params(block_model, seed=3)),
    (
      'block_heads',
      heads,
      families.of(heads).init_params(heads, jax.random.key(0)),
    ),
  ):
    orbax.save(folder / name, config, params)
  return {
    'ngram': {'ngram_text': str(folder / 'text')},
    'spec_drafter': {'drafter_checkpoint': str(folder / 'spec_drafter')},
    'block_heads': {'drafter_checkpoint': str(folder / 'block_heads')},
  }


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'gamma': 'auto'}, 'gamma auto'),
    ({'gamma': 'x'}, "gamma 'x'"),
    ({'top_k': 3}, 'top_k 3 .*temperature 0'),
    ({'min_p': 0.1}, r'min_p 0\.1 .*temperature 0'),
    ({'drafter': 'none', 'verification': 'top_beta'}, 'top_beta.* nothing'),
    ({'regex': 'a'}, 'grammars are not supported'),
    ({'json_schema': '{}'}, 'grammars are not supported'),
    ({'grammar': 'start: "a"'}, 'grammars are not supported'),
    ({'drafter': 'grammar'}, 'grammars are not supported'),
  ],
)
def test_settings_without_effect_are_refused_when_made(settings, message):
  with pytest.raises(ValueError, match=message):
    decoding.decoder(Network(Sizes()), Vocabulary(), **settings)


def _decoded(target, **settings):
  """The tokens of a decode in which tokens are forced, and its counters."""
  params, _ = target
  module = Network(Sizes())
  is_model = settings['drafter'] == 'model'
  decoder = decoding.decoder(
    module,
    Vocabulary(),
    draft_module=module if is_model else None,
    **settings,
  )
  if is_model:
    config = t5_networks.config_of(module)
    params = params | {'draft': toy_t5.params(config, seed=1)}
  output = jax.jit(
    functools.partial(
      decoding.decode,
      decoder=decoder,
      max_len=LENGTH,
      eos_id=EOS,
      forced=jnp.asarray(INPUTS),
    )
  )(params, None, toy.prompt([[0]] * 4, encoder_rows=ENCODER_ROWS))
  return np.asarray(output.tokens), decoding.counters(output)


# Networks on the states of a decoder-only target, and what needs a vocabulary.
NOT_OF_T5X = ('eagle', 'assistant', 'block', 'grammar')
PAIRS = [
  (drafter, rule)
  for drafter in DRAFTERS
  for rule in RULES
  if RULES[rule]().judge(TextSettings()).for_chain  # Others judge trees.
  if drafter not in NOT_OF_T5X and (drafter, rule) != ('none', 'top_beta')
]


@slow.parametrize(
  ('drafter', 'verification'),
  PAIRS,
  now=[('prompt_lookup', 'block'), ('model', 'speculative_sampling')],
)
def test_every_drafter_goes_with_every_rule(
  target, plain, own_settings, drafter, verification
):
  """At temperature 0 all of them give the tokens of plain decoding; top_beta
  does with beta 1."""
  settings = own_settings.get(drafter, {})
  if verification == 'top_beta':
    settings = settings | {'beta': 1}
  tokens, counts = _decoded(
    target, drafter=drafter, verification=verification, gamma=2, **settings
  )
  np.testing.assert_array_equal(tokens, plain[0])
  assert (counts['num_drafted'].sum() > 0) == (drafter != 'none')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'options'),
  [
    ('model', {'tree': (0, 0, 1)}),
    ('model', {'tree': (0, 0, 1), 'verification': 'traversal'}),
    ('prompt_lookup', {'num_continuations': 2, 'min_ngram': 1}),
  ],
)
def test_drafts_may_be_trees(target, plain, drafter, options):
  tokens, counts = _decoded(target, drafter=drafter, gamma=2, **options)
  np.testing.assert_array_equal(tokens, plain[0])
  assert counts['num_drafted'].sum() > 0


def test_an_eagle_head_of_another_target_is_refused(target, tmp_path):
  config = toy_eagle.config(toy.llama_config(Sizes().vocab_size))
  orbax.save(tmp_path, config, toy_eagle.params(config, seed=0))
  with pytest.raises(ValueError, match='layer 2 is not one'):
    _decoded(target, drafter='eagle', drafter_checkpoint=str(tmp_path))


def test_plain_decoding_drafts_nothing(target):
  """Whatever gamma is."""
  params, _ = target
  decode = functools.partial(
    decoding.decode,
    decoder=decoding.decoder(
      Network(Sizes()), Vocabulary(), drafter='none', gamma=10**6
    ),
    max_len=LENGTH + 1,
    eos_id=-1,
  )
  prompt = toy.prompt([[0]] * 4, encoder_rows=ENCODER_ROWS)
  output = jax.jit(decode)(params, None, prompt)
  counts = decoding.counters(output)
  assert counts['num_tokens'].tolist() == [LENGTH] * 4
  assert counts['num_target_runs'].tolist() == [LENGTH] * 4
  assert counts['num_drafted'].tolist() == [0] * 4
  assert counts['num_accepted'].tolist() == [0] * 4


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'gamma': LENGTH + 1}, 'draft has 9 tokens.*room for 8: lower gamma'),
    ({'gamma': 4, 'num_continuations': 3}, 'draft has 12 tokens'),
    ({'gamma': 10**6}, 'gamma.*got 1000000'),
  ],
)
def test_drafts_longer_than_a_row_are_refused(target, options, message):
  params, _ = target
  with pytest.raises(ValueError, match=message):
    decode(params, INPUTS, **options)


@pytest.mark.parametrize('name', ['temprature', 'topk', 'drafters'])
def test_misspelt_arguments_of_the_decode_fn_are_named(target, name):
  params, _ = target
  with pytest.raises(ValueError, match=f'no option .*{name}'):
    decode(params, INPUTS, **{name: 1})


@dataclasses.dataclass
class RestoreCheckpointConfig:
  """As much of T5X's as counts here; it, too, is extended when it is made."""

  path: str
  assignment_map: tuple = ()
  state_transformation_fns: tuple = ()

  def __post_init__(self):
    if self.assignment_map:
      fns = (self._assign, *self.state_transformation_fns)
      self.state_transformation_fns = fns

  def _assign(self, state_dict, target_state_dict, *, is_resuming=False):
    del is_resuming
    assert state_dict['target'].keys() == {'old'}
    assert target_state_dict['target'].keys() == {'new'}
    return {**state_dict, 'target': {'new': state_dict['target']['old']}}


@pytest.mark.parametrize('is_resuming', [False, True])
def test_a_draft_model_joins_the_users_own_transformations(is_resuming):
  """They run as without a draft model, which is read after them."""
  calls = []

  def own(state_dict, target_state_dict, *, is_resuming=False):
    calls.append((state_dict['target'], target_state_dict['target']))
    return {**state_dict, 'step': 3}

  config = RestoreCheckpointConfig('here', (('new', 'old'),), (own,))
  joined = t5x.restore_with_draft(
    config, path=str(GOLDEN / 't5x_orbax' / 'checkpoint_7')
  )
  assert len(config.state_transformation_fns) == 2
  assert joined.path == 'here'
  draft = families.param_shapes(golden_sizes())
  state = {'target': {'old': 1}, 'step': 2}
  if is_resuming:
    state['target']['draft'] = 'as it was'
  for transform in joined.state_transformation_fns:
    state = transform(
      state, {'target': {'new': 0, 'draft': draft}}, is_resuming=is_resuming
    )
  assert calls == [({'new': 1}, {'new': 0})]
  assert state['step'] == 3
  found = state['target'].pop('draft')
  assert state['target'] == {'new': 1}
  if is_resuming:
    assert found == 'as it was'
  else:
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, draft)


def test_draft_models_elsewhere_are_refused():
  with pytest.raises(ValueError, match='s3://bucket/small is neither'):
    t5x.load_draft(
      {'target': {}},
      {'target': {'draft': {'w': np.zeros(2)}}},
      path='s3://bucket/small',
    )
