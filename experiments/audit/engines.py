"""Engines as the two functions that `specdec_jax.audit` takes.

Each evaluates its own model for the probabilities that its samples should have:
a network or a table of eight tokens, with random weights, unless it says other.
"""

import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import specdec_jax

Tokens = tuple[int, ...]
VOCAB_SIZE, NUM_TOKENS, GAMMA = 8, 4, 3
# Repeats, so that prompt lookup finds something.
PROMPTS = ((1, 2, 1, 2, 1), (0, 2, 5))


class Way(NamedTuple):
  """A way in which an engine samples.

  Attributes:
    name: the drafter and the setting.
    sample: see `audit`.
    next_probs: see `audit`.
    prompts: to be continued.
    num_draws: per prompt and seed; fewer where an engine is slow.
    greedy: see `audit`.
    eos_ids: see `audit`.
  """

  name: str
  sample: Callable[[Tokens, int, int], Any]
  next_probs: Callable[[Tokens], np.ndarray]
  prompts: Sequence[Tokens]
  num_draws: int
  greedy: Callable[[Tokens], Sequence[int]] | None = None
  eos_ids: Sequence[int] = ()


def probs_of(logits: np.ndarray, top_k: int | None = None) -> np.ndarray:
  """The softmax of the `top_k` largest, in float64."""
  logits = np.asarray(logits, np.float64)
  if top_k is not None:
    limit = np.sort(logits, axis=-1)[..., -top_k, None]
    logits = np.where(logits >= limit, logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def versions(*packages: str) -> str:
  """Names packages with their versions; a checkout has that of its code."""
  return ', '.join(
    f'{name} {specdec_jax.__version__}'
    if name == 'specdec_jax'
    else f'{name} {importlib.metadata.version(name)}'
    for name in packages
  )


def transformers() -> Iterator[Way]:
  """Hugging Face transformers: `generate`, plain, with an assistant, and with
  prompt lookup; the latter two take one row."""
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM, logging

  logging.set_verbosity_error()
  torch.set_num_threads(1)
  config = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )
  torch.manual_seed(1)
  model = LlamaForCausalLM(config).eval()
  assistant = LlamaForCausalLM(config).eval()
  with torch.no_grad():
    for own, other in zip(
      assistant.parameters(), model.parameters(), strict=True
    ):
      own.copy_(0.8 * other + 0.4 * own)
  assistant.generation_config.num_assistant_tokens = GAMMA

  @torch.inference_mode()
  def generate(prompt: Tokens, num: int = 1, **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    output = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=NUM_TOKENS,
      num_return_sequences=num,
      **options,
    )
    return output[:, len(prompt) :].tolist()

  def sample(prompt, num, seed, *, together: bool, **options) -> Any:
    torch.manual_seed(seed)
    options = {'do_sample': True} | options
    if together:
      return generate(prompt, num, **options)
    return [generate(prompt, **options)[0] for _ in range(num)]

  @functools.cache
  def logits(prefix: Tokens) -> np.ndarray:
    with torch.inference_mode():
      return model(torch.tensor([prefix])).logits[0, -1].double().numpy()

  drafters = {
    'plain': {},
    'assistant': {'assistant_model': assistant},
    'prompt lookup': {'prompt_lookup_num_tokens': GAMMA},
  }
  for drafter, drafting in drafters.items():
    for setting, top_k in (('T 1', None), ('top-k 3', 3)):
      is_plain = not drafting
      yield Way(
        f'{drafter}, {setting}',
        # In transformers 0 keeps all, and None the default, 50.
        functools.partial(
          sample, together=is_plain, top_k=top_k or 0, **drafting
        ),
        lambda prefix, top_k=top_k: probs_of(logits(prefix), top_k),
        PROMPTS if is_plain else PROMPTS[:1],
        20_000 if is_plain else 800,
        lambda prompt, own=drafting: generate(prompt, do_sample=False, **own)[
          0
        ],
      )


def keras_hub() -> Iterator[Way]:
  """KerasHub's `SpeculativeSampler`, one row and four at a time, and its plain
  samplers, on JAX, over tables of logits by the last token."""
  os.environ['KERAS_BACKEND'] = 'jax'
  import jax
  import jax.numpy as jnp
  import keras
  from keras_hub import samplers

  rng = np.random.default_rng(1)
  target = 1.5 * rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
  draft = target + 0.8 * rng.normal(size=target.shape).astype(np.float32)

  def next_of(table: np.ndarray) -> Callable:
    # KerasHub asks for the logits of what stands at `index`.
    return lambda prompt, cache, index: (
      jnp.asarray(table)[jnp.take(prompt, index - 1, axis=1)],
      None,
      cache,
    )

  @functools.cache
  def decode(
    make: Callable[[], Any], rows: Sequence[Tokens], num: int, seed: int
  ) -> np.ndarray:
    """`num` calls of the sampler, each with its own seed: `[num, B, L]`."""
    sampler, start = make(), len(rows[0])
    prompt = np.pad(np.array(rows, np.int32), ((0, 0), (0, NUM_TOKENS)))
    mask = np.tile(np.arange(prompt.shape[1]) < start, (len(rows), 1))
    options = {}
    if isinstance(sampler, samplers.SpeculativeSampler):
      options['draft_next'] = next_of(draft)

    def call(state: jax.Array) -> jax.Array:
      own = [(sampler.seed_generator.state, state)] if num > 1 else []
      with keras.StatelessScope(state_mapping=own):
        found = sampler(
          next_of(target),
          jnp.asarray(prompt),
          index=start,
          mask=jnp.asarray(mask),
          **options,
        )
      return found[:, start:]

    states = np.zeros((num, 2), np.uint32)
    states[:, 0] = np.arange(num) + seed * num
    return np.asarray(jax.jit(jax.vmap(call))(states))

  def sample(prompt, num, seed, *, make, rows) -> np.ndarray:
    return decode(make, rows, num, seed)[:, rows.index(prompt)]

  def speculative(base: Any) -> Any:
    return samplers.SpeculativeSampler(
      num_speculative_tokens=GAMMA, base_sampler=base, seed=0
    )

  bases = {
    'T 1': (None, lambda: samplers.RandomSampler(seed=0)),
    'top-k 3': (3, lambda: samplers.TopKSampler(k=3, seed=0)),
  }
  one, four = ((1,),), ((1,), (2,), (3,), (4,))
  for setting, (top_k, base) in bases.items():
    next_probs = lambda prefix, k=top_k: probs_of(target[prefix[-1]], k)
    for name, rows, make in (
      ('plain', four, base),
      ('draft model', one, lambda base=base: speculative(base())),
      ('draft model', four, lambda base=base: speculative(base())),
    ):
      yield Way(
        f'{name}, {setting}, batch {len(rows)}',
        functools.partial(sample, make=make, rows=rows),
        next_probs,
        rows,
        5000,
        lambda prompt, name=name, rows=rows: decode(
          (lambda: speculative(None))
          if name != 'plain'
          else samplers.GreedySampler,
          rows,
          1,
          0,
        )[0, rows.index(prompt)],
      )


def tunix() -> Iterator[Way]:
  """The function that Tunix's own sampler draws with, `sample_top_p`, over a
  table: there is no speculation to test."""
  import jax
  from tunix.generate import sampler

  table = 1.5 * np.random.default_rng(1).normal(size=(VOCAB_SIZE, VOCAB_SIZE))

  def sample(prompt, num, seed, top_k) -> np.ndarray:
    tokens = [np.full(num, prompt[-1])]
    for key in jax.random.split(jax.random.key(seed), NUM_TOKENS):
      logits = table[tokens[-1]][:, None].astype(np.float32)
      tokens.append(sampler.sample_top_p(logits, key, 1.0, 1.0, top_k)[0])
    return np.stack(tokens[1:], axis=1)

  for setting, top_k in (('T 1', None), ('top-k 3', 3)):
    yield Way(
      f'plain, {setting}',
      functools.partial(sample, top_k=top_k),
      lambda prefix, k=top_k: probs_of(table[prefix[-1]], k),
      ((1,), (2,)),
      20_000,
    )


def ours() -> Iterator[Way]:
  """This project: `specdec_jax.load`, texts of different lengths in batches of
  64, with the shipped models of 32,000 tokens."""
  from specdec_jax.assembly import auditing, running

  texts = ('This package contains', 'a b a b a', 'Library for', 'The')
  for setting, options in (('T 1', {}), ('top-k 3', {'top_k': 3})):
    for drafter in ('none', 'prompt_lookup', 'model'):
      if drafter != 'none':
        options = options | {'gamma': GAMMA}
      decoder = specdec_jax.load(
        'lm-mini',
        drafter=drafter,
        draft_model='lm-nano' if drafter == 'model' else None,
        temperature=1.0,
        **options,
      )
      settings = running.DecodeSettings(
        max_new_tokens=NUM_TOKENS, batch_size=64
      )
      sample, next_probs = auditing.engine(decoder, texts, settings)
      yield Way(
        f'{drafter}, {setting}, batch 64',
        sample,
        next_probs,
        [(i,) for i in range(len(texts))],
        500,
        eos_ids=decoder.vocabulary.eos_ids,
      )


# Of each engine its ways, and the packages that its row names.
ENGINES = {
  'specdec_jax': (ours, ('specdec_jax', 'jax')),
  'transformers': (transformers, ('transformers', 'torch')),
  'KerasHub': (keras_hub, ('keras-hub', 'keras', 'jax')),
  'Tunix': (tunix, ('google-tunix', 'jax')),
}
