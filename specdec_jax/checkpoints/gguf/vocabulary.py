"""Vocabularies from the metadata of GGUF files."""

import collections
from pathlib import Path
from typing import Any

import numpy as np

from specdec_jax.checkpoints.gguf.container import open_gguf
from specdec_jax.checkpoints.settings import Settings
from specdec_jax.text import vocabularies
from specdec_jax.text.vocabularies import Vocabulary

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4
_TOKENS = 'tokenizer.ggml.tokens'
_TYPES = 'tokenizer.ggml.token_type'
_TEMPLATE = 'tokenizer.chat_template'
# What llama.cpp calls Llama 3's way of splitting words.
_LLAMA3_NAMES = ('llama3', 'llama-v3', 'llama-bpe')

# Splits words as Llama 3 does: contractions, words with one leading sign, up to
# three digits, runs of signs, line ends, spaces.
_LLAMA3_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
  r'|[^\r\n\p{L}\p{N}]?\p{L}+'
  r'|\p{N}{1,3}'
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*'
  r'|\s*[\r\n]+'
  r'|\s+(?!\S)'
  r'|\s+'
)


def read_vocabulary(path: Path) -> Vocabulary:
  """The vocabulary in a GGUF file: byte-level pairs, as GPT-2's.

  Equal to Hugging Face's tokenizer of the same model.

  Raises:
    ValueError: if it has none, or one of another kind.
    ImportError: if the tokenizers package is not installed.
  """
  file = open_gguf(path)
  values = Settings(path=file.path, values=file.metadata)
  tokens = values.texts(_TOKENS)
  if not tokens:
    values.refuse(_TOKENS, 'at least one token')
  token, times = collections.Counter(tokens).most_common(1)[0]
  if times > 1:
    raise ValueError(f'{file.path}: {_TOKENS} has {token!r} {times} times')
  ids = {
    name: values.ids(f'tokenizer.ggml.{name}_token_id', len(tokens))
    for name in ('bos', 'eos', 'eot')
  }
  first = {name: tokens[found[0]] for name, found in ids.items() if found}
  return Vocabulary(
    tokenizer=_build_tokenizer(values, tokens, first.get('bos')),
    eos_ids=tuple(sorted({*ids['eos'], *ids['eot']})),
    bos_token=first.get('bos'),
    eos_token=first.get('eos'),
    chat_template=values.text(_TEMPLATE) if values.has(_TEMPLATE) else None,
  )


def _build_tokenizer(
  values: Settings, tokens: list[str], bos_token: str | None
) -> Any:
  kind = values.text('tokenizer.ggml.model')
  if kind != 'gpt2':
    raise ValueError(
      f'{values.path} has a tokenizer of kind {kind!r}; only byte-level pairs, '
      "'gpt2', are read from GGUF files. Load the model's Hugging Face folder"
    )
  splitting = values.text('tokenizer.ggml.pre')
  is_llama3 = splitting in _LLAMA3_NAMES
  # By default as in llama.cpp, src/llama-vocab.cpp.
  adds_bos = values.flag('tokenizer.ggml.add_bos_token', is_llama3)
  merges = values.texts('tokenizer.ggml.merges')
  types = _token_types(values, len(tokens))
  pre_tokenizer = _pre_tokenizer(values, splitting)
  tokenizers = vocabularies.import_tokenizers()
  ids = {token: i for i, token in enumerate(tokens)}
  added = {
    token: kind
    for token, kind in zip(tokens, types, strict=False)
    if kind in (_CONTROL, _USER_DEFINED)
  }
  what = f'{values.path} has an inconsistent tokenizer'
  with vocabularies.package_errors(what):
    tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab=ids,
        merges=[tuple(merge.split(' ', 1)) for merge in merges],
        ignore_merges=is_llama3,
      )
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if adds_bos and bos_token:
      tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f'{bos_token}:0 $A:0',
        special_tokens=[(bos_token, ids[bos_token])],
      )
    # All in one call, in order of id: each call takes time.
    tokenizer.add_tokens(
      [
        tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in added.items()
      ]
    )
  return tokenizer


def _token_types(values: Settings, num_tokens: int) -> list[int]:
  """What kind of token each is, or nothing if the file does not say."""
  if not values.has(_TYPES):
    return []
  types = values.values[_TYPES]
  if (
    not isinstance(types, np.ndarray)
    or types.dtype.kind not in 'iu'
    or len(types) != num_tokens
  ):
    values.refuse(_TYPES, f'{num_tokens} numbers, one per token')
  return types.tolist()


def _pre_tokenizer(values: Settings, splitting: str) -> Any:
  """How text is cut into words before pairs are merged within them."""
  tokenizers = vocabularies.import_tokenizers()
  pre = tokenizers.pre_tokenizers
  if splitting == 'smollm':
    return pre.Sequence(
      [pre.Digits(individual_digits=True), pre.ByteLevel(False)]
    )
  if splitting == 'gpt-2':
    return pre.ByteLevel(False)
  if splitting in _LLAMA3_NAMES:
    words = pre.Split(tokenizers.Regex(_LLAMA3_WORDS), 'isolated')
    return pre.Sequence([words, pre.ByteLevel(False, use_regex=False)])
  raise ValueError(
    f'{values.path} splits words as {splitting!r}; supported are '
    "'smollm', 'gpt-2' and 'llama-bpe'. Load the model's Hugging Face folder"
  )
