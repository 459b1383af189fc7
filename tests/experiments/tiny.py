"""The smallest T5 that experiments measure."""

from specdec_jax.models.t5 import T5Config

TINY = T5Config(
  vocab_size=512,
  embed_dim=8,
  num_encoder_layers=1,
  num_decoder_layers=1,
  num_heads=1,
  head_dim=8,
  mlp_dim=8,
)
