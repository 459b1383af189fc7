"""What Hugging Face calls the parameters of `models.t5.T5`.

It stores matrices as `[out, in]`, and the table of relative positions as
`[buckets, heads]` in the first block of each stack; ours are the transposes.
"""

from specdec_jax.checkpoints.name_maps import Parameter
from specdec_jax.models.t5 import T5Config

_ATTENTION = (
  # ours, Hugging Face's, is the model's width the size of the input
  ('query', 'q', True),
  ('key', 'k', True),
  ('value', 'v', True),
  ('out', 'o', False),
)
# Of every block: our norm, our layer, Hugging Face's layer.
_ENCODER_LAYERS = (
  ('pre_attention_layer_norm', 'attention', 'SelfAttention'),
  ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
)
_DECODER_LAYERS = (
  ('pre_self_attention_layer_norm', 'self_attention', 'SelfAttention'),
  (
    'pre_cross_attention_layer_norm',
    'encoder_decoder_attention',
    'EncDecAttention',
  ),
  ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
)

# In files, but copies of others or, as in T5 1.0's cross-attention, unused.
SUPERFLUOUS = frozenset(
  {
    'encoder.embed_tokens.weight',
    'decoder.embed_tokens.weight',
    'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight',
  }
)


def t5_parameters(config: T5Config) -> tuple[Parameter, ...]:
  """Every parameter of an encoder-decoder of these sizes.

  Raises:
    ValueError: if it is decoder-only: Hugging Face has no such T5.
  """
  if not config.num_encoder_layers:
    raise ValueError('Hugging Face has no T5 without an encoder')
  parameters = [
    Parameter(
      ('token_embedder', 'embedding'),
      '',
      'shared.weight',
      (config.vocab_size, config.embed_dim),
    )
  ]
  if not config.is_tied:
    parameters.append(
      _kernel(
        ('decoder', 'logits_dense'),
        'lm_head',
        (config.embed_dim, config.vocab_size),
      )
    )
  for stack, num_layers in (
    ('encoder', config.num_encoder_layers),
    ('decoder', config.num_decoder_layers),
  ):
    parameters += _stack_parameters(config, stack, num_layers)
  return tuple(parameters)


def _stack_parameters(
  config: T5Config, stack: str, num_layers: int
) -> list[Parameter]:
  parameters = [
    Parameter(
      (stack, 'relpos_bias', 'rel_embedding'),
      '',
      f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
      (config.num_heads, config.relpos_num_buckets),
      is_transposed=True,
    ),
    _norm(config, (stack, f'{stack}_norm'), f'{stack}.final_layer_norm'),
  ]
  layers = _ENCODER_LAYERS if stack == 'encoder' else _DECODER_LAYERS
  for i in range(num_layers):
    for j, (norm, layer, huggingface) in enumerate(layers):
      ours, theirs = (stack, f'layers_{i}'), f'{stack}.block.{i}.layer.{j}'
      parameters.append(_norm(config, (*ours, norm), f'{theirs}.layer_norm'))
      make = _mlp_kernels if layer == 'mlp' else _attention_kernels
      parameters += make(config, (*ours, layer), f'{theirs}.{huggingface}')
  return parameters


def _attention_kernels(
  config: T5Config, path: tuple[str, ...], huggingface: str
) -> list[Parameter]:
  embed_dim, joined = config.embed_dim, config.num_heads * config.head_dim
  return [
    _kernel(
      (*path, ours),
      f'{huggingface}.{theirs}',
      (embed_dim, joined) if is_in else (joined, embed_dim),
    )
    for ours, theirs, is_in in _ATTENTION
  ]


def _mlp_kernels(
  config: T5Config, path: tuple[str, ...], huggingface: str
) -> list[Parameter]:
  embed_dim, mlp_dim = config.embed_dim, config.mlp_dim
  num_inner = len(config.mlp_activations)
  names = ['wi'] if num_inner == 1 else [f'wi_{i}' for i in range(num_inner)]
  kernels = [
    _kernel((*path, name), f'{huggingface}.{name}', (embed_dim, mlp_dim))
    for name in names
  ]
  return [
    *kernels,
    _kernel((*path, 'wo'), f'{huggingface}.wo', (mlp_dim, embed_dim)),
  ]


def _kernel(
  path: tuple[str, ...], huggingface: str, shape: tuple[int, ...]
) -> Parameter:
  return Parameter(
    (*path, 'kernel'), '', f'{huggingface}.weight', shape, is_transposed=True
  )


def _norm(
  config: T5Config, path: tuple[str, ...], huggingface: str
) -> Parameter:
  return Parameter(
    (*path, 'scale'), '', f'{huggingface}.weight', (config.embed_dim,)
  )
