"""Continues prompts, streams text to a terminal, and writes the results."""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from specdec_jax.assembly import (
  completions,
  log_probs,
  recording,
  running,
  settled_gamma,
)
from specdec_jax.assembly import trace_files as storage
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.drafters import DrafterChoice, shown
from specdec_jax.assembly.recording import Record
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.cli import live_text as terminal
from specdec_jax.cli.outputs import finite
from specdec_jax.decoding import rates as metrics
from specdec_jax.decoding.state import DecodeOutput
from specdec_jax.decoding.statistics import Statistics
from specdec_jax.launch import progress
from specdec_jax.launch.visible_text import visible
from specdec_jax.text.prompts import Batch

# Flags in the header of a trace.
_SETTINGS = ('verification', 'temperature', 'top_k', 'top_p', 'seed', 'dtype')
_IF_GIVEN = ('min_p', 'typical_p', 'min_prob', 'stop')

Write = Callable[[Record], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  sampling = options.add_sampling(parser)
  options.add_shared(sampling, 'exact_bits')
  sampling.add_argument(
    '--num_return_sequences',
    metavar='N',
    type=options.positive_int,
    default=1,
    help='samples of each prompt',
  )
  sampling.add_argument(
    '--top_logprobs',
    metavar='N',
    type=int,
    help='with --json: log-probabilities of the N likeliest tokens at each '
    'position, before and after the logits are processed',
  )
  options.add_shared(options.add_prompts(parser), 'stop')
  options.add_shared(parser, 'forget', 'measure_gamma')
  add = options.add_output(parser).add_argument
  add(
    '--json',
    metavar='OUT',
    help='write JSONL, an object per text: prompt, text, tokens, log_probs, '
    "statistics and more, with the line's id and task; an existing file is "
    'replaced at the end; - writes to standard output, instead of the text',
  )
  add('--trace', metavar='OUT.jsonl', help='write every iteration, for `trace`')


def run(args: argparse.Namespace) -> int:
  choices = from_flags.choices(args, may_be_auto=True)
  if args.top_logprobs and not args.json:
    raise ValueError('--top_logprobs needs --json, which they are written to')
  if args.trace == outputs.STANDARD_OUTPUT:
    raise ValueError('--trace needs a file; --json can go to standard output')
  prepared = from_flags.prepared(
    args, choices, trace=args.trace, num_samples=args.num_return_sequences
  )
  decoder, batches, settings, _ = prepared
  if args.measure_gamma:
    settled_gamma.measured(decoder, batches, settings)
  decoder = settled_gamma.settled(decoder, batches[0], settings, outputs.tell)
  prepared = prepared._replace(decoder=decoder)
  with (
    outputs.json_lines(args.json) as write_json,
    _trace_writer(args, choices.drafter, decoder) as write_trace,
  ):
    return _decode(args, prepared, write_json, write_trace)


@contextlib.contextmanager
def _trace_writer(
  args: argparse.Namespace, choice: DrafterChoice, decoder: Decoder
) -> Iterator[Write | None]:
  """Opens --trace, if given; a run that ends without an error adds totals."""
  if not args.trace:
    yield None
    return
  iterations: list[Record] = []
  with outputs.opened(args.trace) as file:
    flags = vars(args)
    header = recording.header(
      target=decoder.model.checkpoint,
      drafter=shown(choice),
      gamma=decoder.method.depth,
      lenience=args.lenience or 1.0,
      **{name: flags[name] for name in _SETTINGS},
      **{name: flags[name] for name in _IF_GIVEN if flags[name]},
    )
    storage.write_record(file, header)

    def write(record: Record) -> None:
      storage.write_record(file, record)
      if record['type'] == 'iteration':
        iterations.append(record)

    # Totals of what was written; an interrupted trace has none.
    yield write
    summary = recording.summarize(iterations, decoder.method.depth)
    storage.write_record(file, recording.summary_record(summary))


def _decode(
  args: argparse.Namespace,
  prepared: from_flags.Prepared,
  write_json: Write,
  write_trace: Write | None,
) -> int:
  decoder, batches, settings, labels = prepared
  screen = progress.console(color=args.color)
  shows_text = args.json != outputs.STANDARD_OUTPUT
  is_colored = shows_text and screen.is_terminal
  num_prompts = sum(len(batch.texts) for batch in batches)
  # Rows of a larger batch would interleave: they are shown after the batch.
  is_live = is_colored and len(batches) == num_prompts
  with progress.waiting('compiling'):
    decode = running.compile_decode(decoder, batches[0], settings)
  # `stream()` makes a function that shows the iterations of one row in colour,
  # without special tokens.
  hidden = decoder.vocabulary.special_ids
  stream = functools.partial(terminal.streamer, screen, hidden_ids=hidden)
  has_failed, statistics, started = False, [], time.perf_counter()
  reasons: list[str] = []
  before: str | None = None
  with progress.bar('decoding', num_prompts, is_shown=not is_live) as bar:
    for batch in batches:
      records: list[Record] = []
      shows: list[Write] = []
      if write_trace:
        # Rows that only fill up the last batch have no records.
        for record in recording.prompt_records(batch.prompt, batch.texts):
          write_trace(record)
        shows.append(write_trace)
      if is_live:
        if num_prompts > 1:
          _show_prompt(screen, batch.texts[0])
        shows.append(stream())
      elif is_colored:
        shows.append(records.append)
      # Decode; a line that was begun is ended before an error is printed.
      try:
        output = jax.device_get(decode(batch, shows))
      finally:
        if is_live:
          screen.print()
      # Print and write the results.
      statistics.append(output.statistics)
      bar.advance(len(batch.texts))
      with bar.hidden():
        if is_colored and not is_live:
          _show_rows(screen, batch, records, stream)
        scored = log_probs.of_batch(decoder, batch, output, settings)
        for index, result in _results(args, decoder, batch, output, scored):
          write_json(labels[index] | result)
          reasons.append(result['finish_reason'])
          if shows_text and not is_colored:
            _show_text(result['text'], before)
            before = result['text']
          if error := result.get('error'):
            has_failed = True
            progress.say(f'error: {error}')
  if progress.is_watched():
    seconds = time.perf_counter() - started
    print(_note(statistics, reasons, seconds), file=sys.stderr)
  return 2 if has_failed else 0


def _show_text(text: str, before: str | None) -> None:
  """Prints a text to a file or a pipe, with an empty line between it and the
  text before if either has several lines."""
  if before is not None and '\n' in before + text:
    progress.show()
  progress.show(text)


def _show_rows(
  screen: Any, batch: Batch, records: list[Record], stream: Callable[[], Write]
) -> None:
  row_ids = batch.prompt.row_ids.tolist()
  # Records of two rows come as 0 1 0 1 0, by iteration; they are shown row by
  # row.
  for row_id, prompt in zip(row_ids, batch.texts, strict=False):
    _show_prompt(screen, prompt)
    show = stream()
    for record in records:
      if record['row'] == row_id:
        show(record)
    screen.print()


def _show_prompt(screen: Any, prompt: str) -> None:
  from rich.text import Text

  text = Text(f'> {visible(prompt)}', style='dim')
  screen.print(text, overflow='ellipsis', no_wrap=True)


def _results(
  args: argparse.Namespace,
  decoder: Decoder,
  batch: Batch,
  output: DecodeOutput,
  scored: tuple[log_probs.Scored, log_probs.Scored] | None,
) -> Iterator[tuple[int, Record]]:
  """Yields the index of a prompt and the JSON object of one of its texts."""
  # Row ids count samples: of 2 samples each, row 5 is sample 1 of prompt 2.
  num_samples = args.num_return_sequences
  for row in range(len(batch.texts)):
    completion = completions.of_row(decoder, batch, output, row, scored)
    index, sample = divmod(int(batch.prompt.row_ids[row]), num_samples)
    error = completions.error_of_row(batch, output, row, num_samples)
    tops = {
      'processed_log_probs': [
        *map(finite, completion.processed_log_probs or ())
      ],
      'top_log_probs': completion.top_log_probs,
      'top_processed_log_probs': completion.top_processed_log_probs,
    }
    yield (
      index,
      {
        'prompt': completion.prompt,
        **({'sample': sample} if num_samples > 1 else {}),
        'text': completion.text,
        **({'stop': completion.stop} if batch.stops[row] else {}),
        'finish_reason': completion.finish_reason,
        'gamma': completion.gamma,
        'tokens': completion.tokens,
        'log_probs': [*map(finite, completion.log_probs)],
        **(tops if args.top_logprobs else {}),
        'statistics': completion.statistics,
        **({'error': error} if error else {}),
      },
    )


def _note(
  statistics: Sequence[Statistics], reasons: Sequence[str], seconds: float
) -> str:
  total = metrics.joined(statistics)
  rates, num_tokens = metrics.rates(total), int(total.num_tokens.sum())
  num_runs = int(total.num_target_runs.sum())
  parts = [f'{num_tokens} tokens in {num_runs} target runs']
  if num_runs:
    parts.append(f'{rates.block_efficiency:.2f} per run')
  if rates.alpha is not None:
    parts.append(f'alpha {rates.alpha:.2f}')
  parts.append(f'{num_tokens / seconds:.1f} tokens/s')
  return f'{", ".join(parts)}; {outputs.ending(reasons)}'
