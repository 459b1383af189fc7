"""Decoding iteration by iteration, to stream it and to record it."""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax.cli import decoder as decoder_lib
from specdec_jax.cli.decoder import Decoder
from specdec_jax.decoding import speculative
from specdec_jax.decoding.state import DecodeOutput, DecodeState
from specdec_jax.launch import progress
from specdec_jax.text import stop_strings
from specdec_jax.text.prompts import Batch
from specdec_jax.trace import recording, terminal, wording
from specdec_jax.trace.recording import Record

Show = Callable[[Record], None]


def compile_decode(
  args: argparse.Namespace, decoder: Decoder, first: Batch
) -> Callable[[Batch, Sequence[Show]], DecodeOutput]:
  """Compiles prefill and one iteration for batches of the shape of `first`.

  Returns:
    A function that decodes a batch and hands every iteration record, as soon as
    there is one, to each of the functions given.
  """
  key = jax.random.key(args.seed)
  params = decoder_lib.place(decoder.params, args.num_devices, is_batch=False)
  place = functools.partial(
    decoder_lib.place, num_devices=args.num_devices, is_batch=True
  )
  max_len = decoder_lib.max_length(first, args.max_new_tokens)
  init = functools.partial(
    speculative.init, **decoder_lib.models(decoder), max_len=max_len
  )

  def step(params: Any, state: DecodeState) -> tuple[DecodeState, Any]:
    state, info = speculative.step(
      params,
      state,
      **decoder_lib.models(decoder),
      **decoder_lib.rule(decoder),
    )
    return state, recording.gather(info)

  # Left to itself, the compiler may return a state that it would not take.
  rows = decoder_lib.sharding(args.num_devices, is_batch=True)

  def compile_both() -> tuple[Any, Any]:
    lowered = jax.jit(init, out_shardings=rows).lower(
      params, key, place(first.prompt)
    )
    state = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows),
      lowered.out_info,
    )
    step_jit = jax.jit(step, donate_argnums=1, out_shardings=(rows, None))
    return lowered.compile(), step_jit.lower(params, state).compile()

  with progress.waiting('compiling'):
    prefill, advance = progress.interruptible(compile_both)

  def decode(batch: Batch, shows: Sequence[Show]) -> DecodeOutput:
    state = prefill(params, key, place(batch.prompt))
    traced = recording.init(batch.prompt)
    end_rows = None
    if args.stop:
      end_rows = stop_strings.watch(
        decoder.vocabulary, args.stop, num_rows=state.done.size
      )
    while not np.all(state.done):
      # Copies: the step writes where these are, as it does in the caches.
      before = jax.tree.map(np.array, state.statistics)
      state, info = advance(params, state)
      if end_rows is not None:
        state, info = end_rows(before, state, info)
      records, traced = recording.iteration_records(
        info, traced, decoder.vocabulary.pieces
      )
      for record in records:
        for show in shows:
          show(record)
    return speculative.output(state)

  return decode


def prompt_records(decoder: Decoder, batch: Batch) -> list[Record]:
  """The prompts of a batch, as a trace has them."""
  num_rows = len(batch.texts)
  rows = jax.tree.map(lambda leaf: leaf[:num_rows], batch.prompt)
  return recording.prompt_records(rows, decoder.vocabulary.pieces, batch.texts)


def header(args: argparse.Namespace, decoder: Decoder) -> Record:
  """The first record of a trace: what was asked for."""
  return recording.header(
    target=args.model,
    drafter=args.draft_model or args.drafter,
    verification=args.verification,
    gamma=decoder.drafter.gamma,
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    **({'min_p': args.min_p} if args.min_p else {}),
    lenience=args.lenience,
    seed=args.seed,
    dtype=args.dtype,
    **({'adaptive': args.adaptive} if args.adaptive else {}),
    **({'stop': args.stop} if args.stop else {}),
  )


def streamer(decoder: Decoder, screen: Any) -> Show:
  """Prints the iterations of one row in colour, special tokens apart."""
  return terminal.streamer(screen, hidden_ids=decoder.vocabulary.special_ids)


def show_rows(
  decoder: Decoder, screen: Any, batch: Batch, records: Sequence[Record]
) -> None:
  """Prints the rows of a batch that is done, each under its prompt."""
  row_ids = batch.prompt.row_ids.tolist()
  for row_id, prompt in zip(row_ids, batch.texts, strict=False):
    show_prompt(screen, prompt)
    show = streamer(decoder, screen)
    for record in records:
      if record['row'] == row_id:
        show(record)
    screen.print()


def show_prompt(screen: Any, prompt: str) -> None:
  """Prints the beginning of a prompt above its continuation."""
  from rich.text import Text

  text = Text(f'> {wording.visible(prompt)}', style='dim')
  screen.print(text, overflow='ellipsis', no_wrap=True)
