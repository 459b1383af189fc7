"""The EOS tokens of vocabularies of every format."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from specdec_jax.text.vocabularies import AnyVocabulary

_Vocabulary = TypeVar('_Vocabulary', bound=AnyVocabulary)

# Tokens that end a text or a turn wherever a vocabulary has them, as llama.cpp
# decides (https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp).
_NAMES = (
  '<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[EOS]',
  '<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end|>', '<end_of_turn>',
  '<turn|>', '<end_of_utterance>', '<EOT>', '_<EOT>', '[EOT]', '[e~[',
  '<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of'
  '\N{LOWER ONE EIGHTH BLOCK}sentence\N{FULLWIDTH VERTICAL LINE}>',
  '<|return|>', '<|call|>', '<|calls|>', '<|flush|>', '<|tool_response>',
  # What separates the files of a program.
  '<|fim_pad|>', '<fim-pad>', '<fim_pad>', '<PAD>', '[PAD]', '<|repo_name|>',
  '<|fim_repo|>', '<fim-repo>', '<REPO>', '<reponame>', '<|file_sep|>',
)  # fmt: skip
# Tokens that are not EOS in a vocabulary that has all tokens of one of the
# sets: there `<|end|>` ends a part of a message, and `</s>` is HTML.
_EXCEPTIONS = {
  '<|end|>': (
    {'<|return|>', '<|call|>'},
    {'<|return|>', '<|calls|>'},
    {'<|flush|>', '<|call|>'},
    {'<|flush|>', '<|calls|>'},
  ),
  '</s>': ({'<|tool_response>'},),
}


def with_ends(
  vocabulary: _Vocabulary, stated_ids: Iterable[int], source: Path | str
) -> _Vocabulary:
  """Returns a vocabulary with all tokens that end a text as its `eos_ids`.

  They are the union of what transformers and llama.cpp use: the vocabulary's
  `eos_ids`, `stated_ids`, and the tokens with known names. The first is the
  tokenizer's EOS, if it has one.

  Args:
    vocabulary: with the EOS of its tokenizer.
    stated_ids: the EOS ids in the model's files.
    source: the name of those files in messages.

  Raises:
    ValueError: if a stated id is not in the vocabulary.
  """
  stated_ids = tuple(stated_ids)
  for token_id in stated_ids:
    if token_id >= vocabulary.vocab_size:
      raise ValueError(
        f'{source}: eos_token_id {token_id} is not in the vocabulary of '
        f'{vocabulary.vocab_size} tokens'
      )
  named_ids: dict[str, int] = {}
  for name in _NAMES:
    named_id = vocabulary.token_to_id(name)
    if named_id is not None:
      named_ids[name] = named_id
  for name, token_sets in _EXCEPTIONS.items():
    if any(tokens <= named_ids.keys() for tokens in token_sets):
      named_ids.pop(name, None)
  # Without repetitions, in this order.
  eos_ids = dict.fromkeys(
    (*vocabulary.eos_ids, *stated_ids, *sorted(named_ids.values()))
  )
  return dataclasses.replace(vocabulary, eos_ids=tuple(eos_ids))
