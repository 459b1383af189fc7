"""What `generate` shows and records of a decode, iteration by iteration."""

import argparse
from collections.abc import Sequence
from typing import Any

import jax

from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.running import Show
from specdec_jax.cli import chosen
from specdec_jax.text.prompts import Batch
from specdec_jax.trace import recording, terminal, wording
from specdec_jax.trace.recording import Record


def prompt_records(decoder: Decoder, batch: Batch) -> list[Record]:
  """The prompts of a batch, as a trace has them."""
  num_rows = len(batch.texts)
  rows = jax.tree.map(lambda leaf: leaf[:num_rows], batch.prompt)
  return recording.prompt_records(rows, decoder.vocabulary.pieces, batch.texts)


def header(args: argparse.Namespace, decoder: Decoder) -> Record:
  """The first record of a trace: what was asked for."""
  return recording.header(
    target=decoder.model.checkpoint,
    drafter=args.draft_model or chosen.drafter_name(args),
    verification=args.verification,
    gamma=decoder.drafter.gamma,
    temperature=args.temperature,
    top_k=args.top_k,
    top_p=args.top_p,
    **({'min_p': args.min_p} if args.min_p else {}),
    lenience=chosen.lenience(args),
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
