"""Continues prompts, streaming to a terminal, and writes what was decoded."""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.base import Draft, Drafter
from specdec_jax.cli import decoder as decoder_lib
from specdec_jax.cli import options, progress, prompts
from specdec_jax.cli.decoder import Decoder
from specdec_jax.cli.prompts import Batch
from specdec_jax.decoding import speculative
from specdec_jax.decoding.state import DecodeOutput, DecodeState
from specdec_jax.evaluation import metrics, trace, trace_file, trace_terminal

HELP = 'continue prompts'


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_sampling(parser)
  options.add_prompts(parser)
  parser.add_argument(
    '--json',
    metavar='OUT',
    help='write one object a prompt and line: prompt, text, tokens, log_probs, '
    'statistics; - writes to standard output',
  )
  parser.add_argument(
    '--trace', metavar='OUT.jsonl', help='write every iteration, for `trace`'
  )
  options.add_color(parser)


def run(args: argparse.Namespace) -> int:
  options.check(args)
  texts = prompts.read(args.prompt, args.prompts)
  decoder_lib.enable_compilation_cache()
  decoder = decoder_lib.load_decoder(args)
  if decoder.drafter is None:
    decoder = dataclasses.replace(decoder, drafter=_no_drafter())
  rows = prompts.encode(decoder.vocabulary, texts, is_chat=args.chat)
  decoder_lib.check_lengths(decoder, rows, args.max_new_tokens)
  batches = prompts.batches(
    texts,
    rows,
    batch_size=args.batch_size,
    max_new_tokens=args.max_new_tokens,
  )
  with contextlib.ExitStack() as stack:
    write_json = stack.enter_context(_json_writer(args.json))
    write_trace = None
    written: list[dict[str, Any]] = []
    if args.trace:
      write_line = stack.enter_context(trace_file.writer(args.trace))
      write_line(_header(args, decoder))

      def write_trace(record: dict[str, Any]) -> None:
        write_line(record)
        written.append(record)

    status = _decode_all(args, decoder, batches, write_json, write_trace)
    if args.trace:
      iterations = [r for r in written if r['type'] == 'iteration']
      write_line(trace.summary_record(trace.summarize(iterations, args.gamma)))
    return status


def _decode_all(
  args: argparse.Namespace,
  decoder: Decoder,
  batches: list[Batch],
  write_json: Callable[[dict], None] | None,
  write_trace: Callable[[dict], None] | None,
) -> int:
  """Decodes batch after batch; the exit status."""
  screen = progress.console(is_stderr=False, color=args.color)
  shows_text = args.json != '-'
  is_stepwise = write_trace is not None or (shows_text and screen.is_terminal)
  decode = (_stepwise if is_stepwise else _whole)(args, decoder, batches[0])
  has_failed = False
  num_rows = sum(len(batch.texts) for batch in batches)
  show_bar = progress.bar('decoding', num_rows) if not is_stepwise else None
  with show_bar or contextlib.nullcontext() as advance:
    for batch in batches:
      started = time.perf_counter()
      output = decode(batch, screen if shows_text else None, write_trace)
      output = jax.device_get(output)
      seconds = time.perf_counter() - started
      for record in _records(decoder, batch, output):
        if write_json is not None:
          write_json(record)
        if shows_text and not is_stepwise:
          print(record['text'], flush=True)
        has_failed |= 'error' in record
        if 'error' in record:
          print(f'specdec: error: {record["error"]}', file=sys.stderr)
      if advance is not None:
        advance(len(batch.texts), _note(output, seconds))
      elif progress.console().is_terminal:
        print(_note(output, seconds), file=sys.stderr)
  return 2 if has_failed else 0


def _whole(
  args: argparse.Namespace, decoder: Decoder, first: Batch
) -> Callable[..., DecodeOutput]:
  """Decodes a batch by one compiled program, without a word until its end."""
  key = jax.random.key(args.seed)
  params = decoder_lib.place(decoder.params, args.num_devices, is_batch=False)
  max_len = _max_len(args, decoder, first)
  generate = functools.partial(
    speculative.generate,
    **_models(decoder),
    **_rule(decoder),
    max_len=max_len,
  )
  place = functools.partial(
    decoder_lib.place, num_devices=args.num_devices, is_batch=True
  )
  with progress.waiting('compiling'):
    lowered = jax.jit(generate).lower(params, key, place(first.prompt))
    compiled = lowered.compile()

  def decode(batch: Batch, screen: Any, write_trace: Any) -> DecodeOutput:
    del screen, write_trace
    return compiled(params, key, place(batch.prompt))

  return decode


def _stepwise(
  args: argparse.Namespace, decoder: Decoder, first: Batch
) -> Callable[..., DecodeOutput]:
  """Decodes a batch iteration by iteration, to show and record each one."""
  key = jax.random.key(args.seed)
  params = decoder_lib.place(decoder.params, args.num_devices, is_batch=False)
  place = functools.partial(
    decoder_lib.place, num_devices=args.num_devices, is_batch=True
  )
  init = functools.partial(
    speculative.init, **_models(decoder), max_len=_max_len(args, decoder, first)
  )

  def step(params: Any, state: DecodeState) -> tuple[DecodeState, Any]:
    state, info = speculative.step(
      params, state, **_models(decoder), **_rule(decoder)
    )
    return state, trace.gather(info)

  with progress.waiting('compiling'):
    lowered = jax.jit(init).lower(params, key, place(first.prompt))
    prefill = lowered.compile()
    state = prefill(params, key, place(first.prompt))
    advance = jax.jit(step, donate_argnums=1).lower(params, state).compile()

  def decode(batch: Batch, screen: Any, write_trace: Any) -> DecodeOutput:
    state = prefill(params, key, place(batch.prompt))
    pieces = decoder.vocabulary.pieces
    traced = trace.init(batch.prompt)
    sinks = _sinks(decoder, batch, screen, write_trace)
    while not np.all(state.done):
      state, info = advance(params, state)
      records, traced = trace.iteration_records(info, traced, pieces)
      for record in records:
        for sink in sinks:
          sink(record)
    if screen is not None:
      _show_the_rest(decoder, batch, state, screen)
    return speculative.output(state)

  return decode


def _sinks(
  decoder: Decoder, batch: Batch, screen: Any, write_trace: Any
) -> list[Callable[[dict], None]]:
  """Where the records of a batch go. Only a lone row is streamed: rows of a
  larger batch would interleave."""
  sinks = []
  if write_trace is not None:
    for record in trace.prompt_records(
      batch.prompt, decoder.vocabulary.pieces, _padded(batch)
    ):
      if record['row'] - int(batch.prompt.row_ids[0]) < len(batch.texts):
        write_trace(record)
    sinks.append(write_trace)
  if screen is not None and len(batch.prompt.row_ids) == 1:
    if not screen.is_terminal:
      return sinks
    sinks.append(
      trace_terminal.streamer(screen, hidden_ids=set(decoder.eos_id))
    )
  return sinks


def _show_the_rest(
  decoder: Decoder, batch: Batch, state: DecodeState, screen: Any
) -> None:
  """What streaming did not print: a line's end, or the rows of a batch."""
  if len(batch.prompt.row_ids) == 1 and screen.is_terminal:
    screen.print()
    return
  output = jax.device_get(speculative.output(state))
  for record in _records(decoder, batch, output):
    print(record['text'], flush=True)


def _records(
  decoder: Decoder, batch: Batch, output: DecodeOutput
) -> Iterator[dict[str, Any]]:
  """What `--json` writes for each row of a batch."""
  for row, text in enumerate(batch.texts):
    start = int(batch.prompt.decoder_lengths[row])
    span = slice(start, int(output.lengths[row]))
    tokens = output.tokens[row, span].tolist()
    record = {
      'prompt': text,
      'text': decoder.vocabulary.decode(tokens),
      'tokens': tokens,
      'log_probs': output.log_probs[row, span].tolist(),
      'statistics': metrics.row_summary(output.statistics, row),
    }
    if output.has_nan[row]:
      record['error'] = (
        f'row {int(batch.prompt.row_ids[row])}: after {len(tokens)} new tokens '
        'the logits were not numbers (NaN); decoding of the row stopped there'
      )
    yield record


def _note(output: DecodeOutput, seconds: float) -> str:
  """A batch in one line."""
  rates = metrics.rates(output.statistics)
  num_tokens = int(output.statistics.num_tokens.sum())
  num_runs = int(output.statistics.num_target_runs.sum())
  return (
    f'{num_tokens} tokens in {num_runs} target runs '
    f'({rates.block_efficiency:.2f} a run), alpha {rates.alpha:.2f}, '
    f'{num_tokens / seconds:.1f} tokens/s'
  )


@contextlib.contextmanager
def _json_writer(path: str | None) -> Iterator[Callable | None]:
  """Writes objects as lines, each flushed, so that an interrupt keeps them."""
  if path is None:
    yield None
    return
  with contextlib.ExitStack() as stack:
    file = sys.stdout
    if path != '-':
      file = stack.enter_context(open(path, 'w', encoding='utf-8'))

    def write(record: dict[str, Any]) -> None:
      file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + '\n')
      file.flush()

    yield write


def _header(args: argparse.Namespace, decoder: Decoder) -> dict[str, Any]:
  return trace.header(
    target=args.model,
    drafter=args.draft_model or args.drafter,
    verification=args.verification,
    gamma=decoder.drafter.gamma if decoder.drafter else 0,
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    lenience=args.lenience,
    seed=args.seed,
    dtype=args.dtype,
  )


def _padded(batch: Batch) -> list[str]:
  """A text for every row, fillers included."""
  num_missing = len(batch.prompt.row_ids) - len(batch.texts)
  return [*batch.texts, *[''] * num_missing]


def _no_drafter() -> Drafter:
  """Gamma 0: plain decoding through the same loop."""

  def propose(params: Any, row_keys: Any, context: Any, state: Any):
    del params, row_keys
    num_rows = context.lengths.shape[0]
    draft = Draft(
      tokens=jnp.zeros((num_rows, 0), jnp.int32),
      probs=None,
      lengths=jnp.zeros(num_rows, jnp.int32),
    )
    return draft, state

  return Drafter(0, lambda params, prompt, max_len: (), propose)


def _models(decoder: Decoder) -> dict[str, Any]:
  return {'target': decoder.target, 'drafter': decoder.drafter}


def _rule(decoder: Decoder) -> dict[str, Any]:
  return {
    'verify_fn': decoder.verify_fn,
    'logits_to_probs': decoder.logits_to_probs,
    'eos_id': decoder.eos_id,
  }


def _max_len(args: argparse.Namespace, decoder: Decoder, batch: Batch) -> int:
  width = batch.prompt.decoder_tokens.shape[1]
  return decoder_lib.max_length(decoder, width, args.max_new_tokens)
