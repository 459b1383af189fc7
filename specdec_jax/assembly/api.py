"""Decoding in a few lines of Python: `load`, `generate`, `stream`."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from specdec_jax.assembly import (
  completions,
  lengths,
  log_probs,
  option_fields,
  packing,
  running,
  settled_gamma,
  text_settings,
  usual,
)
from specdec_jax.assembly import decoder as decoder_lib
from specdec_jax.assembly.completions import Completion, Stream
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DRAFTERS, DrafterChoice
from specdec_jax.assembly.lengths import Auto
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.option_fields import chosen, field_names
from specdec_jax.assembly.rules import RULES, Rule
from specdec_jax.assembly.running import DecodeSettings
from specdec_jax.files import text_lines
from specdec_jax.launch import compilation_cache
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models.families import Config
from specdec_jax.sharding import mesh
from specdec_jax.text import chat_templates, prompts
from specdec_jax.text.prompts import Batch, Text
from specdec_jax.text.vocabularies import AnyVocabulary

_log = logging.getLogger('specdec_jax')
# Variables of a chat template, by name.
TemplateKwargs = Mapping[str, Any]


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
  weights: str | None = None,
  cache_dtype: str | None = None,
  sizes: str | None = None,
  vocabulary: str | os.PathLike[str] | None = None,
  exact_bits: bool = False,
  **options: Any,
) -> Decoder:
  """Loads a target, a drafter and a rule.

  Programs that are compiled from now on are kept for later processes; see
  `launch.compilation_cache`.

  Args:
    model: a name such as 'smollm2-135m' or 'ende-mini', a path, or
      'hf:organisation/name'; see `checkpoints.loading.load`.
    drafter: a name of `assembly.drafters.DRAFTERS`, or a choice of that module;
      None for what the `draft_model` is for.
    draft_model: the drafter's weights, named like `model`; None for what comes
      with this package for the model and the drafter, see
      `checkpoints.pretrained.DRAFT_MODELS`. Without either, and without a
      drafter, it is 'prompt_lookup'.
    verification: a name of `assembly.rules.RULES`, or a choice of that module.
    temperature: 0 is greedy.
    top_k: keeps the k likeliest tokens; 0 keeps all.
    top_p: keeps the likeliest with this much mass; 1 keeps all.
    min_p: keeps tokens with at least this share of the likeliest's probability.
    dtype: 'float32' or 'bfloat16', of weights and caches.
    draft_dtype: of the draft model; None for `dtype`.
    weights: 'int8', 'int4' or 'int4:64' keeps the target's matrices as
      integers, with a scale for each output or 64 weights; None for `dtype`.
    cache_dtype: 'int8' keeps the target's keys and values as integers, with a
      scale for each position and head; None for `dtype`.
    sizes: the name or the model.json of a T5X checkpoint's sizes, which it does
      not contain.
    vocabulary: the path of one, if the model's folder has none.
    exact_bits: runs the target at one width, drafts or not, so that greedy text
      is that of plain decoding bit for bit in bfloat16 too, which
      `Decoder.at(0)` gives; see docs/exactness.md. `generate` first tests that
      the compiler keeps to it.
    **options: fields of the drafter and of the rule, such as `gamma`,
      `max_ngram` or `lenience`, and fields of
      `assembly.text_settings.TextSettings`, such as `typical_p` and
      `repetition_penalty`. Without `gamma` it is the one that was measured to
      be fastest on this machine, and if none was measured, plain decoding;
      `Completion.gamma` is what served a text, `Decoder.gammas` has the reason.

  Raises:
    ValueError: if a model cannot be read, the choices do not fit together, or
      there is no device of the kind that `JAX_PLATFORMS` names.
    ImportError: if a package that reads a model is not installed.
  """
  compilation_cache.enable()
  mesh.check_devices(1)
  words = None if vocabulary is None else os.fspath(vocabulary)
  target = Model(
    checkpoint=os.fspath(model),
    sizes=sizes,
    vocabulary=words,
    dtype=dtype,
    weights=weights,
    cache_dtype=cache_dtype,
  )
  draft = None
  if draft_model is None and isinstance(drafter, str | None):
    draft_model, options = usual.shipped(target.checkpoint, options, drafter)
  if draft_model is not None:
    draft = Model(
      checkpoint=os.fspath(draft_model),
      vocabulary=words,
      dtype=draft_dtype or dtype,
    )
  elif draft_dtype is not None:
    raise ValueError('draft_dtype is for a draft_model, which is not given')
  sampling = text_settings.taken(
    options, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
  )
  options = option_fields.plain(options)
  drafter, rule = choices(drafter, draft, verification, options)
  return decoder_lib.build(
    target, drafter=drafter, rule=rule, sampling=sampling, exact_bits=exact_bits
  )


def of_network(
  name: str,
  config: Config,
  vocabulary: AnyVocabulary,
  *,
  drafter: str | DrafterChoice | None,
  draft: Model | None,
  verification: str | Rule,
  options: dict[str, Any],
) -> Decoder:
  """Makes a decoder of a network whose weights are at hand, with their shapes
  in place of them; `name` is what errors call it, all else is as in `load`."""
  options = option_fields.plain(options)
  sampling = text_settings.taken(options)
  choice, rule = choices(drafter, draft, verification, options)
  if isinstance(choice.length, Auto) and choice.length.usual is None:
    # It is measured on files and kept by their digests.
    raise ValueError('gamma auto is for models in files: give a number')
  rule.judge(sampling).sampling.check_is_used()
  return decoder_lib.assembled(
    Model(checkpoint=name, sizes=config),
    config,
    vocabulary,
    drafter=choice,
    rule=rule,
    sampling=sampling,
    length=lengths.usual(choice.length),
  )


def choices(
  drafter: str | DrafterChoice | None,
  draft: Model | None,
  rule: str | Rule,
  options: Mapping[str, object],
) -> tuple[DrafterChoice, Rule]:
  """Makes the choices that `load` is given by name, the draft model as one;
  ValueError for unknown options."""
  # The names of all options, to suggest one for an unknown name.
  option_names: list[str] = []
  drafter = drafter or usual.drafter(draft.checkpoint if draft else None)
  if isinstance(drafter, str):
    drafter = chosen('drafter', DRAFTERS, drafter, {**options, 'model': draft})
    drafter_fields = field_names(drafter)
    option_names += [name for name in drafter_fields if name != 'model']
  elif draft is not None:
    raise ValueError('draft_model is for a drafter that is given by name')
  if isinstance(rule, str):
    rule = chosen('verification', RULES, rule, options)
    option_names += field_names(rule)
  for name in options:
    if name not in option_names:
      hint = did_you_mean(name, (*option_names, *text_settings.NAMES))
      raise ValueError(
        f'no option of this drafter and rule is called {name!r}; they have '
        f'{", ".join(option_names) or "none"}{hint}'
      )
  return drafter, rule


def generate(
  decoder: Decoder,
  texts: Iterable[str | chat_templates.Messages],
  *,
  max_new_tokens: int | Sequence[int] = 128,
  temperature: float | Sequence[float | None] | None = None,
  top_k: int | Sequence[int | None] | None = None,
  top_p: float | Sequence[float | None] | None = None,
  min_p: float | Sequence[float | None] | None = None,
  chat: bool = False,
  system: str | None = None,
  tools: Sequence[Mapping[str, Any]] | None = None,
  chat_template_kwargs: TemplateKwargs
  | Sequence[TemplateKwargs | None]
  | None = None,
  batch_size: int = 1,
  seed: int | Sequence[int] = 0,
  stop: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
  num_devices: int = 1,
  top_logprobs: int | None = None,
  measure_gamma: bool = False,
  **processors: Any,
) -> Iterator[Completion]:
  """Continues texts, each batch in one compiled call.

  Limits, sampling, seeds and stop strings are data: other values compile
  nothing. Each is one value for all texts, or a list of one for each.

  Args:
    decoder: of `load`.
    texts: the prompts; each a string, or a conversation: a list of messages
      such as `{'role': 'user', 'content': ...}`.
    max_new_tokens: per text, at most.
    temperature: as for `load`, and so are `top_k`, `top_p` and `min_p`; None is
      what `load` was told. Above 0 needs a second program if that was 0.
    chat: applies the model's chat template to strings, too.
    system: with `chat`, the message before each prompt.
    tools: with a chat template, functions that may be called, as JSON schemas.
    chat_template_kwargs: with a chat template, further variables of it, such as
      `{'enable_thinking': False}`.
    batch_size: texts decoded at once; programs are for 1, 2, 4, 8, ... rows.
    seed: of all draws; each text has draws of its own. With a list of seeds,
      each text gets the same draws as if it were decoded alone.
    stop: strings that end a text; None for the model's own, which its
      generation_config.json states, and () for none.
    num_devices: devices that share the rows of a batch.
    top_logprobs: how many of the likeliest tokens completions list for each
      position, with log-probabilities before and after processors and limits;
      the target reads each text once more for it.
    measure_gamma: before decoding, if no gamma was given to `load`, decodes the
      first texts (128 rows at most) with several gammas and takes the fastest,
      which later runs remember.
    **processors: further fields of `assembly.text_settings.TextSettings`, such
      as `typical_p` and `repetition_penalty`.

  Returns:
    An iterator over a completion per text, in their order; each batch is
    decoded when the first of its completions is asked for.

  Raises:
    ValueError: if a text is empty or too long, a number is out of range, or,
      from the iterator, if logits were not numbers or `exact_bits` cannot be
      kept.
  """
  if isinstance(texts, str):
    raise ValueError('texts is a string: give a list of them')
  text_settings.check_names(processors)
  inputs = _prompts(texts, tools, chat_template_kwargs, chat=chat)
  mesh.check_devices(num_devices)
  of_all, of_texts = packing.by_text(
    len(inputs),
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    seed=seed,
    stop=stop,
    **processors,
  )
  of_batches = {
    'batch_size': batch_size,
    'num_devices': num_devices,
    'top_logprobs': top_logprobs,
  }
  of_all |= option_fields.plain(of_batches)
  settings = DecodeSettings(
    text=text_settings.taken(of_all),
    texts=of_texts,
    chat=chat,
    system=system,
    **of_all,
  )
  if not inputs:
    return iter(())
  settings = settings.for_rows(len(inputs))
  batches = packing.pack(decoder, inputs, settings)
  if measure_gamma:
    settled_gamma.measured(decoder, batches, settings)
  decoder = settled_gamma.settled(decoder, batches[0], settings, _log.info)
  return _completions(decoder, batches, settings)


def _prompts(
  texts: Iterable[Any],
  tools: Sequence[Mapping[str, Any]] | None,
  template_kwargs: TemplateKwargs | Sequence[TemplateKwargs | None] | None,
  *,
  chat: bool,
) -> list[Text]:
  """Checks texts and makes conversations of lists of messages, and of strings
  that tools or variables of a template go with; ValueError for what cannot be
  decoded."""
  texts = list(texts)
  variables: Sequence[Any] = [template_kwargs] * len(texts)
  if isinstance(template_kwargs, list | tuple):
    variables = template_kwargs
  if len(variables) != len(texts):
    raise ValueError(
      f'{prompts.TEMPLATE_KWARGS} lists {len(variables)} for {len(texts)} '
      'texts: give one value, or one for each'
    )
  inputs: list[Text] = []
  pairs = zip(texts, variables, strict=True)
  for i, (text, text_variables) in enumerate(pairs, start=1):
    if isinstance(text, str):
      if not text.strip():
        raise ValueError(f'text {i} is empty')
      text_lines.check_encodable(text, f'text {i}')
      is_for_template = tools is not None or text_variables is not None
      if is_for_template and chat:
        text = [{'role': 'user', 'content': text}]
      elif is_for_template:
        name = 'tools' if tools is not None else prompts.TEMPLATE_KWARGS
        raise ValueError(f'{name} are for chat, and text {i} is none')
    # A list is a conversation, with or without `chat`.
    elif not isinstance(text, list | tuple):
      raise ValueError(f'text {i} is no string: {text!r}')
    if not isinstance(text, str):
      text = prompts.dialogue(text, tools, f'text {i}', text_variables)
    inputs.append(text)
  return inputs


def _completions(
  decoder: Decoder, batches: Sequence[Batch], settings: DecodeSettings
) -> Iterator[Completion]:
  """Decodes batch after batch, each when its first row is asked for."""
  decode = running.compile_decode(decoder, batches[0], settings)
  for batch in batches:
    output = jax.device_get(decode(batch, ()))
    scored = log_probs.of_batch(decoder, batch, output, settings)
    for row in range(len(batch.texts)):
      if error := completions.error_of_row(batch, output, row):
        raise ValueError(error)
      yield completions.of_row(decoder, batch, output, row, scored)


def stream(
  decoder: Decoder,
  text: str | chat_templates.Messages,
  *,
  max_new_tokens: int = 128,
  chat: bool = False,
  system: str | None = None,
  tools: Sequence[Mapping[str, Any]] | None = None,
  chat_template_kwargs: TemplateKwargs | None = None,
  seed: int = 0,
  stop: Sequence[str] | None = None,
  **options: Any,
) -> Stream:
  """Continues one text, piece by piece: an iteration of the loop at a time.

  Arguments and errors are those of `generate`, without `batch_size`,
  `num_devices` and `top_logprobs`; `temperature` and the limits are among the
  `options`. Text that may be the beginning of a stop string is held back until
  it is clear that it is not.

  Returns:
    A stream that yields the pieces; then its `completion` has all of it.
  """
  text_settings.check_names(options)
  inputs = _prompts([text], tools, chat_template_kwargs, chat=chat)
  of_all, of_texts = packing.by_text(
    1, max_new_tokens=max_new_tokens, seed=seed, stop=stop, **options
  )
  settings = DecodeSettings(
    text=text_settings.taken(of_all),
    texts=of_texts,
    chat=chat,
    system=system,
    **of_all,
  )
  [batch] = packing.pack(decoder, inputs, settings)
  decoder = settled_gamma.settled(decoder, batch, settings, _log.info)
  params, (prefill, *loop) = running.compiled(
    decoder, batch, settings, running.parts
  )
  state = prefill(params, *running.placed(batch, settings))
  iterations = running.iterations(decoder, params, loop, state, batch)
  return Stream(completions.pieces(decoder, batch, iterations))
