"""Every drafter, a row each: the contract is checked for all of them.

A new drafter adds its row here; the rows of an extra are among its own tests
(tests/contrib/ngram/contract_rows.py). Heads on the target's own states have
none: before the first call of a target they draft nothing
(tests/contrib/block_heads/test_blockwise_heads.py).
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specdec_jax import drafters, lazy
from specdec_jax.assembly.drafters import Quantized
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Drafter, Params, Tree
from specdec_jax.drafters import text_pool
from specdec_jax.models.drafting import block_decoder
from specdec_jax.sampling import logits
from tests import (
  slow,
  toy,
  toy_assistant,
  toy_block,
  toy_blocks,
  toy_eagle,
  toy_families,
  toy_gemma,
)
from tests.contracts.rows import VOCAB_SIZE, Row

MODEL = toy.toy(VOCAB_SIZE)
BLOCK_CONFIG = toy_block.config(
  VOCAB_SIZE, num_encoder_layers=1, num_decoder_layers=1
)
LLAMA = toy.llama(VOCAB_SIZE, num_layers=1)
TARGET_CONFIG = toy.llama_config(VOCAB_SIZE, num_layers=2)
EAGLE_CONFIG = toy_eagle.config(TARGET_CONFIG)
BLOCKS_CONFIG = toy_blocks.config(TARGET_CONFIG, block_size=4)


def _autoregressive(model, *, is_argmax: bool = False, **sampling):
  to_probs = logits.standardize(**sampling)
  return lambda gamma: drafters.autoregressive(
    model, gamma=gamma, logits_to_probs=to_probs, is_argmax=is_argmax
  )


def _branching(model, *, gamma: int, **options) -> Drafter:
  """A tree of gamma nodes, of which the first has a child first."""
  tree = Tree(parents=(0, 0, *range(1, gamma))[:gamma])
  return drafters.branching(model, tree=tree, **options)


def _tree(model, **options):
  to_probs = logits.standardize()
  return lambda gamma: _branching(
    model, gamma=gamma, logits_to_probs=to_probs, **options
  )


def _adaptive(**options):
  return lambda gamma: drafters.adaptive(
    MODEL, gamma=gamma, logits_to_probs=logits.standardize(), **options
  )


def _spec_drafter(gamma: int) -> Drafter:
  """The same source for every row, since the contract's prompts have none."""
  drafter = drafters.spec_drafter(
    block_decoder.block_model(BLOCK_CONFIG), gamma=gamma
  )

  def init(params, prompt, max_len: int):
    num_rows = prompt.decoder_tokens.shape[0]
    source = jnp.array([[3, 2, 4, 1]] * num_rows, jnp.int32)
    return drafter.init(params, prompt.replace(encoder_tokens=source), max_len)

  return drafter._replace(init=init)


def _eagle(make=drafters.autoregressive, *, lookup=None, **options):
  """With a target that scores what the contract's contexts have."""
  to_probs = logits.standardize(top_k=3)

  def made(gamma: int) -> Drafter:
    more = {'first': lookup(gamma=gamma)} if lookup else {}
    target, network = toy_families.networks(
      TARGET_CONFIG, EAGLE_CONFIG, gamma=gamma
    )
    drafter = make(
      drafters.eagle(network),
      gamma=gamma,
      logits_to_probs=to_probs,
      **options,
      **more,
    )
    return toy_eagle.looped(drafter, target)

  return made


def _eagle_params() -> Params:
  target = toy.llama_params(TARGET_CONFIG, seed=4)
  own = toy_eagle.params(EAGLE_CONFIG, seed=5)
  return Params(target, toy_eagle.joined(target, own))


GEMMA = toy_gemma.gemma_4_e2b(VOCAB_SIZE)
ASSISTANT = toy_assistant.config(GEMMA)


def _assistant(make=drafters.autoregressive, *, lookup=None, **options):
  """With a target that scores what the contract's contexts have."""
  to_probs = logits.standardize(top_k=3)

  def made(gamma: int) -> Drafter:
    first = {'first': lookup(gamma=gamma)} if lookup else {}
    target, model = toy_families.networks(GEMMA, ASSISTANT, gamma=gamma)
    drafter = make(
      drafters.assistant(model),
      gamma=gamma,
      logits_to_probs=to_probs,
      **options,
      **first,
    )
    return toy_eagle.looped(drafter, target)

  return made


def _assistant_params() -> Params:
  target = toy_gemma.params(GEMMA, seed=4)
  own = toy_assistant.params(ASSISTANT, seed=5)
  return Params(target, toy_assistant.joined(target, own))


_HEADS = {'markov_rank', 'markov_head'}


def _blocks(make=drafters.autoregressive, **options):
  """As `_eagle`; without `markov_rank`, slots do not depend on each other."""
  to_probs = logits.standardize(top_k=3)
  sizes = {name: options.pop(name) for name in _HEADS & options.keys()}
  config = dataclasses.replace(BLOCKS_CONFIG, **sizes)

  def made(gamma: int) -> Drafter:
    target, network = toy_families.networks(TARGET_CONFIG, config, gamma=gamma)
    chain = drafters.block(network)
    drafter = make(chain, gamma=gamma, logits_to_probs=to_probs, **options)
    return toy_eagle.looped(drafter, target)

  return made


def _blocks_params(**sizes) -> Params:
  config = dataclasses.replace(BLOCKS_CONFIG, **sizes)
  target = toy.llama_params(TARGET_CONFIG, seed=4)
  own = toy_blocks.params(config, seed=5)
  return Params(target, toy_blocks.joined(TARGET_CONFIG, config, target, own))


_quantized = functools.partial(Quantized, bits=4, layers=1)
TARGET = Target(
  name='toy',
  config=TARGET_CONFIG,
  vocabulary=None,
  sampling=TextSettings(temperature=1.0),
)


def _pool():
  """A pool that is full of texts."""
  rng = np.random.default_rng(0)
  texts = rng.integers(0, VOCAB_SIZE, (9, 8)).tolist()
  return text_pool.remember(text_pool.empty(64), texts)


_toy_params = lambda: toy.toy_params(VOCAB_SIZE, seed=3)
ROWS = {
  'prompt_lookup': Row(
    lambda gamma: drafters.prompt_lookup(gamma=gamma, min_ngram=1),
    is_one_hot=True,
    has_constant_length=False,
  ),
  'prompt_lookup, two tokens': Row(
    lambda gamma: drafters.prompt_lookup(gamma=gamma, min_ngram=2),
    is_one_hot=True,
    has_constant_length=False,
  ),
  'suffix': Row(
    lambda gamma: drafters.suffix(gamma=gamma, min_ngram=1),
    _pool,
    is_one_hot=True,
    has_constant_length=False,
  ),
  'continuations': Row(
    lambda gamma: drafters.continuations(
      gamma=1, min_ngram=1, num_continuations=gamma
    ),
    is_one_hot=True,
    has_constant_length=False,
    is_tree=True,
  ),
  'uniform': Row(
    lambda gamma: drafters.uniform(gamma=gamma, vocab_size=VOCAB_SIZE)
  ),
  'uniform, padded': Row(
    lambda gamma: drafters.uniform(
      gamma=gamma, vocab_size=3, padded_vocab_size=VOCAB_SIZE
    )
  ),
  'spec_drafter': Row(
    _spec_drafter,
    lambda: toy_block.params(BLOCK_CONFIG, seed=6),
    is_one_hot=True,
  ),
  'autoregressive': Row(_autoregressive(MODEL), _toy_params),
  'autoregressive, top-p': Row(_autoregressive(MODEL, top_p=0.7), _toy_params),
  'autoregressive, greedy': Row(
    _autoregressive(MODEL, is_argmax=True), _toy_params, is_one_hot=True
  ),
  'autoregressive, Llama': Row(
    _autoregressive(LLAMA),
    lambda: toy.llama_params(
      toy.llama_config(VOCAB_SIZE, num_layers=1), seed=4
    ),
  ),
  'quantized': Row(
    lambda gamma: _quantized().make(TARGET, Fixed(gamma)).drafter,
    lambda: (
      _quantized()
      .make(TARGET, Fixed(1))
      .join(toy.llama_params(TARGET_CONFIG, seed=4), ())
    ),
  ),
  'branching': Row(_tree(MODEL), _toy_params, is_tree=True),
  'branching, ranked': Row(
    _tree(MODEL, is_ranked=True), _toy_params, is_one_hot=True, is_tree=True
  ),
  'branching, Llama': Row(
    _tree(LLAMA),
    lambda: toy.llama_params(
      toy.llama_config(VOCAB_SIZE, num_layers=1), seed=4
    ),
    is_tree=True,
  ),
  'eagle': Row(_eagle(), _eagle_params),
  'eagle, branching': Row(
    _eagle(_branching, is_ranked=True),
    _eagle_params,
    is_one_hot=True,
    is_tree=True,
  ),
  'eagle, greedy': Row(_eagle(is_argmax=True), _eagle_params, is_one_hot=True),
  'eagle, adaptive': Row(
    _eagle(drafters.adaptive, min_prob=0.4),
    _eagle_params,
    has_constant_length=False,
  ),
  'eagle, lookup first': Row(
    _eagle(drafters.adaptive, lookup=drafters.prompt_lookup),
    _eagle_params,
    has_constant_length=False,
  ),
  'assistant': Row(_assistant(), _assistant_params),
  'assistant, branching': Row(
    _assistant(_branching, is_ranked=True),
    _assistant_params,
    is_one_hot=True,
    is_tree=True,
  ),
  'assistant, greedy': Row(
    _assistant(is_argmax=True), _assistant_params, is_one_hot=True
  ),
  'assistant, adaptive': Row(
    _assistant(drafters.adaptive, min_prob=0.4),
    _assistant_params,
    has_constant_length=False,
  ),
  'assistant, lookup first': Row(
    _assistant(drafters.adaptive, lookup=drafters.prompt_lookup),
    _assistant_params,
    has_constant_length=False,
  ),
  'block': Row(_blocks(), _blocks_params),
  'block, rnn': Row(
    _blocks(markov_head='rnn'),
    functools.partial(_blocks_params, markov_head='rnn'),
  ),
  'block, independent': Row(
    _blocks(markov_rank=0), functools.partial(_blocks_params, markov_rank=0)
  ),
  'block, branching': Row(_blocks(_branching), _blocks_params, is_tree=True),
  'block, greedy': Row(
    _blocks(is_argmax=True), _blocks_params, is_one_hot=True
  ),
  'block, adaptive': Row(
    _blocks(drafters.adaptive, min_prob=0.4),
    _blocks_params,
    has_constant_length=False,
  ),
  'block, confident': Row(
    _blocks(drafters.adaptive, min_confidence=0.4),
    _blocks_params,
    has_constant_length=False,
  ),
  'adaptive, threshold': Row(
    _adaptive(min_prob=0.4), _toy_params, has_constant_length=False
  ),
  'adaptive, lookup first': Row(
    lambda gamma: drafters.adaptive(
      LLAMA,
      gamma=gamma,
      logits_to_probs=logits.standardize(),
      first=drafters.prompt_lookup(gamma=gamma),
    ),
    lambda: toy.llama_params(
      toy.llama_config(VOCAB_SIZE, num_layers=1), seed=4
    ),
    has_constant_length=False,
  ),
}
# One of every kind is tested now, the others in `make test-all`.
NOW = [
  'prompt_lookup',
  'suffix',
  'continuations',
  'spec_drafter',
  'autoregressive',
  'quantized',
  'branching',
  'eagle',
  'assistant',
  'block',
]
for rows, now in lazy.installed('tests.contrib.ngram.contract_rows:DRAFTERS'):
  ROWS |= rows
  NOW += now
# The same drafter whenever asked for: what was compiled for it serves again.
ROWS = {
  name: row._replace(make=functools.cache(row.make))
  for name, row in ROWS.items()
}
# A test of each.
every_drafter = slow.parametrize('name', ROWS, now=NOW)
