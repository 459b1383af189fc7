"""Llama-type models in GGUF files, llama.cpp's format."""

from specdec_jax.checkpoints.gguf.container import is_gguf
from specdec_jax.checkpoints.gguf.llama import read_config, read_params
from specdec_jax.checkpoints.gguf.vocabulary import read_vocabulary

__all__ = ['is_gguf', 'read_config', 'read_params', 'read_vocabulary']
