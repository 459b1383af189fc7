"""Converses with a model: each line is a message, and the cache is kept.

Ctrl-C interrupts an answer, whose beginning stays in the conversation; Ctrl-D
or /quit ends. What is piped in is answered line by line, as plain text, with an
empty line between answers.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from specdec_jax.assembly.conversation import Conversation
from specdec_jax.cli import from_flags, options, outputs
from specdec_jax.cli import live_text as terminal
from specdec_jax.launch import compilation_cache, progress

_HELP = (
  '/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C interrupts'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  options.add_models(parser)
  options.add_sampling(parser)
  group = parser.add_argument_group('conversation')
  options.add_shared(group, 'system', 'chat_template_kwargs', 'stop')
  group.add_argument('--max_new_tokens', type=int, default=512)
  options.add_output(parser).add_argument(
    '--verdicts',
    action='store_true',
    help='colour tokens as `trace` does, and show rejected ones',
  )
  parser.set_defaults(chat=True)


def run(args: argparse.Namespace) -> int:
  choices = from_flags.choices(args, may_be_auto=True)
  settings = from_flags.settings(args)
  compilation_cache.enable()
  is_person = sys.stdin is not None and sys.stdin.isatty()
  chat = Conversation(
    choices.build(),
    system=settings.system,
    chat_template_kwargs=args.chat_template_kwargs,
    max_new_tokens=settings.max_new_tokens,
    seed=settings.seed,
    stop=settings.stop,
    call=settings.call,
  )
  if is_person:
    progress.show(_HELP)
  is_first = True
  for text in _messages(is_person):
    if text == '/quit':
      break
    elif text == '/reset':
      chat.reset()
    elif text == '/help':
      progress.show(_HELP)
    elif text.startswith('/') and is_person:
      progress.show(f'there is no command {text.split()[0]}: {_HELP}')
    elif text:
      # Piped messages are not echoed, so answers are separated by a line.
      if not (is_person or is_first):
        progress.show()
      is_first = False
      try:
        _answer(args, chat, text)
      except (ValueError, KeyboardInterrupt) as error:
        if not is_person:
          raise
        progress.say('interrupted' if not str(error) else f'error: {error}')
  return 0


def _messages(is_person: bool) -> Iterator[str]:
  """Yields what is typed or piped in, line by line."""
  if not is_person:
    for line in sys.stdin or ():
      yield line.strip()
    return
  with contextlib.suppress(ImportError):  # Windows has none.
    import readline  # noqa: F401 - it edits what `input` reads
  while True:
    try:
      yield input('> ').strip()
    except KeyboardInterrupt:
      progress.show(f'\n{_HELP}')
    except EOFError:
      progress.show()
      return


def _answer(args: argparse.Namespace, chat: Conversation, text: str) -> None:
  """Prints an answer while it is decoded."""
  show: Any = None
  if args.verdicts:
    hidden = chat.decoder.vocabulary.special_ids
    screen = progress.console(color=args.color)
    show = terminal.streamer(screen, hidden_ids=hidden)
  stream = chat.stream(text, show=show)
  # The line is ended before an error is printed.
  with contextlib.closing(stream):
    try:
      for piece in stream:
        if not args.verdicts:
          progress.show(piece, end='')
    finally:
      progress.show()
  done = stream.completion
  if done and done.finish_reason != 'stop':
    how = outputs.ending([done.finish_reason])
    outputs.tell(f'the answer {how}, after {len(done.tokens)} tokens')
