"""Decoders that `bench` and `calibrate` time: the given one, and plain ones."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly import running
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice, NoDrafter, shown
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params, Prompt
from specdec_jax.launch import platforms, progress
from specdec_jax.measure import loops as loops_lib
from specdec_jax.measure.loops import CompiledLoop
from specdec_jax.text.prompts import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
  """A decoder and its batches of one shape, on their devices."""

  decoder: Decoder
  params: Params
  rng_key: jax.Array
  prompts: list[Prompt]
  max_len: int
  num_devices: int

  @property
  def args(self) -> tuple[Params, jax.Array, list[Prompt]]:
    """The first arguments of the functions in `measure`."""
    return self.params, self.rng_key, self.prompts

  def plain_loops(
    self, dtypes: Collection[str], num_batches: int | None = None
  ) -> dict[str, CompiledLoop]:
    """Compiles plain decoding of the first batches in several dtypes."""
    decoder, target_dtype = self.decoder, self.decoder.model.dtype
    # `decoder.method` may have the target's probabilities at another
    # temperature, for its rule.
    to_probs = decoder.sampling.to_probs(decoder.parts.target_info.vocab_size)
    method = dataclasses.replace(decoder.method, logits_to_probs=to_probs)
    loops = {}
    for dtype in sorted({*dtypes, target_dtype}):
      target, params = decoder.target, self.params
      # All loops share the method: only weights and caches differ.
      if dtype != target_dtype:
        plain_decoder = plain(decoder, dtype)
        target = plain_decoder.target
        params = running.place(
          plain_decoder.params, self.num_devices, is_batch=False
        )
      loops[dtype] = loops_lib.plain_loop(
        params,
        self.rng_key,
        self.prompts[:num_batches],
        method=dataclasses.replace(method, target=target),
        max_len=self.max_len,
      )
    return loops


def plain(decoder: Decoder, dtype: str) -> Decoder:
  """Loads the target in another dtype, to be decoded plainly."""
  return decoder_lib.build(
    dataclasses.replace(decoder.model, dtype=dtype),
    drafter=NoDrafter(),
    sampling=TextSettings(),
    waiting=progress.waiting,
  )


def place(
  decoder: Decoder, batches: Sequence[Batch], settings: running.DecodeSettings
) -> Placed:
  """Puts weights and prompts on their devices."""
  put = functools.partial(running.place, num_devices=settings.num_devices)
  return Placed(
    decoder=decoder,
    params=put(decoder.params, is_batch=False),
    rng_key=jax.random.key(settings.seed),
    prompts=[put(batch.prompt, is_batch=True) for batch in batches],
    max_len=running.max_length(decoder, batches[0], settings.max_new_tokens),
    num_devices=settings.num_devices,
  )


def configuration(
  flags: Mapping[str, Any], choice: DrafterChoice, decoder: Decoder
) -> dict[str, Any]:
  """Returns the settings of a run for its report: flags by name, the config of
  the drafter, and those of the decoder, whose gamma may be 0."""
  names = (
    *('verification', 'seed', 'batch_size'),
    *('num_devices', 'max_new_tokens', 'repeats'),
    *('dtype', 'weights', 'cache_dtype', *options_of(TextSettings)),
  )
  # `sequence_bias` has tuples as keys, which JSON does not allow.
  as_json = lambda value: str(value) if isinstance(value, dict) else value
  # A rule with options is a partial; its keywords are the options.
  of_rule = getattr(decoder.method.verify_fn, 'keywords', {})
  return {name: as_json(flags[name]) for name in names} | {
    'model': decoder.model.checkpoint,
    'drafter': shown(choice),
    'draft_dtype': flags['draft_dtype'] or flags['dtype'],
    'gamma': decoder.drafter.gamma,
    'exact_bits': decoder.recipe.exact_bits,
    'tree': decoder.drafter.tree and decoder.drafter.tree.parents,
    'drafter_options': {
      name: getattr(choice, name)
      for name in options_of(type(choice))
      if name not in ('gamma', 'tree', 'min_prob')
    },
    'min_prob': getattr(choice, 'min_prob', 0.0) or None,
    'lenience': flags['lenience'] or 1.0,
    **{name: of_rule.get(name) for name in ('beta', 'tau')},
    'device': platforms.device_name(),
    'jax_version': jax.__version__,
  }
