"""What Hugging Face calls the parameters of `models.t5.T5`.

It stores matrices as `[out, in]`, and the table of relative positions as
`[buckets, heads]` in the first layer of each stack; ours are the transposes.
"""

from specdec_jax.checkpoints.name_maps import Parameter
from specdec_jax.models.t5 import T5Config

# Of every layer: our norm, our part, Hugging Face's part.
_ENCODER_LAYER = (
  ('pre_attention_layer_norm', 'attention', 'SelfAttention'),
  ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
)
_DECODER_LAYER = (
  ('pre_self_attention_layer_norm', 'self_attention', 'SelfAttention'),
  (
    'pre_cross_attention_layer_norm',
    'encoder_decoder_attention',
    'EncDecAttention',
  ),
  ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
)
# Ours, Hugging Face's, axes in our tree.
_ATTENTION = (
  ('query', 'q', 'd heads*head'),
  ('key', 'k', 'd heads*head'),
  ('value', 'v', 'd heads*head'),
  ('out', 'o', 'heads*head d'),
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
  rows = [('token_embedder/embedding', 'shared', 'vocab d')]
  if not config.is_tied:
    rows.append(('decoder/logits_dense/kernel', 'lm_head', 'd vocab'))
  num_inner = len(config.mlp_activations)
  inner = ['wi'] if num_inner == 1 else [f'wi_{i}' for i in range(num_inner)]
  mlp = [*((name, name, 'd mlp') for name in inner), ('wo', 'wo', 'mlp d')]
  for stack, parts, num_layers in (
    ('encoder', _ENCODER_LAYER, config.num_encoder_layers),
    ('decoder', _DECODER_LAYER, config.num_decoder_layers),
  ):
    table = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias'
    rows += [
      (f'{stack}/relpos_bias/rel_embedding', table, 'heads buckets'),
      (f'{stack}/{stack}_norm/scale', f'{stack}.final_layer_norm', 'd'),
    ]
    for i in range(num_layers):
      ours = f'{stack}/layers_{i}'
      for j, (norm, part, huggingface) in enumerate(parts):
        theirs = f'{stack}.block.{i}.layer.{j}'
        rows.append((f'{ours}/{norm}/scale', f'{theirs}.layer_norm', 'd'))
        for name, short, axes in mlp if part == 'mlp' else _ATTENTION:
          path = f'{ours}/{part}/{name}/kernel'
          rows.append((path, f'{theirs}.{huggingface}.{short}', axes))
  return tuple(_parameter(config, *row) for row in rows)


def _parameter(
  config: T5Config, path: str, huggingface: str, axes: str
) -> Parameter:
  sizes = {
    'vocab': config.vocab_size,
    'd': config.embed_dim,
    'heads': config.num_heads,
    'heads*head': config.num_heads * config.head_dim,
    'mlp': config.mlp_dim,
    'buckets': config.relpos_num_buckets,
  }
  return Parameter(
    path,
    f'{huggingface}.weight',
    tuple(sizes[axis] for axis in axes.split()),
    is_transposed=path.endswith(('/kernel', '/rel_embedding')),
  )
