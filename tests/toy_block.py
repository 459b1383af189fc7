"""The Spec-Drafter's network in miniature."""

from specdec_jax.models.block_decoder import BlockDecoderConfig


def config(vocab_size: int, **sizes) -> BlockDecoderConfig:
  """Two heads, two layers a side, room for forty positions."""
  defaults = {
    'embed_dim': 8,
    'num_encoder_layers': 2,
    'num_decoder_layers': 2,
    'num_heads': 2,
    'head_dim': 4,
    'mlp_dim': 12,
    'max_positions': 40,
    'relpos_num_buckets': 8,
    'relpos_max_distance': 8,
  }
  return BlockDecoderConfig(vocab_size=vocab_size, **(defaults | sizes))
