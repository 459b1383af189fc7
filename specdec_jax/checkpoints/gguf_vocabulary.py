"""Vocabularies from the metadata of GGUF files."""

from typing import Any

from specdec_jax.checkpoints.gguf_file import GgufFile, require
from specdec_jax.data.vocabularies import Vocabulary, import_tokenizers

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

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


def read_vocabulary(file: GgufFile) -> Vocabulary:
  """The vocabulary in a GGUF file: byte-level pairs, as GPT-2's.

  Equal to Hugging Face's tokenizer of the same model.

  Args:
    file: an open file.

  Raises:
    ValueError: if it has none, or one of another kind.
    ImportError: if the tokenizers package is not installed.
  """
  tokens = require(file, 'tokenizer.ggml.tokens')
  bos_id = file.metadata.get('tokenizer.ggml.bos_token_id')
  eos_id = file.metadata.get('tokenizer.ggml.eos_token_id')
  eot_id = file.metadata.get('tokenizer.ggml.eot_token_id')
  for token_id in (bos_id, eos_id, eot_id):
    if token_id is not None and not 0 <= token_id < len(tokens):
      raise ValueError(
        f'{file.path} names a token {token_id} beyond its {len(tokens)}'
      )
  return Vocabulary(
    tokenizer=_build_tokenizer(file, tokens, bos_id),
    eos_ids=tuple(sorted({i for i in (eos_id, eot_id) if i is not None})),
    bos_token=None if bos_id is None else tokens[bos_id],
    eos_token=None if eos_id is None else tokens[eos_id],
    chat_template=file.metadata.get('tokenizer.chat_template'),
  )


def _build_tokenizer(
  file: GgufFile, tokens: list[str], bos_id: int | None
) -> Any:
  kind = require(file, 'tokenizer.ggml.model')
  if kind != 'gpt2':
    raise ValueError(
      f"{file.path} has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level "
      "pairs) is read from GGUF files. Load the model's Hugging Face folder"
    )
  tokenizers = import_tokenizers()
  splitting = require(file, 'tokenizer.ggml.pre')
  merges = [
    tuple(merge.split(' ', 1))
    for merge in require(file, 'tokenizer.ggml.merges')
  ]
  try:
    tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=splitting == 'llama-bpe',
      )
    )
  except Exception as error:  # The package raises bare exceptions.
    raise ValueError(
      f'{file.path} has an inconsistent tokenizer: {error}'
    ) from error
  tokenizer.pre_tokenizer = _pre_tokenizer(file, splitting)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  if file.metadata.get('tokenizer.ggml.add_bos_token') and bos_id is not None:
    bos = tokens[bos_id]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f'{bos}:0 $A:0',
      special_tokens=[(bos, bos_id)],
    )
  types = file.metadata.get('tokenizer.ggml.token_type', [])
  added = {
    token: kind
    for token, kind in zip(tokens, types, strict=False)
    if kind in (_CONTROL, _USER_DEFINED)
  }
  # Together and in order of id: adding a token costs time by the call.
  tokenizer.add_tokens(
    [
      tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
      for token, kind in added.items()
    ]
  )
  return tokenizer


def _pre_tokenizer(file: GgufFile, splitting: str) -> Any:
  """How text is cut into words before pairs are merged within them."""
  tokenizers = import_tokenizers()
  pre = tokenizers.pre_tokenizers
  if splitting == 'smollm':
    return pre.Sequence(
      [pre.Digits(individual_digits=True), pre.ByteLevel(False)]
    )
  if splitting == 'gpt-2':
    return pre.ByteLevel(False)
  if splitting == 'llama-bpe':
    words = pre.Split(tokenizers.Regex(_LLAMA3_WORDS), 'isolated')
    return pre.Sequence([words, pre.ByteLevel(False, use_regex=False)])
  raise ValueError(
    f'{file.path} splits words as {splitting!r}; supported are '
    "'smollm', 'gpt-2' and 'llama-bpe'. Load the model's Hugging Face folder"
  )
