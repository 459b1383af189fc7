"""Rollouts of Tunix's trainers by speculative decoding."""

import dataclasses
import functools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.rl import common, reshard, utils
from tunix.rl.rollout import base_rollout
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from specdec_jax.assembly import (
  decode_many,
  packed_settings,
  running,
  text_settings,
)
from specdec_jax.assembly.decode_many import Timed, Utilisation
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.lengths import Auto
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params, Prompt
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.program import Program, Refill
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.drafters import Pool
from specdec_jax.integrations.tunix import decoders, meshes
from specdec_jax.integrations.tunix.turns import Turns
from specdec_jax.launch import processes
from specdec_jax.sharding import mesh as mesh_lib
from specdec_jax.sharding import rules
from specdec_jax.text import prompts as prompts_lib

# Fields that a rollout supports, or that only concern Tunix's own engine.
_SUPPORTED = (
  *('max_tokens_to_generate', 'max_prompt_length', 'temperature', 'top_p'),
  *('top_k', 'seed', 'data_type', 'eos_tokens', 'return_logprobs'),
  'kv_cache_size',
)


class SpeculativeRollout(base_rollout.BaseRollout):
  """A rollout engine for `ClusterConfig.rollout_engine`, which drafts from its
  earlier rollouts, or with a draft model.

  Tokens follow the distribution of Tunix's own sampler, with other random
  draws. Use `functools.partial` to set the drafting options. See
  docs/rollouts.md.

  Attributes:
    timed: statistics and seconds of the last `generate`, None before it.
  """

  def __init__(
    self,
    rollout_actor: nnx.Module,
    tokenizer: Any,
    mesh: jax.sharding.Mesh | None = None,
    rollout_config: RolloutConfig | None = None,
    *,
    draft_model: nnx.Module | str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    **options: Any,
  ):
    """Takes the arguments that Tunix passes to an engine, and the drafting
    options of `decoders.load`, which states the errors; `dtype` and sampling
    are those of the RolloutConfig.

    Both models stay on the mesh as Tunix shards them, and rows are sharded over
    it, see `meshes.of`; of `rollout_config` only `data_type` is used here. With
    more prompts than `batch_size`, finished rows are refilled; by default all
    prompts of a call are decoded at once. The number of rows is rounded up to a
    multiple that the mesh divides. With a gamma all calls draft; without one,
    calls draft while that is faster, see `turns.Turns`.
    """
    conflicts = sorted({*text_settings.NAMES, 'dtype'} & {*options})
    if conflicts:
      raise ValueError(
        f'rollouts follow their RolloutConfig: leave {", ".join(conflicts)} out'
      )
    if batch_size is not None:
      running.check_count('batch_size', batch_size)
    config = RolloutConfig() if rollout_config is None else rollout_config
    checked(config)
    self._model = reshard.reshard_model_to_mesh(rollout_actor, mesh)
    if isinstance(draft_model, nnx.Module):
      draft_model = reshard.reshard_model_to_mesh(draft_model, mesh)
    self._batch_size = batch_size
    # The temperature is a placeholder: rows have their own.
    decoder = decoders.load(
      self._model,
      tokenizer,
      draft_model=draft_model,
      temperature=1.0,
      dtype=config.data_type,
      **options,
    )
    self._mesh = meshes.of(self._model)
    self._decoder = meshes.placed(decoder, self._mesh)
    vocabulary: Any = self._decoder.vocabulary
    self._tokenizer = vocabulary.tokenizer
    # Arrays are immutable: new weights are new arrays.
    self._leaves = _leaves(self._model)
    self._programs: dict[Any, Refill] = {}
    is_auto = isinstance(self._decoder.recipe.drafter.length, Auto)
    self._turns = Turns() if is_auto else None
    # The seed of the next call without one.
    self._next_seed = _fresh_seed(self._mesh)
    self.timed: Timed | None = None

  def generate(
    self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
  ) -> RolloutOutput:
    """Decodes each prompt once, as `rollout_config` says.

    As Tunix's sampler does, it leaves out the EOS token, and accepts prompts
    longer than `max_prompt_length`. Without a `seed` the draws differ from call
    to call and from engine to engine, starting from the operating system's
    randomness; with one, they also depend on the texts that 'suffix' remembers.
    `logprobs` are those of the policy at the temperature, at 1 if it is 0.
    Raises ValueError for an unsupported setting, a prompt without tokens or
    with padding, or logits that are NaN.
    """
    sampling = checked(rollout_config)
    if not prompts:
      raise ValueError('there are no prompts')
    if kwargs:
      raise ValueError(f'unknown arguments: {", ".join(sorted(kwargs))}')
    self._read_weights()
    rows = self._encoded(prompts)
    with jax.set_mesh(self._mesh):
      outputs = self._decode(rows, rollout_config, sampling)
    # Prompts with their continuations, without padding.
    sequences = [
      np.asarray(output.tokens[0, : output.lengths[0]]) for output in outputs
    ]
    if isinstance(self._decoder.params.drafter, Pool):
      decoder = self._decoder.remember([ids.tolist() for ids in sequences])
      self._decoder = meshes.placed(decoder, self._mesh)
    eos = self._eos_ids(rollout_config)
    # The span of each continuation, without EOS.
    spans = []
    width = _width(rows, rollout_config)
    padded = np.full((len(rows), width), self.pad_id(), np.int32)
    for row, ids, left_padded in zip(rows, sequences, padded, strict=True):
      has_eos = len(ids) > len(row) and ids[-1] in eos
      spans.append(slice(len(row), len(ids) - has_eos))
      # Trainers take prompts padded on the left: [7, 8] of width 4 is
      # [0, 0, 7, 8] with 0 for padding.
      left_padded[width - len(row) :] = row
    tokens = [ids[span] for ids, span in zip(sequences, spans, strict=True)]
    log_probs = None
    if rollout_config.return_logprobs:
      row_log_probs = [np.asarray(output.log_probs[0]) for output in outputs]
      temperature = sampling.temperature or 0.0
      if temperature not in (0.0, 1.0):
        max_len = width + rollout_config.max_tokens_to_generate
        row_log_probs = self._tempered(sequences, max_len, temperature)
      log_probs = [
        values[span] for values, span in zip(row_log_probs, spans, strict=True)
      ]
    return RolloutOutput(
      text=[self._decoder.vocabulary.decode(ids.tolist()) for ids in tokens],
      logits=[],
      tokens=tokens,
      left_padded_prompt_tokens=padded,
      logprobs=log_probs,
    )

  def _encoded(self, prompts: list[str]) -> list[list[int]]:
    """Encodes prompts; ValueError for one without tokens or with padding."""
    rows = [self._decoder.vocabulary.encode(prompt) for prompt in prompts]
    for number, row in enumerate(rows, start=1):
      if not row:
        raise ValueError(f'prompt {number} has no tokens')
      if self.pad_id() in row:
        raise ValueError(
          f'prompt {number} has the padding token {self.pad_id()}, which Tunix '
          'hides from the others: give the tokenizer another pad_token'
        )
    return rows

  def get_per_token_logps(
    self, prompt_tokens: jax.Array, completion_tokens: jax.Array
  ) -> jax.Array:
    """Returns log-probabilities by Tunix's network at temperature 1, as Tunix's
    vanilla rollout does."""
    return self._logps_fn()(prompt_tokens, completion_tokens)

  def _logps_fn(self) -> Callable[..., jax.Array]:
    """Returns Tunix's function of log-probabilities, for the current policy."""
    return functools.partial(
      common.compute_per_token_logps,
      *nnx.split(self._model),
      pad_id=self.pad_id(),
      eos_id=self.eos_id(),
    )

  def update_params(
    self, params: Any, filter_types: tuple[Any, ...] | None = None
  ) -> None:
    """Replaces the policy's parameters, cast to its dtypes and placed on its
    devices; parameters that already fit are not copied."""
    state = nnx.state(self._model, *(filter_types or (nnx.Param,)))
    if filter_types is not None:
      shardings = jax.tree.map(lambda x: x.sharding, state)
      params = reshard.reshard_pytree(params, shardings)
    new, _ = utils.to_flat_dict(params)
    old, structure = utils.to_flat_dict(state)
    cast = {
      key: new[key].astype(x.dtype) for key, x in old.items() if key in new
    }
    nnx.update(
      self._model, jax.tree.unflatten(structure, (old | cast).values())
    )

  def pad_id(self) -> int:
    """Returns the id of padding."""
    return int(self._tokenizer.pad_id())

  def eos_id(self) -> int:
    """Returns the id of EOS, which `eos_tokens` overrides."""
    return int(self._tokenizer.eos_id())

  def model(self) -> nnx.Module:
    """Returns the policy; rollouts follow in-place updates of the trainer."""
    return self._model

  def _read_weights(self) -> None:
    """Reads the policy's weights again if they have changed."""
    leaves = _leaves(self._model)
    if all(a is b for a, b in zip(leaves, self._leaves, strict=True)):
      return
    target = decoders.weights(self._model, self._decoder.config)
    drafter = self._decoder.params.drafter
    if not isinstance(drafter, Pool):
      # A drafter that shares the policy's weights is updated too.
      drafter = self._decoder.parts.drafting.join(target, ())
    params = Params(target=target, drafter=drafter)
    decoder = dataclasses.replace(self._decoder, params=params)
    self._decoder = meshes.placed(decoder, self._mesh)
    self._leaves = leaves

  def _eos_ids(self, config: RolloutConfig) -> tuple[int, ...]:
    return tuple(config.eos_tokens or self._decoder.vocabulary.eos_ids)

  def _decode(
    self,
    rows: Sequence[Sequence[int]],
    config: RolloutConfig,
    sampling: TextSettings,
  ) -> list[DecodeOutput]:
    """Decodes rows of tokens; returns their outputs in the same order."""
    # 6 rows on 4 devices become 8, two per device.
    share = self._mesh.shape[rules.DATA]
    divisible = lambda num: -(-num // share) * share
    batch_size = divisible(self._batch_size or len(rows))
    # Rows are refilled when a quarter of them is free, to save prefills.
    num_fresh = batch_size
    if batch_size < len(rows):
      num_fresh = divisible(-(-batch_size // 4))
    width = _width(rows, config)
    num_new = config.max_tokens_to_generate
    drafts = True
    if self._turns is not None:
      # All processes have to run one program, and their clocks differ.
      drafts = bool(processes.number_of_first(self._turns.drafts_next()))
    decoder = self._decoder if drafts else self._decoder.at(0)

    def pack(group: Sequence[int | None]) -> Prompt:
      prompt = prompts_lib.pack(
        [None if i is None else rows[i] for i in group],
        config=decoder.config,
        width=width,
        max_new_tokens=num_new,
        row_ids=[i or 0 for i in group],
      )
      row_sampling = packed_settings.sampling_of_rows(
        [sampling] * len(group), len(group)
      )
      return dataclasses.replace(prompt, sampling=row_sampling)

    started = time.perf_counter()
    programs = self._compiled(
      decoder, config, pack([None] * num_fresh), batch_size
    )
    compiling = time.perf_counter() - started
    utilisation = Utilisation(num_rows=batch_size)
    by_index = {}
    for i, output, _ in decode_many.decode(
      programs,
      decoder.params,
      self._seed(config),
      range(len(rows)),
      pack=pack,
      utilisation=utilisation,
    ):
      if output.has_nan[0]:
        raise ValueError(f'prompt {i + 1}: logits were not numbers (NaN)')
      by_index[i] = output
    outputs = [by_index[i] for i in range(len(rows))]
    self.timed = Timed(
      statistics=metrics.joined([output.statistics for output in outputs]),
      utilisation=utilisation,
      seconds=utilisation.fill_seconds + utilisation.loop_seconds,
    )
    if self._turns is not None:
      num_tokens = int(self.timed.statistics.num_tokens.sum())
      self._turns.count(drafts, num_tokens, self.timed.seconds, compiling)
    return outputs

  def _compiled(
    self, decoder: Decoder, config: RolloutConfig, prompt: Prompt, num_rows: int
  ) -> Refill:
    """Returns the programs for `num_rows` rows, and prompts of this shape."""
    eos = self._eos_ids(config)
    shape = prompt.decoder_tokens.shape
    max_len = shape[1] + config.max_tokens_to_generate
    key = decoder.drafter.gamma, num_rows, shape, max_len, eos
    if key not in self._programs:
      program = Program(
        method=dataclasses.replace(decoder.method, eos_id=eos),
        params=decoder.params,
        prompt=prompt,
        max_len=max_len,
        places=functools.partial(mesh_lib.state_shardings, self._mesh),
      )
      replicated = meshes.replicated(self._mesh)
      self._programs[key] = program.refill(num_rows, replicated)
      decode_many.warm_up(self._programs[key], decoder.params, prompt)
    return self._programs[key]

  def _tempered(
    self, rows: Sequence[np.ndarray], max_len: int, temperature: float
  ) -> list[np.ndarray]:
    """Returns log-probabilities of each row at a temperature, by Tunix's
    network; 0 for the first token."""
    # The decoding loop stores those at temperature 1.
    logps_fn = self._logps_fn()
    log_probs: list[np.ndarray] = []
    # One row per device at a time: the logits of all rows would be the largest
    # array of the training.
    num = self._mesh.shape[rules.DATA]
    for start in range(0, len(rows), num):
      padded = np.full((num, max_len), self.pad_id(), np.int32)
      group = rows[start : start + num]
      for padded_row, row in zip(padded, group, strict=False):
        padded_row[: len(row)] = row
      logps = logps_fn(padded[:, :1], padded[:, 1:], temperature=temperature)
      log_probs.extend(np.pad(logps, ((0, 0), (1, 0)))[: len(group)])
    return log_probs

  def _seed(self, config: RolloutConfig) -> int:
    if config.seed is None:
      seed = self._next_seed
      self._next_seed = (seed + 1) % 2**32
      return seed
    if isinstance(config.seed, int):
      return config.seed % 2**32
    # A JAX key: random bits from it are the seed.
    return int(jax.random.bits(config.seed))


def checked(config: RolloutConfig) -> TextSettings:
  """Returns the sampling of a configuration, as Tunix's sampler reads it;
  ValueError for a setting of another engine, or one out of range."""
  for name, default in vars(type(config)()).items():
    if name not in _SUPPORTED and getattr(config, name) != default:
      raise ValueError(
        f'{name} belongs to other rollout engines: speculative rollouts do not '
        'support it, so leave it out'
      )
  for name in ('max_tokens_to_generate', 'max_prompt_length'):
    running.check_count(name, getattr(config, name))
  # Without top_p, Tunix's sampler is greedy at every temperature.
  if config.top_p is None or config.temperature == 0:
    return TextSettings()
  top_k = config.top_k if config.top_k and config.top_k > 0 else None
  top_p = None if config.top_p == 1 else config.top_p
  return TextSettings(temperature=config.temperature, top_k=top_k, top_p=top_p)


def _fresh_seed(mesh: jax.sharding.Mesh) -> int:
  """Returns a random seed; the processes of one mesh, which run one program,
  share that of the first."""
  seed = secrets.randbits(31)
  hosts = {device.process_index for device in mesh.devices.flat}
  return processes.number_of_first(seed) if len(hosts) > 1 else seed


def _width(rows: Sequence[Sequence[int]], config: RolloutConfig) -> int:
  """Returns the width of padded prompts; a power of two, as in Tunix, if one is
  longer than the limit."""
  longest = max(map(len, rows))
  if longest <= config.max_prompt_length:
    return config.max_prompt_length
  # Each width is compiled: 300 and 500 tokens share 512.
  return 2 ** (longest - 1).bit_length()


def _leaves(model: nnx.Module) -> list[Any]:
  return jax.tree.leaves(nnx.state(model, nnx.Param))
