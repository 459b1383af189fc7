"""From options to everything that decoding needs."""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from specdec_jax import drafters, logits, verification
from specdec_jax.base import (
  Drafter,
  LanguageModel,
  LogitsToProbsFn,
  Params,
  VerifyFn,
)
from specdec_jax.checkpoints.loading import LoadedModel
from specdec_jax.cli import model_options
from specdec_jax.data import ngram_counts
from specdec_jax.drafters import schedules
from specdec_jax.models import families
from specdec_jax.models.families import Config
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.text import prompts, vocabularies
from specdec_jax.text.prompts import Batch, has_encoder
from specdec_jax.text.vocabularies import AnyVocabulary

_NO_LIMIT = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """Models and rules, ready to be jitted.

  Attributes:
    params: weights of both sides.
    target: the target.
    drafter: the drafter; with gamma 0 it decodes plainly.
    make_drafter: the same with a gamma that is given and does not vary.
    verify_fn: the rule.
    logits_to_probs: how the target is sampled.
    eos_id: ids that end a row.
    config: sizes of the target.
    vocabulary: of both models.
    max_positions: the longest context of both models.
    description: a line about the target.
  """

  params: Params
  target: LanguageModel
  drafter: Drafter
  make_drafter: Callable[[int], Drafter]
  verify_fn: VerifyFn
  logits_to_probs: LogitsToProbsFn
  eos_id: tuple[int, ...]
  config: Config
  vocabulary: AnyVocabulary
  max_positions: int
  description: str


def enable_compilation_cache() -> str | None:
  """Keeps compiled programs across runs; where they are kept.

  `JAX_COMPILATION_CACHE_DIR` names another place. Where the usual one cannot be
  written, as in many containers, nothing is kept, and the result is None.
  """
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  if chosen := getattr(jax.config, 'jax_compilation_cache_dir', None):
    return chosen
  try:
    cache_home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    folder = str(Path(cache_home) / 'specdec_jax' / 'compiled')
    os.makedirs(folder, exist_ok=True)
  except (OSError, RuntimeError):  # The latter: nobody's home is known.
    return None
  if not os.access(folder, os.W_OK):
    return None
  jax.config.update('jax_compilation_cache_dir', folder)
  return folder


def prepare(
  args: argparse.Namespace,
  texts: Sequence[str],
  batch_size: int | None = None,
  num_samples: int = 1,
) -> tuple[Decoder, list[Batch]]:
  """The models of `args`, and `texts` as batches, checked to fit together.

  Args:
    args: the options.
    texts: the prompts.
    batch_size: that of `args` if None.
    num_samples: rows of each prompt, one after another.

  Raises:
    ValueError: as `load_decoder`, or if a prompt is too long.
  """
  enable_compilation_cache()
  mesh_lib.check_devices(args.num_devices)
  decoder = load_decoder(args)
  rows = prompts.encode(
    decoder.vocabulary,
    texts,
    config=decoder.config,
    is_chat=args.chat,
    system=args.system,
  )
  check_lengths(decoder, rows, args.max_new_tokens)
  repeat = lambda items: [x for x in items for _ in range(num_samples)]
  batches = prompts.batches(
    repeat(texts),
    repeat(rows),
    config=decoder.config,
    batch_size=batch_size or args.batch_size,
    max_new_tokens=args.max_new_tokens,
  )
  return decoder, batches


def load_target(args: argparse.Namespace, dtype: str) -> Decoder:
  """The target of `args` in another dtype, to be decoded plainly."""
  plain = {'drafter': 'none', 'draft_model': None, 'dtype': dtype}
  return load_decoder(argparse.Namespace(**vars(args) | plain))


def load_decoder(args: argparse.Namespace) -> Decoder:
  """Loads the models of `args` and builds its drafter and rule.

  Raises:
    ValueError: if a model cannot be had, or the two do not fit together.
  """
  target, draft_model = model_options.load_both(args)
  if draft_model is not None:
    vocabularies.check_same_vocabulary(
      target.vocabulary, draft_model.vocabulary
    )
    _check_kinds(target, draft_model)
  loaded = [target] if draft_model is None else [target, draft_model]
  max_positions = min(_max_positions(model) for model in loaded)
  if args.drafter != 'none' and args.gamma >= max_positions:
    raise ValueError(
      f'--gamma {args.gamma} is too large for a context of {max_positions}'
    )
  return Decoder(
    params=Params(
      target=target.params,
      drafter=() if draft_model is None else draft_model.params,
    ),
    target=families.language_model(target.config),
    drafter=_drafter(args, target, draft_model),
    make_drafter=lambda gamma: _drafter(
      argparse.Namespace(**vars(args) | {'gamma': gamma, 'adaptive': None}),
      target,
      draft_model,
    ),
    verify_fn=_verify_fn(args),
    logits_to_probs=_logits_to_probs(args, target, for_target=True),
    eos_id=target.vocabulary.eos_ids or (-1,),
    config=target.config,
    vocabulary=target.vocabulary,
    max_positions=max_positions,
    description=target.description,
  )


def _max_positions(model: LoadedModel) -> int:
  """The longest context of a model; T5's relative positions set no limit."""
  if isinstance(model.config, LlamaConfig):
    return model.config.max_positions
  return _NO_LIMIT


def _check_kinds(target: LoadedModel, draft: LoadedModel) -> None:
  """Raises ValueError if just one of the two has an encoder."""
  kinds = [
    'an encoder-decoder' if has_encoder(model.config) else 'decoder-only'
    for model in (target, draft)
  ]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f'{target.name} is {kinds[0]} and {draft.name} {kinds[1]}: a draft model '
      'reads what its target reads'
    )


def check_lengths(
  decoder: Decoder, rows: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
  """Raises ValueError if a prompt and its continuation exceed the context."""
  limit = decoder.max_positions
  for i, row in enumerate(rows, start=1):
    if len(row) >= limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens, and the context is {limit}: '
        'shorten it'
      )
    if len(row) + max_new_tokens > limit:
      raise ValueError(
        f'prompt {i} has {len(row)} tokens and with {max_new_tokens} new ones '
        f'exceeds the context of {limit}: lower --max_new_tokens to '
        f'{limit - len(row)}'
      )


def max_length(batch: Batch, max_new_tokens: int) -> int:
  """`max_len` for batches of one shape."""
  return batch.prompt.decoder_tokens.shape[1] + max_new_tokens


def sharding(num_devices: int, *, is_batch: bool) -> jax.sharding.Sharding:
  """Where arrays lie on the devices that share a batch: rows are split, weights
  are everywhere. See `sharding.mesh.check_devices`."""
  devices = jax.devices()
  if num_devices == 1:
    return jax.sharding.SingleDeviceSharding(devices[0])
  mesh = jax.make_mesh(
    (num_devices,),
    ('data',),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices[:num_devices],
  )
  spec = jax.sharding.PartitionSpec('data' if is_batch else None)
  return jax.sharding.NamedSharding(mesh, spec)


def place(tree: Any, num_devices: int, *, is_batch: bool) -> Any:
  """Puts arrays there."""
  return jax.device_put(tree, sharding(num_devices, is_batch=is_batch))


def models(decoder: Decoder) -> dict[str, Any]:
  """Arguments of `speculative.init` and of `step`."""
  return {'target': decoder.target, 'drafter': decoder.drafter}


def rule(decoder: Decoder) -> dict[str, Any]:
  """The other arguments of `speculative.step`."""
  return {
    'verify_fn': decoder.verify_fn,
    'logits_to_probs': decoder.logits_to_probs,
    'eos_id': decoder.eos_id,
  }


def plain_sampling(
  args: argparse.Namespace, vocabulary: AnyVocabulary
) -> LogitsToProbsFn:
  """How plain decoding samples."""
  return logits.standardize(
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    min_p=args.min_p,
    vocab_size=vocabulary.vocab_size,
  )


def _logits_to_probs(
  args: argparse.Namespace, model: LoadedModel, *, for_target: bool
) -> LogitsToProbsFn:
  """How a model is sampled.

  Lenient greedy verification reads the target's probabilities themselves, so
  there the target keeps temperature 1 and the rule takes the argmax.
  """
  if for_target and args.verification == 'greedy' and args.lenience < 1:
    args = argparse.Namespace(**vars(args) | {'temperature': 1.0})
  return plain_sampling(args, model.vocabulary)


def _drafter(
  args: argparse.Namespace, target: LoadedModel, draft_model: LoadedModel | None
) -> Drafter:
  """The drafter of `args`."""
  if args.drafter == 'none':
    return drafters.none()
  if args.drafter == 'prompt_lookup':
    return drafters.prompt_lookup(
      gamma=args.gamma, max_ngram=args.max_ngram, min_ngram=args.min_ngram
    )
  if args.drafter == 'uniform':
    return drafters.uniform(
      gamma=args.gamma,
      vocab_size=target.vocabulary.vocab_size,
      padded_vocab_size=target.config.vocab_size,
    )
  if args.drafter == 'ngram':
    table = ngram_counts.estimate(
      ngram_counts.tokens_of_file(args.ngram_text, target.vocabulary),
      vocab_size=target.config.vocab_size,
    )
    sampled = _logits_to_probs(args, target, for_target=False)
    return drafters.ngram(
      table,
      gamma=args.gamma,
      logits_to_probs=sampled if args.temperature else None,
    )
  assert draft_model is not None
  sampled = _logits_to_probs(args, draft_model, for_target=False)
  model = families.with_logits_of(
    families.language_model(draft_model.config), target.config.vocab_size
  )
  if args.adaptive is None:
    return drafters.autoregressive(
      model,
      gamma=args.gamma,
      logits_to_probs=sampled,
      is_argmax=not args.temperature,
    )
  return drafters.adaptive(
    model,
    gamma=args.gamma,
    logits_to_probs=sampled,
    schedule=_schedule(args),
    min_prob=args.min_prob,
  )


def _schedule(args: argparse.Namespace) -> schedules.Schedule:
  """The limits of `--adaptive`."""
  if args.adaptive == 'heuristic':
    return schedules.heuristic()
  if args.adaptive == 'estimate':
    return schedules.running_alpha(c=args.draft_cost)
  return schedules.fixed()


def _verify_fn(args: argparse.Namespace) -> VerifyFn:
  """The rule of `args`."""
  if args.verification == 'block':
    return verification.block_verification
  rule = {
    'speculative_sampling': verification.speculative_sampling,
    'greedy': verification.greedy,
  }[args.verification]
  return functools.partial(rule, lenience=args.lenience)
