"""Texts that a model writes after prompts, stored by `written_texts`."""

import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.assembly import decode_many, packing, running
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import NoDrafter
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.running import DecodeSettings
from specdec_jax.decoding.program import Program
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.files.one_writer import one_writer
from specdec_jax.files.paths import local_path
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.models import families, taps
from specdec_jax.text import prompts
from specdec_jax.text.prompts import Text
from specdec_jax.text.tasks import Example
from specdec_jax.training import eagle
from specdec_jax.training.data import written_texts

# A row, its output and the streams kept of it, as `decode_many.decode` yields
# them.
Written = tuple[Row, DecodeOutput, Any]
# Prompts of a part are padded to a multiple of so many tokens: each width has
# its own programs, and a prompt is prefilled with its padding.
_WIDTH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writing:
  """The settings of texts to write.

  Texts are written in parts of at most `part_size`; a restart does not repeat
  complete ones. Parts alternate between `temperatures`, which replace the
  temperature of `how`. The inputs of `layers`, if any, are stored; see
  `models.taps`. Samples and the order of prompts follow from the seed.
  """

  prompts: Sequence[Text]
  how: DecodeSettings
  temperatures: Sequence[float] = (0.0,)
  layers: Sequence[int] | None = None
  part_size: int = 128


class _Part(NamedTuple):
  """Prompts of about one length, written at one temperature."""

  width: int
  rows: list[Row]
  temperature: float


def write(
  model: Model,
  writing: Writing,
  folder: str,
  say: Callable[[str], None] = lambda sentence: None,
) -> None:
  """Writes a text after every prompt, on one device; resumes an interrupted
  folder, with the same bytes as an uninterrupted run.

  `say` is called for every part. Raises ValueError if the folder has other
  settings, a prompt is too long, or the model's logits are NaN.
  """
  decoder = decoder_lib.outline(model, drafter=NoDrafter())
  _check(decoder, writing)
  rows = _encode(decoder, writing)
  parts = _parts(rows, writing)
  path = local_path(folder)
  # The settings are valid: read the weights.
  decoder = decoder_lib.load(decoder)
  # Parts of one width and temperature share their programs.
  compiled = functools.cache(functools.partial(_compile, decoder, writing))
  with one_writer(path / '.lock', path):
    written_texts.begin(path, _description(decoder, writing, rows, len(parts)))
    done = set(written_texts.part_indices(path))
    for index in sorted({*range(len(parts))} - done):
      part = parts[index]
      decode = compiled(part.width, part.temperature)
      used = decode_many.Utilisation(num_rows=writing.how.batch_size)
      started = time.perf_counter()
      texts = _join(decoder, writing, part, decode(part.rows, used))
      seconds = time.perf_counter() - started
      written_texts.save_part(path, index, texts)
      say(
        f'part {index + 1} of {len(parts)}: {len(texts)} texts at temperature '
        f'{part.temperature:g}, {texts.num_written:,} tokens written after '
        f'{len(texts.tokens) - texts.num_written:,}, {seconds:.1f} s: '
        f'{texts.num_written / seconds:.1f} tokens/s, rows used '
        f'{used.share:.0%}'
      )
  if len(done) == len(parts):
    say(f'{folder} is complete already')


def _check(decoder: Decoder, writing: Writing) -> None:
  """Raises ValueError for settings with which nothing can be written."""
  running.check_count('part_size', writing.part_size)
  if not writing.temperatures:
    raise ValueError('temperatures is empty')
  if families.has_encoder(decoder.config):
    name = decoder.model.checkpoint
    raise ValueError(f'{name} has an encoder: use specdec data rewrite')
  if writing.layers is not None:
    eagle.check_target(decoder.model.checkpoint, decoder.config)
    taps.check(families.network(decoder.config), writing.layers)


def _encode(decoder: Decoder, writing: Writing) -> list[Row]:
  texts, how = writing.prompts, writing.how
  ids = packing.encoded(decoder, texts, how, [how] * len(texts))
  return [
    Row(index=i, example=Example(inputs=str(text)), ids=tuple(row), num_cut=0)
    for i, (text, row) in enumerate(zip(texts, ids, strict=True))
  ]


def _parts(rows: Sequence[Row], writing: Writing) -> list[_Part]:
  """Groups prompts by width, in an order that a restart repeats."""
  # The first parts are a sample of all: prompts are in random order, and so are
  # parts of all widths.
  generator = np.random.Generator(np.random.Philox(writing.how.seed))
  by_width: dict[int, list[Row]] = {}
  for i in generator.permutation(len(rows)):
    width = -(-len(rows[i].ids) // _WIDTH) * _WIDTH
    by_width.setdefault(width, []).append(rows[i])
  # 300 prompts of one width in parts of 128 are 128, 128 and 44.
  groups = [
    (width, members[first : first + writing.part_size])
    for width, members in sorted(by_width.items())
    for first in range(0, len(members), writing.part_size)
  ]
  order = generator.permutation(len(groups)).tolist()
  in_turn = itertools.cycle(writing.temperatures)
  return [
    _Part(groups[at][0], groups[at][1], temperature)
    for at, temperature in zip(order, in_turn, strict=False)
  ]


def _description(
  decoder: Decoder, writing: Writing, rows: Sequence[Row], num_parts: int
) -> dict[str, Any]:
  """Returns all that the texts depend on, for `written_texts.begin`."""
  config: Any = decoder.config  # Of a Llama, if layers are kept; see `_check`.
  layers = writing.layers
  # As in `examples.digest`.
  contents = [row.example.dialogue or row.ids for row in rows]
  text = repr(contents).encode()
  description = decoder.digests() | {
    'max_new_tokens': writing.how.max_new_tokens,
    'batch_size': writing.how.batch_size,
    'part_size': writing.part_size,
    'seed': writing.how.seed,
    'model': decoder.model.checkpoint,
    'dtype': decoder.model.dtype,
    'vocab_size': config.vocab_size,
    'embed_dim': config.embed_dim,
    'layers': None if layers is None else list(layers),
    'prompts': len(rows),
    'prompts_sha256': hashlib.sha256(text).hexdigest(),
    'temperatures': list(writing.temperatures),
    'parts': num_parts,
  }
  if layers is None:
    return description
  head = eagle.head_of(config, decoder.params.target)
  return description | {eagle.HEAD_DIGEST: eagle.head_digest(head)}


def _compile(
  decoder: Decoder, writing: Writing, width: int, temperature: float
) -> Callable[[Sequence[Row], decode_many.Utilisation], Iterable[Written]]:
  """Compiles the loop for prompts of one width, at one temperature."""
  target, how = decoder.target, writing.how
  if writing.layers is not None:
    network = families.network(decoder.config)
    target = taps.all_positions(network, writing.layers)
  # What the model's generation_config.json states beside the temperature stays.
  sampling = dataclasses.replace(decoder.sampling, temperature=temperature)
  method = dataclasses.replace(
    decoder.method,
    target=target,
    logits_to_probs=sampling.to_probs(decoder.parts.target_info.vocab_size),
  )
  layout = Layout(
    config=decoder.config,
    vocabulary=decoder.vocabulary,
    inputs_length=width,
    targets_length=how.max_new_tokens,
    samplings={'{}': sampling},
  )
  pack = examples.packer(layout)
  # Fewer rows are refilled at once than elsewhere, as prompts are short and
  # lengths of texts vary.
  empty = pack([None] * -(-how.batch_size // 8))
  programs = Program(
    method=method,
    params=decoder.params,
    prompt=empty,
    max_len=prompts.decoder_width(decoder.config, width) + how.max_new_tokens,
  ).refill(how.batch_size)
  decode_many.warm_up(programs, decoder.params, empty)
  keep = lambda state, row: writing.layers and state.target_cache.streams[row]
  return lambda rows, used: decode_many.decode(
    programs,
    decoder.params,
    how.seed,
    rows,
    pack=pack,
    utilisation=used,
    keep=keep,
  )


def _join(
  decoder: Decoder, writing: Writing, part: _Part, written: Iterable[Written]
) -> written_texts.WrittenTexts:
  """Joins a part's texts, in its order; ValueError if logits were NaN."""
  # Rows finish in any order: tokens, log-probabilities and streams by row.
  by_row: dict[int, tuple[np.ndarray, ...]] = {}
  for row, output, row_streams in written:
    if output.has_nan[0]:
      raise ValueError(f'the logits after prompt {row.index + 1} are NaN')
    length = int(output.lengths[0])
    arrays = [
      np.asarray(output.tokens[0, :length]),
      np.asarray(output.log_probs[0, :length]),
    ]
    if writing.layers is not None:
      streams = np.array(row_streams)[0, :length].view(jnp.bfloat16)
      streams[-1] = 0  # The model never reads the last token.
      arrays.append(streams)
    by_row[row.index] = tuple(arrays)
  # From a tuple per text to a list of tokens, one of log-probabilities, and one
  # of streams.
  tokens, log_probs, *streams_of = zip(
    *(by_row[row.index] for row in part.rows), strict=True
  )
  starts = len(families.of(decoder.config).starts)
  return written_texts.join(
    tokens=tokens,
    prompt_lengths=[starts + len(row.ids) for row in part.rows],
    log_probs=log_probs,
    streams=streams_of[0] if streams_of else None,
  )
