"""Policies to train with rollouts, their prompts, and Tunix's own engine."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl.rollout import base_rollout, vanilla_rollout

from specdec_jax.assembly import models
from specdec_jax.assembly.models import Model
from specdec_jax.checkpoints import formats, loading

# Room for a prompt, in tokens.
_PROMPT_LENGTH = 64
_TOY = {
  'num_layers': 2,
  'embed_dim': 64,
  'num_heads': 4,
  'num_kv_heads': 2,
  'head_dim': 16,
  'hidden_dim': 128,
}


class Tokenizer:
  """The bytes of a text, or a message to a model with a vocabulary of this
  package's, as Tunix asks for them."""

  def __init__(self, vocabulary: Any = None):
    self.vocabulary = vocabulary

  def encode(self, text: str) -> list[int]:
    if self.vocabulary is None:
      return [3 + byte for byte in text.encode()]
    messages = [{'role': 'user', 'content': text}]
    ids: list[int] = self.vocabulary.encode_chat(messages)
    return ids

  def decode(self, ids: list[int]) -> str:
    if self.vocabulary is None:
      found = bytes(i - 3 for i in ids if i >= 3)
      return found.decode(errors='replace')
    text: str = self.vocabulary.decode(ids)
    return text

  def bos_id(self) -> int:
    return 0

  def eos_id(self) -> int:
    return 2

  def pad_id(self) -> int:
    return 0 if self.vocabulary is None else 3


def toy() -> tuple[nnx.Module, Tokenizer]:
  """A network with random weights over bytes."""
  config = qwen2.ModelConfig(
    **_TOY, vocab_size=259, norm_eps=1e-6, rope_theta=10_000
  )
  return _randomized(qwen2.Qwen2(config, rngs=nnx.Rngs(0))), Tokenizer()


def _randomized(model: nnx.Module) -> nnx.Module:
  """Tunix leaves feed-forwards at zero until weights are read."""
  rng = np.random.default_rng(0)
  draw = lambda x: jax.numpy.asarray(rng.normal(0, 0.05, x.shape), x.dtype)
  nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
  return model


def pretrained(name: str) -> tuple[nnx.Module, Tokenizer]:
  """A Llama in Tunix's Qwen2, with biases of zero: Tunix's own Llama does not
  read the base of its rotary positions."""
  by_name = Model(checkpoint=name, dtype='float32')
  config: Any = models.read_config(by_name)
  made: Any = nnx.eval_shape(
    lambda: qwen2.Qwen2(
      qwen2.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.embed_dim,
        hidden_dim=config.mlp_dim,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=int(config.rope_base),
        norm_eps=config.norm_epsilon,
        use_tied_embedding=True,
      ),
      rngs=nnx.Rngs(0),
    )
  )
  params = formats.read_params(loading.locate(name), config, None)
  put = lambda there, value: there.set_value(
    jax.numpy.asarray(value).reshape(there.get_value().shape)
  )
  put(made.embedder.input_embedding, params['token_embedder']['embedding'])
  put(made.final_norm.w, params['decoder_norm']['scale'])
  for i, layer in enumerate(made.layers):
    own = params[f'layers_{i}']
    put(layer.input_layernorm.w, own['pre_self_attention_layer_norm']['scale'])
    put(layer.post_attention_layernorm.w, own['pre_mlp_layer_norm']['scale'])
    attention, mlp = own['self_attention'], own['mlp']
    for theirs, ours in zip('qkv', ('query', 'key', 'value'), strict=True):
      projection = getattr(layer.attn, f'{theirs}_proj')
      put(projection.w, attention[ours]['kernel'])
      bias = getattr(layer.attn, f'{theirs}_bias')
      put(bias, np.zeros(bias.get_value().shape, np.float32))
    put(layer.attn.o_proj.w, attention['out']['kernel'])
    for theirs, ours in (('gate', 'wi_0'), ('up', 'wi_1'), ('down', 'wo')):
      put(getattr(layer.mlp, f'{theirs}_proj').kernel, mlp[ours]['kernel'])
  return made, Tokenizer(models.read_vocabulary(by_name, config))


def make(name: str) -> tuple[nnx.Module, Tokenizer]:
  """Makes `toy`, or a pretrained model by its name."""
  return toy() if name == 'toy' else pretrained(name)


def prompts_of(seed: int, num_steps: int, num_prompts: int) -> list[dict]:
  """Batches of questions."""
  rng = np.random.default_rng(seed)
  terms = rng.integers(1, 60, (num_steps, num_prompts, 2))
  text = lambda pair: 'What is {} + {}? Give the number alone.'.format(*pair)
  return [{'prompts': np.array([*map(text, step)])} for step in terms]


def mesh() -> jax.sharding.Mesh:
  """A mesh of one device with the axes that Tunix's models name."""
  kinds = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=kinds)


def rollout_config(
  num_tokens: int, temperature: float = 1.0
) -> base_rollout.RolloutConfig:
  """Samples of up to `num_tokens`, from the whole distribution."""
  return base_rollout.RolloutConfig(
    max_tokens_to_generate=num_tokens,
    max_prompt_length=_PROMPT_LENGTH,
    kv_cache_size=_PROMPT_LENGTH + num_tokens,
    temperature=temperature,
  )


def vanilla(
  model: Any, tokenizer: Tokenizer, num_tokens: int
) -> vanilla_rollout.VanillaRollout:
  """Makes Tunix's engine for a policy that another one decodes as well."""
  sizes = model.config
  return vanilla_rollout.VanillaRollout(
    model,
    tokenizer,
    base_rollout.CacheConfig(
      cache_size=_PROMPT_LENGTH + num_tokens,
      num_layers=sizes.num_layers,
      num_kv_heads=sizes.num_kv_heads,
      head_dim=sizes.head_dim,
    ),
  )
