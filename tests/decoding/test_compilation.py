"""What the compiler makes of the loop: one trace a shape, no host in it, and no
copy of a cache (invariant 11)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import arrays, base, drafters, trees, verification
from specdec_jax.base import Params
from specdec_jax.decoding import autoregressive, speculative
from specdec_jax.decoding.method import Method
from specdec_jax.models import attention, families, kv_cache
from specdec_jax.sampling import logits
from tests import (
  slow,
  toy,
  toy_assistant,
  toy_blocks,
  toy_eagle,
  toy_families,
  toy_gemma,
  toy_t5,
  toy_tree,
)

pytestmark = pytest.mark.optimized

# So long that attention reads caches block by block.
V, MAX_LEN, GAMMA = 16, 600, 3
SAMPLED = logits.standardize(temperature=1.0, top_p=0.9)
# Wide enough heads for attention to be compiled as it is in a real model.
SIZES = {
  'embed_dim': 32,
  'num_heads': 6,
  'num_kv_heads': 3,
  'head_dim': 64,
  'mlp_dim': 48,
}
CONFIG = toy.llama_config(V, has_qk_norm=True, windows=(64, 0), **SIZES)
T5_SIZES = {'num_layers': 2, 'num_heads': 3, 'head_dim': 64}
# Models that draft for themselves; one of other logits drafts for `CONFIG`.
MODELS = {
  'mistral': toy.llama_config(V, windows=(64,), **SIZES),
  'padded': dataclasses.replace(CONFIG, vocab_size=V + 8),
  'gemma 2': toy_gemma.gemma_2(V, **SIZES),
  'gemma 3': toy_gemma.decoder(V, **SIZES),
  # Layers that read the keys of others, and experts.
  'gemma 4': toy_gemma.gemma_4_e2b(
    V,
    full_num_kv_heads=3,
    full_head_dim=64,
    num_experts=4,
    num_chosen_experts=2,
    expert_dim=8,
    **SIZES,
  ),
  't5gemma': toy_gemma.encoder_decoder(V, **SIZES),
  't5': toy_t5.config(V, **T5_SIZES),
  'umt5': toy_t5.config(V, has_layer_relpos=True, **T5_SIZES),
  'int8 cache': dataclasses.replace(CONFIG, cache_dtype=jnp.dtype('int8')),
}
# One pending token, one drafted, and the same again for the other side.
CAPACITY = MAX_LEN + GAMMA + 1
EAGLE = toy_eagle.config(CONFIG)
EAGLE_TARGET, NETWORK = toy_families.networks(CONFIG, EAGLE, gamma=GAMMA)
GEMMA = MODELS['gemma 4']
ASSISTANT = toy_assistant.config(GEMMA)
ASSISTANT_TARGET, ASSISTANT_NETWORK = toy_families.networks(
  GEMMA, ASSISTANT, gamma=GAMMA
)
BLOCKS = toy_blocks.config(CONFIG, num_layers=3, **SIZES)
BLOCKS_TARGET, BLOCKS_NETWORK = toy_families.networks(
  CONFIG, BLOCKS, gamma=GAMMA
)


def tree_drafter(*, may_abstain: bool):
  """Trees of six nodes from a table, which is part of the program."""
  drafter = toy_tree.drafter(
    toy_tree.BENT, is_sampled=True, may_abstain=may_abstain
  )
  table = {'table': np.zeros((V + 1, V, V), np.float32)}
  propose = lambda params, *args: drafter.propose(
    jax.tree.map(jnp.asarray, table), *args
  )
  return drafter._replace(propose=propose)


DRAFTERS = {
  'prompt_lookup': drafters.prompt_lookup(gamma=GAMMA),
  'uniform': drafters.uniform(gamma=GAMMA, vocab_size=V),
  'autoregressive': drafters.autoregressive(
    families.language_model(CONFIG), gamma=GAMMA, logits_to_probs=SAMPLED
  ),
  'adaptive': drafters.adaptive(
    families.language_model(CONFIG),
    gamma=GAMMA,
    logits_to_probs=SAMPLED,
    min_prob=0.3,
  ),
  'tree': tree_drafter(may_abstain=False),
  'tree that abstains': tree_drafter(may_abstain=True),
  'eagle': drafters.autoregressive(
    drafters.eagle(NETWORK), gamma=GAMMA, logits_to_probs=SAMPLED
  ),
  'block': drafters.autoregressive(
    drafters.block(BLOCKS_NETWORK), gamma=GAMMA, logits_to_probs=SAMPLED
  ),
  'lookup, then eagle': drafters.adaptive(
    drafters.eagle(NETWORK),
    gamma=GAMMA,
    logits_to_probs=SAMPLED,
    first=drafters.prompt_lookup(gamma=GAMMA),
  ),
  'assistant': drafters.autoregressive(
    drafters.assistant(ASSISTANT_NETWORK), gamma=GAMMA, logits_to_probs=SAMPLED
  ),
  **{
    name: drafters.autoregressive(
      families.with_logits_of(families.language_model(config), V),
      gamma=GAMMA,
      logits_to_probs=SAMPLED,
    )
    for name, config in MODELS.items()
  },
}
RULES = {
  'speculative_sampling': verification.speculative_sampling,
  'block_verification': verification.block_verification,
  'greedy': verification.greedy,
  'traversal': toy_tree.rule('traversal', toy_tree.BENT),
}


def lossless(name: str) -> str:
  """The rule for a drafter's proposals, by its name."""
  return 'traversal' if DRAFTERS[name].tree else 'speculative_sampling'


def with_target(name: str):
  """The networks of a decode with a drafter, and the shapes of their params."""
  drafter, config = DRAFTERS[name], MODELS.get(name, CONFIG)
  if name == 'assistant':
    params = families.param_shapes(GEMMA)
    own = toy_assistant.joined(params, families.param_shapes(ASSISTANT))
    models = {'target': ASSISTANT_TARGET, 'drafter': drafter}
    return models, Params(params, own)
  own = families.param_shapes(config)
  config = config if config.vocab_size == V else CONFIG
  target = families.language_model(config)
  params = families.param_shapes(config)
  if name == 'block':
    target = BLOCKS_TARGET
    bound = families.bind(CONFIG, BLOCKS, width=GAMMA + 1)
    own = bound.join(params, families.param_shapes(BLOCKS))
  elif drafter.reads_target_cache:
    target = EAGLE_TARGET
    own = toy_eagle.joined(params, families.param_shapes(EAGLE))
  return {'target': target, 'drafter': drafter}, Params(params, own)


def prompt_of(batch_size: int, name: str = ''):
  """An encoder's rows are as wide as the decoder's caches."""
  config = MODELS.get(name, CONFIG)
  rows = [[3, 2, 1]] * batch_size if families.has_encoder(config) else None
  return toy.prompt(
    [[1, 2, 3]] * batch_size, encoder_rows=rows, encoder_width=CAPACITY
  )


WITHOUT_LLVM = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}


def optimized_hlo(compiled, *args) -> str:
  """What users' programs are, as XLA's instructions.

  These are the same without LLVM's optimizations, which come after them and
  take longer than all before.
  """
  lowered = compiled.lower(*args)
  return lowered.compile(compiler_options=WITHOUT_LLVM).as_text()


def loop_of(name: str, rule, batch_size: int):
  """A decode's method, its params, and the state to begin with."""
  models, params = with_target(name)
  method = Method(**models, verify_fn=rule, logits_to_probs=SAMPLED, eos_id=0)
  state = jax.eval_shape(
    lambda params, prompt: speculative.init(
      params, jax.random.key(0), prompt, method=method, max_len=MAX_LEN
    ),
    params,
    prompt_of(batch_size, name),
  )
  return method, params, state


def compiled_loop(name: str, rule, batch_size: int) -> str:
  """The optimised HLO of the loop alone, after the prefill."""
  method, params, state = loop_of(name, rule, batch_size)
  run = functools.partial(speculative.run, method=method)
  return optimized_hlo(jax.jit(run), params, state)


def computations(hlo: str) -> dict[str, list[str]]:
  """The instructions of each computation, by its name."""
  found, name = {}, None
  for line in hlo.splitlines():
    header = re.match(r'(ENTRY )?%?([\w.\-]+) .*->.*\{$', line)
    if header and not line.startswith(' '):
      name = 'ENTRY' if header[1] else header[2]
      found[name] = []
    elif name is not None:
      found[name].append(line)
  return found


def in_loops(hlo: str) -> list[str]:
  """Every instruction that some while loop's body reaches."""
  parts = computations(hlo)
  calls = r'(?:body|condition|calls|to_apply|branch_computations)='
  reached, pending = set(), re.findall(r'body=%?([\w.\-]+)', hlo)
  while pending:
    name = pending.pop()
    if name in reached or name not in parts:
      continue
    reached.add(name)
    for line in parts[name]:
      for group in re.findall(calls + r'(\{[^}]*\}|%?[\w.\-]+)', line):
        pending += re.findall(r'[\w.\-]+', group)
  return [line for name in reached for line in parts[name]]


def cache_copies(lines: list[str], num_elements: int) -> list[str]:
  """Instructions that copy or transpose at least so many elements."""
  found = []
  for line in lines:
    match = re.search(
      r'= \(?\w+\[([\d,]+)\]\S* (copy|copy-start|transpose)\(', line
    )
    if match and np.prod([int(n) for n in match[1].split(',')]) >= num_elements:
      found.append(line.strip())
  return found


def cache_size(batch_size: int) -> int:
  heads = CONFIG.num_kv_heads
  return batch_size * heads * CAPACITY * CONFIG.head_dim


# Drafter, rule and batch size: one row, and several, which a CPU writes in one
# loop however many; every rule. What is not compiled twice writes caches in the
# same place as others do.
ONCE = {*MODELS, 'adaptive', 'lookup, then eagle'}
ONCE -= {'t5gemma', 'umt5', 'int8 cache'}
PROGRAMS = [
  *((name, lossless(name), 1) for name in DRAFTERS),
  *((name, lossless(name), 12)
    for name in DRAFTERS if name not in ONCE),
  ('autoregressive', 'block_verification', 2),
  ('prompt_lookup', 'greedy', 2),
]  # fmt: skip
# On a TPU, more than eight rows are written in a loop.
TPU_PROGRAMS = [(name, 4) for name in DRAFTERS] + [('tree that abstains', 12)]
TPU_PROGRAMS += [(name, 1) for name in DRAFTERS if name not in MODELS]


# One drafter of each kind, with and without an encoder, and rows that share a
# loop.
NOW = [
  ('prompt_lookup', 'speculative_sampling', 1),
  ('tree that abstains', 'traversal', 12),
  ('eagle', 'speculative_sampling', 12),
  ('autoregressive', 'block_verification', 2),
  ('t5', 'speculative_sampling', 1),
  ('int8 cache', 'speculative_sampling', 1),
]


@slow.parametrize(('name', 'rule', 'batch_size'), PROGRAMS, now=NOW)
def test_no_host_and_no_copied_cache_in_the_loop(name, rule, batch_size):
  hlo = compiled_loop(name, RULES[rule], batch_size)
  lines = in_loops(hlo)
  assert sum('dynamic-update-slice' in line for line in lines) >= 4
  assert cache_copies(lines, cache_size(batch_size)) == []
  for word in ('callback', 'outfeed', 'infeed', ' send(', ' recv(', 'ToHost'):
    assert word not in hlo, word


def test_a_copied_cache_is_seen(monkeypatch):
  """`lax.cond` around the target call, and a plain write on the CPU, both copy
  caches: the reason for the loops in their place."""

  def write(buffer, block, lengths):
    zero = jnp.zeros((), lengths.dtype)
    start = (zero, zero, lengths[0], zero)
    return jax.lax.dynamic_update_slice(buffer, block, start)

  monkeypatch.setattr(kv_cache, 'append', write)
  # A loop over blocks is no reader that a write would be fused into.
  monkeypatch.setattr(attention, 'block_size', lambda capacity, least: capacity)
  # A layer that was traced before is not traced again.
  jax.clear_caches()
  hlo = compiled_loop('prompt_lookup', verification.speculative_sampling, 1)
  jax.clear_caches()
  assert cache_copies(in_loops(hlo), cache_size(1))


def test_a_callback_is_seen():
  def rule(row_keys, draft, target_probs):
    jax.debug.callback(lambda x: None, target_probs)
    return verification.greedy(row_keys, draft, target_probs)

  hlo = compiled_loop('uniform', rule, 2)
  assert 'callback' in hlo


def test_one_trace_a_shape():
  num_traces = 0
  greedy = logits.standardize(temperature=0.0)

  @functools.partial(jax.jit, compiler_options=WITHOUT_LLVM)
  def generate(params, key, prompt):
    nonlocal num_traces
    num_traces += 1
    return speculative.generate(
      params,
      key,
      prompt,
      method=Method(
        target=toy.llama(V),
        drafter=drafters.prompt_lookup(gamma=GAMMA),
        verify_fn=verification.greedy,
        logits_to_probs=greedy,
        eos_id=0,
      ),
      max_len=20,
    ).tokens

  params = Params(toy.llama_params(toy.llama_config(V), seed=0))
  for seed, rows in enumerate(([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]])):
    generate(params, jax.random.key(seed), toy.prompt(rows, width=4))
  assert num_traces == 1
  generate(params, jax.random.key(0), toy.prompt([[1, 2, 3, 4, 5]]))
  assert num_traces == 2


def test_instructions_are_those_that_users_run():
  draw = jax.jit(lambda key, x: SAMPLED(x)[0] + jax.random.normal(key, (V,)))
  args = jax.random.key(0), jnp.ones((2, V))
  full = draw.lower(*args).compile().as_text()
  without_name = lambda hlo: hlo.partition('\n')[2]
  assert 'fusion' in full
  assert without_name(optimized_hlo(draw, *args)) == without_name(full)


def test_plain_loop_copies_no_cache():
  method = Method(
    target=families.language_model(CONFIG), logits_to_probs=SAMPLED, eos_id=0
  )
  params = Params(families.param_shapes(CONFIG))
  state = jax.eval_shape(
    lambda params, prompt: autoregressive.init(
      params, jax.random.key(0), prompt, method=method, max_len=MAX_LEN
    ),
    params,
    prompt_of(1),
  )
  run = functools.partial(autoregressive.run, method=method)
  hlo = optimized_hlo(jax.jit(run), params, state)
  size = CONFIG.num_kv_heads * (MAX_LEN + 1) * CONFIG.head_dim
  assert cache_copies(in_loops(hlo), size) == []


TREE = base.Tree((0, 0, 1, 1, 2, 4))
TREE_PROGRAMS = [
  (n, b) for n in ('llama', 't5', 't5gemma', 'int8 cache') for b in (1, 2)
]


def tree_loop_of(name: str, batch_size: int):
  """A loop that scores trees and keeps a path of each, and its arguments."""
  config = MODELS.get(name, CONFIG)
  model = families.language_model(config)
  params = families.param_shapes(config)
  cache = jax.eval_shape(
    lambda params, prompt: model.init(params, prompt, CAPACITY),
    params,
    prompt_of(batch_size, name),
  )
  nodes = range(len(TREE.parents) + 1)
  tokens = jax.ShapeDtypeStruct((batch_size, len(nodes)), jnp.int32)

  def step(params, tokens, cache):
    starts = cache.lengths
    placement = trees.placement(TREE, nodes, starts, cache.capacity)
    logits, cache = model.extend(params, tokens, cache, placement=placement)
    best = arrays.argmax(logits)
    path = trees.path_of(TREE, best[:, 0] % len(nodes))
    cache = model.gather(cache, starts + 1, path - 1, len(TREE.parents))
    num_kept = 1 + jnp.sum(path > 0, axis=1, dtype=jnp.int32)
    return best, model.rewind(cache, starts + num_kept)

  def run(params, tokens, cache):
    return jax.lax.while_loop(
      lambda carry: jnp.all(carry[1].lengths < MAX_LEN),
      lambda carry: step(params, *carry),
      (tokens, cache),
    )

  return run, params, tokens, cache


@slow.parametrize(
  ('name', 'batch_size'), TREE_PROGRAMS, now=[('llama', 2), ('t5', 1)]
)
def test_a_path_is_kept_without_a_copied_cache(name, batch_size):
  run, *arguments = tree_loop_of(name, batch_size)
  lines = in_loops(optimized_hlo(jax.jit(run), *arguments))
  assert sum('dynamic-update-slice' in line for line in lines) >= 8
  assert cache_copies(lines, cache_size(batch_size)) == []
