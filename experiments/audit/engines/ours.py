"""This project: its compiled loop over the tables, and the Python interface
with the models that it ships."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from experiments.audit import ways
from experiments.audit.ways import Tokens, Way
from specdec_jax import base, drafters
from specdec_jax.assembly import running
from specdec_jax.audit import decoder_audit as auditing
from specdec_jax.base import Array, Drafter, LanguageModel, Params, Prompt
from specdec_jax.decoding import speculative
from specdec_jax.decoding.method import Method
from specdec_jax.sampling import logits

_TEXTS = 'This package contains', 'a b a b a'
_DOORS = {
  'plain': {'drafter': 'none'},
  'prompt lookup': {'drafter': 'prompt_lookup', 'gamma': ways.GAMMA},
  'draft model': {'draft_model': 'lm-nano', 'gamma': ways.GAMMA},
  'draft model, tree': {'draft_model': 'lm-nano', 'tree': (0, 0, 1, 1, 2)},
}


def loop() -> Iterator[Way]:
  """The loop over tables of logits by the last token."""
  target, draft = map(jnp.asarray, ways.tables())
  for setting, top_k in ways.SETTINGS.items():
    for name, drafter, params in (
      ('plain', drafters.none, ()),
      ('prompt lookup', functools.partial(_lookup, ways.GAMMA), ()),
      ('draft model', functools.partial(_model, top_k), draft),
    ):
      for prompts in (ways.ONE, ways.FOUR):
        decode = functools.partial(
          _decode, Params(target, params), drafter(), prompts
        )
        greedy = decode(0.0, None, 1, 0)[0]
        yield Way(
          f'{name}, {setting}, batch {len(prompts)}',
          ways.by_prompt(functools.partial(decode, 1.0, top_k), prompts),
          ways.of_table(top_k),
          prompts,
          50_000,
          lambda prompt, greedy=greedy, prompts=prompts: greedy[
            prompts.index(prompt)
          ],
        )


def doors() -> Iterator[Way]:
  """`specdec_jax.load`, texts of different lengths in batches of 64, with the
  shipped models of 8,192 tokens."""
  for setting, top_k in ways.SETTINGS.items():
    for name, options in _DOORS.items():
      decoder = specdec_jax.load(
        'lm-mini', temperature=1.0, top_k=top_k, **options
      )
      settings = running.DecodeSettings(
        max_new_tokens=ways.NUM_TOKENS, batch_size=64
      )
      sample, next_probs = auditing.engine(decoder, _TEXTS, settings)
      yield Way(
        f'lm-mini, {name}, {setting}, batch 64',
        sample,
        next_probs,
        [(i,) for i in range(len(_TEXTS))],
        1000,
        eos_ids=decoder.vocabulary.eos_ids,
      )


def _lookup(gamma: int) -> Drafter:
  return drafters.prompt_lookup(gamma=gamma, min_ngram=1)


def _model(top_k: int | None) -> Drafter:
  return drafters.autoregressive(
    _TABLE,
    gamma=ways.GAMMA,
    logits_to_probs=logits.standardize(top_k=top_k),
  )


def _decode(
  params: Params,
  drafter: Drafter,
  prompts: tuple[Tokens, ...],
  temperature: float,
  top_k: int | None,
  num: int,
  seed: int,
) -> np.ndarray:
  """`num` batches of the prompts, each with its own key: `[num, B, L]`."""
  lengths = np.array([*map(len, prompts)])
  width = lengths.max()
  prompt = Prompt(
    encoder_tokens=None,
    decoder_tokens=jnp.array(
      [(*ids, *[0] * (width - len(ids))) for ids in prompts], jnp.int32
    ),
    decoder_lengths=jnp.asarray(lengths, jnp.int32),
    row_ids=jnp.arange(len(prompts)),
    max_lengths=jnp.asarray(lengths + ways.NUM_TOKENS, jnp.int32),
  )
  method = Method(
    target=_TABLE,
    drafter=drafter,
    logits_to_probs=logits.standardize(temperature=temperature, top_k=top_k),
    eos_id=-1,
  )
  generate = lambda key: speculative.generate(
    params, key, prompt, method=method, max_len=int(width) + ways.NUM_TOKENS
  )
  keys = jax.random.split(jax.random.key(seed), num)
  output = jax.device_get(jax.jit(jax.vmap(generate))(keys))
  places = lengths[:, None] + np.arange(ways.NUM_TOKENS)
  return np.take_along_axis(output.tokens, places[None], axis=2)


@base.value
class _Seen:
  """How many tokens of each row the table has been fed, int32 `[B]`."""

  lengths: Array


def _table() -> LanguageModel:
  """A language model whose params are logits by the last token, `[V, V]`."""

  def init(params: Array, prompt: Prompt, max_len: int) -> _Seen:
    return _Seen(lengths=prompt.decoder_lengths - 1)

  def extend(params, tokens, cache, at=None, placement=None):
    cache = _Seen(lengths=cache.lengths + tokens.shape[1])
    if at is not None:
      tokens = jnp.take_along_axis(tokens, at[:, None], axis=1)
    return params[tokens], cache

  def rewind(cache: _Seen, lengths: Array) -> _Seen:
    return _Seen(lengths=lengths)

  return LanguageModel(init, extend, rewind, ways.VOCAB_SIZE)


_TABLE = _table()
