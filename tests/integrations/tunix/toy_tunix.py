"""Small models of Tunix's with random weights, and a tokenizer of letters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

VOCAB_SIZE = 24
SIZES = {
  'num_layers': 2,
  'embed_dim': 16,
  'hidden_dim': 24,
  'num_heads': 4,
  'head_dim': 8,
  'num_kv_heads': 2,
}
LOCAL, GLOBAL = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL


class Tokenizer:
  """A token for each letter; no token is padding, as none is that a trained
  model draws."""

  def encode(self, text: str) -> list[int]:
    return [2 + (ord(letter) - ord('a')) % (VOCAB_SIZE - 2) for letter in text]

  def decode(self, ids) -> str:
    return ''.join(chr(ord('a') + i - 2) for i in ids if i >= 2)

  def bos_id(self) -> int:
    return 1

  def eos_id(self) -> int:
    return 0

  def pad_id(self) -> int:
    return VOCAB_SIZE


def make(name: str, *, seed: int = 0, **changes) -> nnx.Module:
  """A model of a family by name."""
  sizes = SIZES | changes
  llama_like = {'vocab_size': VOCAB_SIZE, 'norm_eps': 1e-6}
  made = {
    # Tunix does not read a Llama's rope_theta.
    'llama3': lambda: llama3.Llama3(
      llama3.ModelConfig(**sizes, **llama_like, rope_theta=500_000),
      rngs=nnx.Rngs(0),
    ),
    'llama3_tied': lambda: llama3.Llama3(
      llama3.ModelConfig(
        **sizes, **llama_like, rope_theta=500_000, weight_tying=True
      ),
      rngs=nnx.Rngs(0),
    ),
    'qwen2': lambda: qwen2.Qwen2(
      qwen2.ModelConfig(**sizes, **llama_like, rope_theta=1_000_000),
      rngs=nnx.Rngs(0),
    ),
    'qwen3': lambda: qwen3.Qwen3(
      qwen3.ModelConfig(
        **sizes, **llama_like, rope_theta=1_000_000, use_tied_embedding=True
      ),
      rngs=nnx.Rngs(0),
    ),
    'gemma2': lambda: gemma.Gemma(
      gemma.ModelConfig(
        **sizes,
        num_embed=VOCAB_SIZE,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        sliding_window_size=4,
        attention_types=(LOCAL, GLOBAL),
      ),
      rngs=nnx.Rngs(0),
    ),
    'gemma3': lambda: gemma3.Gemma3(
      gemma3.ModelConfig(
        **(sizes | {'num_layers': 6}),
        num_embed=VOCAB_SIZE,
        sliding_window_size=4,
        global_base_frequency=1_000_000,
        global_scale_factor=8.0,
        param_dtype=jnp.float32,
      ),
      rngs=nnx.Rngs(0),
    ),
    'gemma1': lambda: gemma.Gemma(
      gemma.ModelConfig(
        **sizes,
        num_embed=VOCAB_SIZE,
        final_logit_softcap=None,
        use_post_attn_norm=False,
        use_post_ffw_norm=False,
        attention_types=(GLOBAL, GLOBAL),
      ),
      rngs=nnx.Rngs(0),
    ),
    'experts': lambda: qwen3.Qwen3(
      qwen3.ModelConfig(
        **sizes,
        **llama_like,
        rope_theta=1_000_000,
        num_experts=2,
        num_experts_per_tok=1,
      ),
      rngs=nnx.Rngs(0),
    ),
  }[name]()
  randomize(made, seed)
  return made


def randomize(model: nnx.Module, seed: int) -> None:
  """Draws all weights of a model anew, in place."""
  leaves, structure = jax.tree.flatten(nnx.state(model, nnx.Param))
  rng = np.random.default_rng(seed)
  drawn = [
    jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype) for leaf in leaves
  ]
  nnx.update(model, jax.tree.unflatten(structure, drawn))


def prompts(num: int, longest: int) -> list[str]:
  """Texts of 1 to `longest` letters."""
  rng = np.random.default_rng(1)
  letters = [chr(ord('a') + i) for i in range(VOCAB_SIZE - 2)]
  return [
    ''.join(rng.choice(letters, rng.integers(1, longest + 1)))
    for _ in range(num)
  ]
