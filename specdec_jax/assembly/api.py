"""Decoding in a few lines of Python: `load`, `generate`, `stream`."""

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.assembly import auto_gamma, running
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS, DrafterChoice
from specdec_jax.assembly.drafters.choice import has_model
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import by_name, field_names
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.assembly.running import Settings
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.files import text_lines
from specdec_jax.measure import metrics
from specdec_jax.sharding import mesh
from specdec_jax.text import prompts, stop_strings, vocabularies
from specdec_jax.text.prompts import Batch, Conversation, Text
from specdec_jax.text.vocabularies import Messages, TextStream
from specdec_jax.trace import recording


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What was decoded for one prompt; `print` shows its text.

  Attributes:
    text: the continuation, without what ended it.
    tokens: its ids, EOS included.
    log_probs: the model's own log-probabilities of them.
    stop: the string that ended it, or None.
    statistics: by name: tokens, target runs, tokens per target run, drafted
      and accepted tokens, the acceptance rate; see `measure.metrics`.
  """

  prompt: str
  text: str
  tokens: tuple[int, ...]
  log_probs: tuple[float, ...]
  stop: str | None
  statistics: Mapping[str, Any]

  def __str__(self) -> str:
    return self.text


def load(
  model: str | os.PathLike[str],
  *,
  drafter: str | DrafterChoice | None = None,
  draft_model: str | os.PathLike[str] | None = None,
  verification: str | Rule = 'speculative_sampling',
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  min_p: float | None = None,
  dtype: str = 'float32',
  draft_dtype: str | None = None,
  sizes: str | None = None,
  vocabulary: str | os.PathLike[str] | None = None,
  **options: Any,
) -> Decoder:
  """Loads a target, a drafter and a rule.

  Args:
    model: a name such as 'smollm2-135m' or 'ende-mini', a path, or
      'hf:organisation/name'; see `checkpoints.loading.load`.
    drafter: a name of `assembly.drafters.DRAFTERS`, or a choice of that module;
      None for 'model' if there is a `draft_model`, else 'prompt_lookup'.
    draft_model: the drafter's weights, named like `model`.
    verification: a name of `assembly.rules.RULES`, or a choice of that module.
    temperature: 0 is greedy.
    top_k: keeps the k likeliest tokens.
    top_p: keeps the likeliest with this much mass.
    min_p: keeps tokens with at least this share of the likeliest's probability.
    dtype: 'float32' or 'bfloat16', of weights and caches.
    draft_dtype: of the draft model; None for `dtype`.
    sizes: of a T5X checkpoint, which does not state them.
    vocabulary: the path of one, where none lies beside the model.
    **options: fields of the drafter and of the rule, such as `gamma`,
      `max_ngram` or `lenience`. With gamma='auto' the first texts of `generate`
      choose it, and `Decoder.gammas` tells why.

  Raises:
    ValueError: if a model cannot be had, or the choices do not fit together.
    ImportError: if a package that reads a model is not installed.
  """
  drafter = drafter or ('model' if draft_model else 'prompt_lookup')
  kinds, own = [], {}
  words = None if vocabulary is None else os.fspath(vocabulary)
  if isinstance(drafter, str):
    kinds.append(by_name('drafter', DRAFTERS, drafter))
    if has_model(kinds[0]) != (draft_model is not None):
      needed = 'needs a' if draft_model is None else 'takes no'
      raise ValueError(f'the drafter {drafter!r} {needed} draft_model')
  elif draft_model is not None:
    raise ValueError(
      'draft_model is for a drafter by name: this one has its own'
    )
  if isinstance(verification, str):
    kinds.append(by_name('verification', RULES, verification))
  _check_options(kinds, options)
  if draft_model is not None:
    own['model'] = Model(
      checkpoint=os.fspath(draft_model),
      vocabulary=words,
      dtype=draft_dtype or dtype,
    )
  elif draft_dtype is not None:
    raise ValueError('draft_dtype is for a draft_model, which is not given')
  return decoder_lib.build(
    Model(
      checkpoint=os.fspath(model), sizes=sizes, vocabulary=words, dtype=dtype
    ),
    drafter=_made(DRAFTERS, drafter, options, **own),
    rule=_made(RULES, verification, options),
    sampling=Sampling(
      temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    ),
  )


def _made(
  known: Mapping[str, type], choice: Any, options: Mapping[str, Any], **own: Any
) -> Any:
  """A choice by name, with those of the options that it has."""
  if not isinstance(choice, str):
    return choice
  names = options.keys() & field_names(known[choice])
  return known[choice](**{name: options[name] for name in names}, **own)


def generate(
  decoder: Decoder,
  texts: Iterable[str | Messages],
  *,
  max_new_tokens: int = 128,
  chat: bool = False,
  system: str | None = None,
  tools: Sequence[Mapping[str, Any]] | None = None,
  batch_size: int = 1,
  seed: int = 0,
  stop: Sequence[str] = (),
  num_devices: int = 1,
) -> Iterator[Completion]:
  """Continues texts, each batch in one compiled call.

  Args:
    decoder: of `load`.
    texts: the prompts; each a string, or a conversation: a list of messages
      such as `{'role': 'user', 'content': ...}`.
    max_new_tokens: per text, at most.
    chat: applies the model's chat template to strings, too.
    system: with `chat`, the message before each prompt.
    tools: with a chat template, functions that may be called, as JSON schemas.
    batch_size: texts decoded at once.
    seed: of all draws; each text has draws of its own.
    stop: strings that end a text.
    num_devices: devices that share the rows of a batch.

  Returns:
    An iterator over a completion per text, in their order; each batch is
    decoded when the first of its completions is asked for.

  Raises:
    ValueError: if a text is empty or too long, a number is out of range, or,
      from the iterator, if logits were not numbers.
  """
  if isinstance(texts, str):
    raise ValueError('texts is a string: give a list of them')
  texts = _with_tools(list(texts), tools, chat)
  settings = Settings(
    max_new_tokens=max_new_tokens,
    seed=seed,
    stop=stop if isinstance(stop, str) else tuple(stop),
    num_devices=num_devices,
  )
  running.check_count('batch_size', batch_size)
  mesh.check_devices(num_devices)
  if batch_size % num_devices:
    raise ValueError(
      f'a batch of {batch_size} rows does not divide over {num_devices} devices'
    )
  # No more rows than there are texts, but the same number for every device.
  batch_size = min(batch_size, len(texts) + -len(texts) % num_devices)
  if settings.stop:
    decoder = auto_gamma.settled(decoder, batch_size, num_devices)
  batches = _batches(
    decoder, texts, settings, batch_size=batch_size, chat=chat, system=system
  )
  return _completions(decoder, batches, settings)


def _with_tools(texts: Sequence[Any], tools: Any, chat: bool) -> list[Any]:
  """Lists of messages as conversations, and texts that tools go with."""
  found = []
  for i, text in enumerate(texts, start=1):
    if chat and tools is not None and isinstance(text, str):
      text = [{'role': 'user', 'content': text}]
    if isinstance(text, list | tuple):
      text = prompts.conversation(text, tools, f'text {i}')
    elif tools is not None:
      raise ValueError(f'tools are for chat, and text {i} is none')
    found.append(text)
  return found


def _batches(
  decoder: Decoder,
  texts: Sequence[Text],
  settings: Settings,
  *,
  batch_size: int,
  chat: bool,
  system: str | None,
) -> list[Batch]:
  """Texts as batches; raises ValueError for what cannot be decoded."""
  if system is not None and not chat:
    raise ValueError('system is for chat, which is False')
  for i, text in enumerate(texts, start=1):
    if isinstance(text, Conversation):
      continue
    if not isinstance(text, str):
      raise ValueError(f'text {i} is no string: {text!r}')
    if not text.strip():
      raise ValueError(f'text {i} is empty')
    text_lines.check_encodable(text, f'text {i}')
  stop_strings.check_vocabulary(settings.stop, decoder.vocabulary)
  if not texts:
    return []
  return running.pack(
    decoder,
    texts,
    max_new_tokens=settings.max_new_tokens,
    batch_size=batch_size,
    is_chat=chat,
    system=system,
  )


def _completions(
  decoder: Decoder, batches: Sequence[Batch], settings: Settings
) -> Iterator[Completion]:
  """Decodes batch after batch."""
  if not batches:
    return
  outputs: Iterable[DecodeOutput]
  if decoder.is_auto:
    outputs = auto_gamma.outputs(decoder, batches, settings)
  else:
    compile_decode = running.compile_whole
    if settings.stop:
      compile_decode = running.compile_stepwise
    decode = compile_decode(decoder, batches[0], settings)
    outputs = (decode(batch, ()) for batch in batches)
  for batch, output in zip(batches, map(jax.device_get, outputs), strict=True):
    for row in range(len(batch.texts)):
      yield _completion(decoder, batch, output, row, settings.stop)


class Stream:
  """The text of one prompt as it is decoded: iterate over it. `completion` is
  all of it, once the iteration has ended; until then None."""

  def __init__(self, pieces: Callable[['Stream'], Iterator[str]]):
    self.completion: Completion | None = None
    self._pieces = pieces(self)

  def __iter__(self) -> Iterator[str]:
    return self._pieces


def stream(
  decoder: Decoder,
  text: str,
  *,
  max_new_tokens: int = 128,
  chat: bool = False,
  system: str | None = None,
  seed: int = 0,
  stop: Sequence[str] = (),
) -> Stream:
  """Continues one text, piece by piece: an iteration of the loop at a time.

  Arguments and errors are those of `generate`; what could be the beginning of a
  stop string is held back until it is not.

  Returns:
    What gives the pieces, and after the last of them `completion`.
  """
  settings = Settings(
    max_new_tokens=max_new_tokens,
    seed=seed,
    stop=stop if isinstance(stop, str) else tuple(stop),
  )
  decoder = auto_gamma.settled(decoder, 1)
  [batch] = _batches(
    decoder, [text], settings, batch_size=1, chat=chat, system=system
  )
  iterate = running.compile_iterations(decoder, batch, settings)
  vocabulary = decoder.vocabulary

  def pieces(told: Stream) -> Iterator[str]:
    iterations, read = iterate(batch), TextStream()
    shown = found = ''
    while told.completion is None:
      try:
        tokens = [
          token['token']
          for record in next(iterations)
          for token in recording.committed(record)
        ]
      except StopIteration as end:
        output = jax.device_get(end.value)
        told.completion = _completion(decoder, batch, output, 0, settings.stop)
        found, safe = told.completion.text, len(told.completion.text)
      else:
        ids = [i for i in tokens if i not in vocabulary.eos_ids]
        piece, read = vocabularies.stream_text(vocabulary, read, ids)
        found += piece
        safe = len(found) - _longest_beginning(found, settings.stop)
      if safe > len(shown):
        piece, shown = found[len(shown) : safe], found[:safe]
        yield piece

  return Stream(pieces)


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
  """How many characters at the end of a text may begin a stop string, or
  belong to one that is complete."""
  lengths = [0]
  for stop in stops:
    if stop in text:
      lengths.append(len(text) - text.find(stop))
    lengths += [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
  return max(lengths)


def _check_options(kinds: Sequence[type], options: Mapping[str, Any]) -> None:
  """Raises ValueError for options that neither drafter nor rule has."""
  known = [name for kind in kinds for name in field_names(kind)]
  known = [name for name in known if name != 'model']
  for name in options:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f', did you mean {near[0]!r}' if near else ''
      shown = ', '.join(known) or 'none'
      raise ValueError(
        f'no option of this drafter and rule is called {name!r}{hint}; they '
        f'have {shown}'
      )


def _completion(
  decoder: Decoder,
  batch: Batch,
  output: DecodeOutput,
  row: int,
  stop: Sequence[str],
) -> Completion:
  """What became of a row of a batch; ValueError if logits were not numbers."""
  start = int(batch.prompt.decoder_lengths[row])
  span = slice(start, int(output.lengths[row]))
  tokens = output.tokens[row, span].tolist()
  if output.has_nan[row]:
    raise ValueError(
      f'text {int(batch.prompt.row_ids[row]) + 1}: after {len(tokens)} new '
      'tokens the logits were not numbers (NaN), and its decoding stopped'
    )
  text, found = stop_strings.text_of(decoder.vocabulary, stop, tokens)
  return Completion(
    prompt=batch.texts[row],
    text=text,
    tokens=tuple(tokens),
    log_probs=tuple(output.log_probs[row, span].tolist()),
    stop=found,
    statistics=metrics.row_summary(output.statistics, row),
  )
