"""A conversation whose cache is kept from turn to turn."""

import dataclasses
import operator
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from specdec_jax.assembly import (
  completions,
  packing,
  recording,
  running,
  settled_gamma,
)
from specdec_jax.assembly.completions import Completion, Stream
from specdec_jax.assembly.decoder import Decoder
from specdec_jax.assembly.running import DecodeSettings, Iterations, Show
from specdec_jax.decoding import reading
from specdec_jax.decoding.program import Part, Program
from specdec_jax.decoding.state import DecodeState
from specdec_jax.files import text_lines
from specdec_jax.models import families
from specdec_jax.text import prompts, vocabularies
from specdec_jax.text.prompts import Batch, Dialogue

# The buffers have room for so many positions at first. They double when a
# conversation does not fit, and each size has its own programs.
_ROOM = 1024


class Conversation:
  """Turns of a user and of a model, through the model's chat template.

  A turn costs what it adds: the caches of both models are kept, and only what
  follows the longest common beginning of the last turn's tokens and this one's
  is fed. Tokens are those of one long prompt of all messages so far, but for
  ties that another order of summation decides.

  Attributes:
    decoder: its models.
    messages: all of them so far, as `{'role': ..., 'content': ...}`. Answers
      have the special tokens that the chat template names, such as those that
      enclose thoughts.
    num_fed: positions that the last turn fed before its first token: those that
      were new, in whole blocks.
  """

  def __init__(
    self,
    decoder: Decoder,
    *,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 512,
    seed: int = 0,
    stop: Sequence[str] | None = None,
    call: running.Call = operator.call,
  ):
    """Begins a conversation; nothing is compiled yet.

    Args:
      decoder: of `load`, for a decoder-only model with a chat template.
      system: the system's message, before all others.
      chat_template_kwargs: further variables of the chat template, such as
        `{'enable_thinking': False}`.
      max_new_tokens: per answer, at most; less where the context ends.
      seed: of all draws.
      stop: strings that end an answer; None for the model's own.
      call: calls what takes long, see `DecodeSettings`.

    Raises:
      ValueError: if the model has no chat template or an encoder, or a number
        is out of range.
    """
    if families.has_encoder(decoder.config):
      raise ValueError(
        f'{decoder.model.checkpoint} has an encoder: a conversation needs a '
        'decoder-only model'
      )
    if decoder.recipe.exact_bits:
      raise ValueError('exact_bits is for prompts that are read at once')
    self._settings = DecodeSettings(
      max_new_tokens=max_new_tokens, seed=seed, stop=stop, call=call
    )
    self.decoder = decoder
    self._system = system
    self._template_kwargs = chat_template_kwargs or {}
    prompts.check_template_kwargs(self._template_kwargs, 'the conversation')
    # The last turn's; None before the first.
    self._state: DecodeState | None = None
    self._last: Stream | None = None
    self._room = 0
    self.reset()
    # Raises without a chat template.
    batch = self._packed('.')
    self.decoder = settled_gamma.settled(decoder, batch, self._settings)

  def reset(self) -> None:
    """Forgets all but the message of the system."""
    self._end_turn()
    self.messages: list[dict[str, Any]] = []
    if self._system is not None:
      self.messages.append({'role': 'system', 'content': self._system})
    self.num_fed = 0

  def send(self, text: str) -> Completion:
    """Returns the answer to a message of the user; raises as `stream`."""
    stream = self.stream(text)
    for _ in stream:
      pass
    assert stream.completion is not None
    return stream.completion

  def stream(self, text: str, *, show: Show | None = None) -> Stream:
    """Answers a message of the user, piece by piece; `show` gets the record of
    each iteration, see `assembly.recording`.

    Both messages join the conversation when the first piece is asked for: a
    stream that is never iterated leaves nothing behind. An answer that is
    broken off, by an interrupt, `close` or the next message, stays as far as it
    came. ValueError if the message is empty, or the context is full.
    """
    if not text.strip():
      raise ValueError('the message is empty')
    text_lines.check_encodable(text, 'the message')
    self._end_turn()
    shows = () if show is None else (show,)
    self._last = Stream(self._answer(self._packed(text), shows))
    return self._last

  def _end_turn(self) -> None:
    """Breaks the last answer off, if it is not whole."""
    if self._last is not None:
      self._last.close()

  def _packed(self, text: str) -> Batch:
    """Packs the conversation with one more message of the user."""
    decoder, limit = self.decoder, self.decoder.max_positions
    messages = [*self.messages, {'role': 'user', 'content': text}]
    dialogue = Dialogue(messages, template_kwargs=self._template_kwargs)
    [ids] = prompts.encode(
      decoder.vocabulary, [dialogue], config=decoder.config, is_chat=True
    )
    num_new = limit - prompts.num_positions(decoder.config, len(ids), 0)
    if num_new < 1:
      raise ValueError(f'{len(ids)} tokens fill the context, {limit}: reset it')
    most = min(self._settings.max_new_tokens, num_new)
    settings = dataclasses.replace(self._settings, max_new_tokens=most)
    [batch] = packing.pack(decoder, [dialogue], settings)
    return batch

  def _answer(
    self, batch: Batch, shows: Sequence[Show]
  ) -> Generator[str, None, Completion]:
    """Yields the pieces of an answer, and takes both messages in."""
    answer_text = ''
    [text] = batch.texts
    ids: list[int] = []

    def collect(record: recording.Record) -> None:
      ids.extend(token['token'] for token in recording.committed(record))

    self.messages.append({'role': 'user', 'content': text})
    try:
      iterations = self._read(batch, [*shows, collect])
      pieces = Stream(completions.pieces(self.decoder, batch, iterations))
      for piece in pieces:
        answer_text += piece
        yield piece
      assert pieces.completion is not None
      return pieces.completion
    finally:
      # Special tokens that the chat template names belong to the message.
      vocabulary = self.decoder.vocabulary
      content = vocabularies.turn_text(vocabulary, ids, answer_text)
      self.messages.append({'role': 'assistant', 'content': content})

  def _keep(self, state: DecodeState) -> None:
    self._state = state

  def _read(self, batch: Batch, shows: Sequence[Show]) -> Iterations:
    """Feeds what is new of the conversation; returns the answer's
    iterations."""
    decoder, prompt = self.decoder, batch.prompt
    # Buffers only grow: after a reset their text is taken back.
    limit, room = decoder.max_positions, max(_ROOM, self._room)
    while room < int(jnp.max(jnp.asarray(prompt.max_lengths))):
      room *= 2
    # An empty cache is made by the prefill of a prompt of one token, which is
    # not read yet.
    first = dataclasses.replace(
      prompt,
      decoder_tokens=prompt.decoder_tokens[:, :1],
      decoder_lengths=prompt.decoder_lengths * 0 + 1,
    )
    begun = dataclasses.replace(batch, prompt=first)
    settings = dataclasses.replace(
      self._settings, max_new_tokens=min(room, limit) - 1
    )
    params, programs = running.compiled(decoder, begun, settings, _parts)
    prefill, read_on, *loop = programs
    state = self._state
    # An interrupt may have hit a step that overwrites the state, of which
    # `read_on` does not read `done`.
    if state is None or state.context.tokens.is_deleted():
      state = prefill(params, *running.placed(begun, settings))
    elif self._room < room:
      larger = prefill(params, *running.placed(begun, settings))
      state = reading.grown(state, larger)
    # The prompt has the state's room: [5, 6] is [5, 6, 0, 0] in room for 4.
    missing = state.context.tokens.shape[1] - prompt.decoder_tokens.shape[1]
    tokens = jnp.pad(prompt.decoder_tokens, ((0, 0), (0, missing)))
    prompt = dataclasses.replace(prompt, decoder_tokens=tokens)
    key, prompt = running.placed(
      dataclasses.replace(batch, prompt=prompt), settings
    )
    state, num_fed = read_on(params, key, prompt, state)
    self._keep(state)
    self._room = room
    self.num_fed = int(num_fed[0])
    return running.iterations(
      decoder, params, loop, state, batch, shows=shows, keep=self._keep
    )


def _parts(program: Program) -> Sequence[Part]:
  prefill, *loop = running.parts(program)
  return [prefill, program.read_on, *loop]
