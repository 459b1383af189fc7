"""Tunix's models and rollouts with speculation, against Tunix's own sampler.

They run where Tunix is installed: `make tunix`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import audit
from specdec_jax.assembly import text_settings
from specdec_jax.integrations import tunix as ours
from tests import goodness_of_fit, slow

pytestmark = [
  pytest.mark.tunix,
  # Tunix's own.
  pytest.mark.filterwarnings('ignore::DeprecationWarning'),
  pytest.mark.filterwarnings('ignore::UserWarning'),
]
pytest.importorskip('tunix', reason='needs Tunix')
from flax import nnx  # noqa: E402
from tunix.rl.rollout import base_rollout, vanilla_rollout  # noqa: E402

from tests.integrations.tunix import toy_tunix  # noqa: E402

VOCAB_SIZE = toy_tunix.VOCAB_SIZE
Config = functools.partial(
  base_rollout.RolloutConfig,
  max_tokens_to_generate=12,
  max_prompt_length=8,
  temperature=1.0,
  return_logprobs=True,
)
GREEDY = {'temperature': 0.0, 'top_p': None}


@pytest.fixture(scope='module', autouse=True)
def promoted():
  # Tunix's networks broadcast their scales, and mix integers and floats.
  with (
    jax.numpy_rank_promotion('allow'),
    jax.numpy_dtype_promotion('standard'),
  ):
    yield


@pytest.fixture(scope='module')
def model():
  return toy_tunix.make('llama3_tied')


def engine(model, **options):
  return ours.SpeculativeRollout(model, toy_tunix.Tokenizer(), **options)


@pytest.fixture(scope='module')
def rollout(model):
  return engine(model, batch_size=8, gamma=3)


def vanilla(model):
  sizes = base_rollout.CacheConfig(
    cache_size=64,
    num_layers=len(model.layers),
    num_kv_heads=toy_tunix.SIZES['num_kv_heads'],
    head_dim=toy_tunix.SIZES['head_dim'],
  )
  return vanilla_rollout.VanillaRollout(model, toy_tunix.Tokenizer(), sizes)


def is_same(left, right) -> bool:
  pairs = zip(left.tokens, right.tokens, strict=True)
  return all(np.array_equal(a, b) for a, b in pairs)


def probs_after(model, tokens, temperature: float = 1.0):
  """Of what follows each token of a row, by the model as it is."""
  num = len(tokens)
  logits, _ = model(
    np.array([tokens], np.int32),
    np.arange(num, dtype=np.int32)[None],
    None,
    np.tril(np.ones((1, num, num), bool)),
  )
  return np.asarray(jax.nn.softmax(logits[0].astype(jnp.float32) / temperature))


@slow.parametrize(
  'name',
  ('llama3', 'llama3_tied', 'qwen2', 'qwen3', 'gemma2', 'gemma3'),
  now=('qwen2', 'gemma3'),
)
def test_log_probs_are_those_of_the_policy(name):
  model = toy_tunix.make(name)
  rollout = engine(model)
  texts = toy_tunix.prompts(4, longest=8)
  encode = rollout._decoder.vocabulary.encode
  for temperature in (1.0, 0.7):
    output = rollout.generate(texts, Config(temperature=temperature))
    # Windows of 4 positions are left behind.
    assert max(map(len, output.tokens)) > 8
    for text, tokens, found in zip(
      texts, output.tokens, output.logprobs, strict=True
    ):
      row = [*encode(text), *tokens.tolist()]
      probs = probs_after(model, row, temperature)[len(row) - len(tokens) - 1 :]
      there = np.log(probs[np.arange(len(tokens)), tokens])
      np.testing.assert_allclose(found, there, atol=5e-5)
    # In Gemma 2 Tunix counts padding as positions of its windows.
    if temperature == 1 and name != 'gemma2':
      rows = np.full((4, 12), rollout.pad_id(), np.int32)
      for row, tokens in zip(rows, output.tokens, strict=True):
        row[: len(tokens)] = tokens
      trained = rollout.get_per_token_logps(
        output.left_padded_prompt_tokens, rows
      )
      for row, found in zip(trained, output.logprobs, strict=True):
        np.testing.assert_allclose(found, row[: len(found)], atol=5e-5)


def test_greedy_tokens_are_those_of_tunixs_sampler(model, rollout):
  texts = toy_tunix.prompts(50, longest=8)
  theirs = vanilla(model).generate(texts, Config(**GREEDY))
  # Rows are refilled, and the second time all is drafted.
  for _ in range(2):
    output = rollout.generate(texts, Config(**GREEDY))
    assert is_same(output, theirs)
    assert output.text == theirs.text
    np.testing.assert_array_equal(
      output.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens
    )
    for found, there in zip(output.logprobs, theirs.logprobs, strict=True):
      np.testing.assert_allclose(found, there, atol=5e-5)
  assert rollout.timed.figures()['tokens_per_target_run'] > 2
  lengths = {len(row) for row in theirs.tokens}
  assert len(lengths) > 1
  assert max(lengths) == 12


@pytest.mark.parametrize('name', ['gemma2', 'gemma3'])
def test_greedy_tokens_beyond_a_window_are_the_networks(name):
  """Of prompts that Tunix pads; its sampler of Gemma 2 counts the padding."""
  model = toy_tunix.make(name)
  rollout = engine(model, batch_size=8, gamma=3)
  texts = toy_tunix.prompts(8, longest=12)
  settings = Config(**GREEDY, max_tokens_to_generate=24)
  output = rollout.generate(texts, settings)
  encode = rollout._decoder.vocabulary.encode
  for text, tokens in zip(texts, output.tokens, strict=True):
    prompt = encode(text)
    probs = probs_after(model, [*prompt, *tokens.tolist()])
    likeliest = probs.argmax(axis=-1)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(tokens, likeliest)
  theirs = vanilla(model).generate(texts, settings)
  assert is_same(output, theirs) == (name == 'gemma3')


@slow.parametrize('drafter', ('prompt_lookup', 'model'), now=('model',))
def test_other_drafters_and_our_own_generate(model, drafter):
  draft = (
    toy_tunix.make('llama3_tied', num_layers=1) if drafter == 'model' else None
  )
  texts = toy_tunix.prompts(4, longest=8)
  theirs = vanilla(model).generate(texts, Config(**GREEDY))
  made = engine(model, drafter=drafter, draft_model=draft, gamma=2)
  assert is_same(made.generate(texts, Config(**GREEDY)), theirs)
  decoder = ours.load(
    model, toy_tunix.Tokenizer(), drafter=drafter, draft_model=draft, gamma=2
  )
  told = specdec_jax.generate(decoder, texts, max_new_tokens=12, batch_size=4)
  assert [each.text for each in told] == theirs.text


def audited(model, **options) -> audit.Report:
  """Three tokens after one prompt, drafted from earlier draws."""
  rollout = engine(model, gamma=2, **options)
  eos, text = rollout.eos_id(), 'ab'
  encode = rollout._decoder.vocabulary.encode
  config = functools.partial(
    Config, max_tokens_to_generate=3, top_k=6, return_logprobs=False
  )

  def sample(prompt, num, seed):
    # What was drawn under another seed is in the pool.
    rollout.generate([text] * num, config(seed=seed + 100))
    output = rollout.generate([text] * num, config(seed=seed))
    assert rollout.timed.figures()['tokens_per_target_run'] > 1.1
    return [[*row.tolist(), *[eos] * (len(row) < 3)] for row in output.tokens]

  @functools.cache
  def next_probs(prefix):
    probs = probs_after(model, prefix)[-1].astype(np.float64)
    kept = np.where(probs >= np.sort(probs)[-6], probs, 0)
    return kept / kept.sum()

  return audit.audit(
    sample,
    next_probs,
    [encode(text)],
    num_tokens=3,
    num_draws=4000,
    eos_ids=(eos,),
    false_alarm_rate=goodness_of_fit.FALSE_ALARM_RATE,
  )


def test_draws_follow_the_policy_and_a_broken_rule_is_caught(model):
  report = audited(model)
  assert not report.is_rejected, report
  broken = audited(model, lenience=0.6)
  assert broken.is_rejected, broken
  print(report, broken)


def test_rollouts_follow_the_trainers_weights():
  model, other = (toy_tunix.make('qwen3', seed=seed) for seed in (0, 1))
  texts = toy_tunix.prompts(4, longest=8)
  rollout = engine(model)
  theirs = vanilla(other).generate(texts, Config(**GREEDY))
  before = rollout.generate(texts, Config(**GREEDY))
  assert not is_same(before, theirs)
  state = nnx.state(other, nnx.Param)
  # As Tunix hands them over, and then changed in place by a trainer.
  rollout.update_params(state, (nnx.Param,))
  assert is_same(rollout.generate(texts, Config(**GREEDY)), theirs)
  toy_tunix.randomize(model, 0)
  assert is_same(rollout.generate(texts, Config(**GREEDY)), before)
  # What has one shape in both packages is one array.
  kernel = rollout.model().layers[0].mlp.down_proj.kernel.get_value()
  own = rollout._decoder.params.target['layers_0']['mlp']['wo']['kernel']
  assert own.unsafe_buffer_pointer() == kernel.unsafe_buffer_pointer()


def test_nothing_is_compiled_for_what_is_remembered(model):
  rollout, texts = engine(model, gamma=3), toy_tunix.prompts(4, longest=8)
  rollout.generate(texts, Config(seed=1))
  [program] = rollout._programs.values()
  sizes = lambda: (program.init._cache_size(), program.run._cache_size())
  before = sizes()
  assert min(before) > 0
  for seed in (2, 3):
    rollout.generate(texts, Config(seed=seed))
  assert sizes() == before


def test_without_a_gamma_drafts_wait_until_they_cost_little(model):
  rollout, texts = engine(model), toy_tunix.prompts(4, longest=8)
  num_drafted = lambda: rollout.timed.statistics.num_drafted.sum()
  first = rollout.generate(texts, Config(**GREEDY))
  assert num_drafted() == 0
  # As after a long training.
  rollout._turns._seconds = 1e9
  assert is_same(rollout.generate(texts, Config(**GREEDY)), first)
  assert num_drafted() > 0


def test_a_policy_that_drafts_for_itself_drafts_with_its_new_weights():
  model, texts = toy_tunix.make('qwen3'), toy_tunix.prompts(4, longest=8)
  rollout = engine(model, drafter='quantized', bits=8, gamma=3)
  for seed in (0, 1):
    toy_tunix.randomize(model, seed)
    rollout.generate(texts, Config(**GREEDY))
    assert rollout.timed.figures()['tokens_per_target_run'] > 2


def test_prompts_with_padding_are_refused(model):
  tokenizer = toy_tunix.Tokenizer()
  tokenizer.pad_id = lambda: tokenizer.encode('c')[0]
  rollout = ours.SpeculativeRollout(model, tokenizer)
  with pytest.raises(ValueError, match='prompt 2 has the padding token 4'):
    rollout.generate(['ab', 'abc'], Config())


def test_options_of_texts_and_those_that_a_tokenizer_lacks(model):
  load = functools.partial(ours.load, model, toy_tunix.Tokenizer(), gamma=2)
  decoder = load(repetition_penalty=1.5)
  [found] = specdec_jax.generate(decoder, ['ab'], max_new_tokens=6)
  told = {'repetition_penalty': 1.5, 'max_new_tokens': 6}
  [expected] = specdec_jax.generate(load(), ['ab'], **told)
  assert found.tokens == expected.tokens
  with pytest.raises(ValueError, match='chat template'):
    specdec_jax.generate(decoder, ['ab'], chat=True)
  with pytest.raises(ValueError, match='how tokens are spelled'):
    specdec_jax.generate(decoder, ['ab'], regex='a*')


def test_engines_without_a_seed_draw_apart(model):
  """Other hosts and restarts make new engines."""
  texts = ['ab'] * 8
  drawn = []
  for _ in range(2):
    rollout = engine(model, drafter='none')
    drawn += [rollout.generate(texts, Config()).text for _ in range(2)]
  seeded = [rollout.generate(texts, Config(seed=i)).text for i in (0, 1)]
  assert len({*map(tuple, [*drawn, *seeded])}) == 6


def test_seeds_and_several_samples(model):
  rollout = engine(model, drafter='prompt_lookup', batch_size=4)
  texts = ['abc'] * 6
  draw = lambda **seed: rollout.generate(texts, Config(**seed))
  first = draw(seed=3)
  assert len({tuple(row.tolist()) for row in first.tokens}) > 1
  assert is_same(first, draw(seed=3))
  assert not is_same(first, draw(seed=4))
  assert not is_same(draw(), draw())
  key = jax.random.key(5)
  assert is_same(draw(seed=key), draw(seed=key))
  # Rows do not depend on those beside them.
  alone = rollout.generate(texts[:1], Config(seed=3))
  np.testing.assert_array_equal(alone.tokens[0], first.tokens[0])


def test_eos_tokens_and_long_prompts(model, rollout):
  texts = ['abcdefghijkl', 'a']
  settings = {**GREEDY, 'eos_tokens': [7, 9]}
  theirs = vanilla(model).generate(texts, Config(**settings))
  output = rollout.generate(texts, Config(**settings))
  assert is_same(output, theirs)
  np.testing.assert_array_equal(
    output.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens
  )
  assert output.left_padded_prompt_tokens.shape == (2, 16)


@pytest.mark.parametrize(
  ('settings', 'word'),
  [
    ({'tensor_parallel_size': 2}, 'tensor_parallel_size'),
    ({'rollout_vllm_server_mode': True}, 'rollout_vllm_server_mode'),
    ({'rollout_sglang_jax_kwargs': {'a': 1}}, 'rollout_sglang_jax_kwargs'),
    (
      {'rollout_vllm_sampling_kwargs': {'repetition_penalty': 1.5}},
      'rollout_vllm_sampling_kwargs',
    ),
    ({'top_p': 1.5}, 'top_p'),
    ({'temperature': -1.0}, 'temperature'),
    ({'max_tokens_to_generate': 0}, 'max_tokens_to_generate'),
  ],
)
def test_refused_settings(rollout, settings, word):
  with pytest.raises(ValueError, match=word):
    rollout.generate(['a'], Config(**settings))


@pytest.mark.parametrize('name', ['gemma1', 'experts'])
def test_refused_models(name):
  with pytest.raises(ValueError, match='is not supported'):
    engine(toy_tunix.make(name))


def test_a_network_with_other_logits_is_refused():
  model = toy_tunix.make('qwen3')
  for layer in model.layers:
    layer.attn.scale *= 2
  with pytest.raises(ValueError, match='other logits'):
    engine(model)


def test_lora_is_refused():
  # As it begins, with zeros, it changes no logits.
  model = toy_tunix.make('qwen3')
  model.layers[0].attn.w_lora_b = nnx.LoRAParam(jnp.zeros((2, 2)))
  with pytest.raises(ValueError, match='LoRA'):
    engine(model)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'batch_size': 0}, 'batch_size'),
    ({'drafter': 'model'}, 'needs a draft model'),
    ({'gama': 3}, 'gama'),
    ({'gamma': 'auto'}, 'auto'),
    (
      {'top_k': 5, 'typical_p': 0.5, 'dtype': 'float32'},
      'leave dtype, top_k, typical_p out',
    ),
    # A RolloutConfig has no words for processors.
    *(
      ({name: 1}, f'RolloutConfig: leave {name} out')
      for name in text_settings.NAMES
    ),
  ],
)
def test_refused_options(model, options, message):
  with pytest.raises(ValueError, match=message):
    engine(model, **options)


@pytest.mark.parametrize(
  ('texts', 'arguments', 'message'),
  [([], {}, 'no prompts'), (['a'], {'a': 1}, 'unknown arguments: a')],
)
def test_refused_arguments(model, texts, arguments, message):
  with pytest.raises(ValueError, match=message):
    engine(model).generate(texts, Config(), **arguments)


def test_gamma_by_default(model):
  assert engine(model)._decoder.drafter.gamma == 8
