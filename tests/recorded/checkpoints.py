"""Small checkpoints of each kind, drawn at random and written without the
package: T5s, a Spec-Drafter and heads as `specdec train` writes them, Llamas
and an EAGLE-3 network as on the Hugging Face hub."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]

SPECIAL_TOKENS = ('<pad>', '</s>', '<unk>')
PAD, EOS = 0, 1
# All bytes, the special tokens, and a few ids without a token.
VOCAB_SIZE = 264
MAX_POSITIONS = 256
# The weights of a draft model are the target's and as much noise.
DRAFT_NOISE = 0.1

# What the T5s and the Spec-Drafter share.
T5_SIZES = {
  'vocab_size': VOCAB_SIZE,
  'embed_dim': 16,
  'num_encoder_layers': 1,
  'num_decoder_layers': 1,
  'num_heads': 2,
  'head_dim': 8,
  'mlp_dim': 24,
  'mlp_activations': ['gelu', 'linear'],
  'relpos_num_buckets': 32,
  'relpos_max_distance': 128,
  'dropout_rate': 0.0,
  'dtype': 'float32',
}
HEADS_SIZES = {'embed_dim': 16, 'gamma': 3, 'mlp_dim': 8, 'dtype': 'float32'}
# SmolLM2's shape: nine heads share three of keys, and embeddings are tied.
LLAMA_SIZES = {
  'model_type': 'llama',
  'hidden_act': 'silu',
  'vocab_size': VOCAB_SIZE,
  'hidden_size': 36,
  'intermediate_size': 96,
  'num_hidden_layers': 2,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'head_dim': 4,
  'max_position_embeddings': MAX_POSITIONS,
  'rms_norm_eps': 1e-05,
  'rope_theta': 100000.0,
  'torch_dtype': 'float32',
  'eos_token_id': EOS,
}
EAGLE_SIZES = LLAMA_SIZES | {
  'num_hidden_layers': 1,
  'draft_vocab_size': VOCAB_SIZE,
  'tie_word_embeddings': False,
  'eagle_config': {
    'use_aux_hidden_state': True,
    'eagle_aux_hidden_state_layer_ids': [0, 1],
  },
}


def _attention(name: str, width: int, joint: int) -> dict[str, tuple[int, ...]]:
  """Shapes of an attention's kernels, `[in, out]`."""
  shapes = {f'{name}/{x}/kernel': (width, joint) for x in ('query', 'key')}
  return shapes | {
    f'{name}/value/kernel': (width, joint),
    f'{name}/out/kernel': (joint, width),
  }


def _encoder(sizes: dict) -> dict[str, tuple[int, ...]]:
  width, mlp_dim = sizes['embed_dim'], sizes['mlp_dim']
  joint = sizes['num_heads'] * sizes['head_dim']
  buckets = sizes['num_heads'], sizes['relpos_num_buckets']
  layer = 'encoder/layers_0'
  return {
    'encoder/encoder_norm/scale': (width,),
    'encoder/relpos_bias/rel_embedding': buckets,
    f'{layer}/pre_attention_layer_norm/scale': (width,),
    f'{layer}/pre_mlp_layer_norm/scale': (width,),
    **_attention(f'{layer}/attention', width, joint),
    f'{layer}/mlp/wi_0/kernel': (width, mlp_dim),
    f'{layer}/mlp/wi_1/kernel': (width, mlp_dim),
    f'{layer}/mlp/wo/kernel': (mlp_dim, width),
  }


def _t5(sizes: dict) -> dict[str, tuple[int, ...]]:
  """Shapes of a T5 1.1 by T5X's names."""
  width, mlp_dim = sizes['embed_dim'], sizes['mlp_dim']
  joint = sizes['num_heads'] * sizes['head_dim']
  buckets = sizes['num_heads'], sizes['relpos_num_buckets']
  layer = 'decoder/layers_0'
  return {
    'token_embedder/embedding': (sizes['vocab_size'], width),
    **_encoder(sizes),
    'decoder/decoder_norm/scale': (width,),
    'decoder/relpos_bias/rel_embedding': buckets,
    'decoder/logits_dense/kernel': (width, sizes['vocab_size']),
    f'{layer}/pre_self_attention_layer_norm/scale': (width,),
    f'{layer}/pre_cross_attention_layer_norm/scale': (width,),
    f'{layer}/pre_mlp_layer_norm/scale': (width,),
    **_attention(f'{layer}/self_attention', width, joint),
    **_attention(f'{layer}/encoder_decoder_attention', width, joint),
    f'{layer}/mlp/wi_0/kernel': (width, mlp_dim),
    f'{layer}/mlp/wi_1/kernel': (width, mlp_dim),
    f'{layer}/mlp/wo/kernel': (mlp_dim, width),
  }


def _spec_drafter(sizes: dict) -> dict[str, tuple[int, ...]]:
  width, mlp_dim = sizes['embed_dim'], sizes['mlp_dim']
  joint = sizes['num_heads'] * sizes['head_dim']
  norms = 'self_attention', 'cross_attention', 'mlp'
  return {
    'token_embedder/embedding': (sizes['vocab_size'], width),
    'encoder_positions/embedding': (MAX_POSITIONS, width),
    'decoder_positions/embedding': (MAX_POSITIONS, width),
    'copy_query/kernel': (width, width),
    **_encoder(sizes),
    **{
      f'layers_0/{norm}_layer_norm/{leaf}': (width,)
      for norm in norms
      for leaf in ('scale', 'bias')
    },
    **_attention('layers_0/self_attention', width, joint),
    **_attention('layers_0/encoder_decoder_attention', width, joint),
    'layers_0/mlp/wi/kernel': (width, mlp_dim),
    'layers_0/mlp/wo/kernel': (mlp_dim, width),
  }


def _llama_layer(
  name: str, sizes: dict, num_inputs: int
) -> dict[str, tuple[int, ...]]:
  """Shapes of a layer by transformers' names, `[out, in]`."""
  width, mlp_dim = sizes['hidden_size'], sizes['intermediate_size']
  joint = sizes['num_attention_heads'] * sizes['head_dim']
  shared = sizes['num_key_value_heads'] * sizes['head_dim']
  return {
    f'{name}.input_layernorm.weight': (width,),
    f'{name}.post_attention_layernorm.weight': (width,),
    f'{name}.self_attn.q_proj.weight': (joint, num_inputs),
    f'{name}.self_attn.k_proj.weight': (shared, num_inputs),
    f'{name}.self_attn.v_proj.weight': (shared, num_inputs),
    f'{name}.self_attn.o_proj.weight': (width, joint),
    f'{name}.mlp.gate_proj.weight': (mlp_dim, width),
    f'{name}.mlp.up_proj.weight': (mlp_dim, width),
    f'{name}.mlp.down_proj.weight': (width, mlp_dim),
  }


def _llama(sizes: dict) -> dict[str, tuple[int, ...]]:
  width = sizes['hidden_size']
  shapes = {
    'model.embed_tokens.weight': (sizes['vocab_size'], width),
    'model.norm.weight': (width,),
  }
  for i in range(sizes['num_hidden_layers']):
    shapes |= _llama_layer(f'model.layers.{i}', sizes, width)
  return shapes


def _eagle(sizes: dict) -> dict[str, tuple[int, ...]]:
  width = sizes['hidden_size']
  num_features = len(sizes['eagle_config']['eagle_aux_hidden_state_layer_ids'])
  return {
    'fc.weight': (width, num_features * width),
    'lm_head.weight': (sizes['draft_vocab_size'], width),
    'norm.weight': (width,),
    'midlayer.hidden_norm.weight': (width,),
    **_llama_layer('midlayer', sizes, 2 * width),
  }


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> Weights:
  """Draws normal weights: scales of norms near 1, and matrices that keep
  activations of one size."""
  rng = np.random.default_rng(seed)
  weights = {}
  for name, shape in sorted(shapes.items()):
    values = rng.normal(size=shape)
    if len(shape) == 1:
      is_bias = name.endswith('bias')
      values = 0.1 * values if is_bias else 1 + 0.1 * values
    elif 'embed' not in name:
      # [out, in] by transformers' names, and [in, out] by T5X's.
      num_inputs = shape[-1] if name.endswith('weight') else shape[-2]
      values = values / np.sqrt(num_inputs)
    # A tied model would repeat its input if embeddings were large.
    if name == 'model.embed_tokens.weight':
      values = 0.3 * values
    # Distributions with few likely tokens.
    if 'logits' in name or name in ('lm_head.weight', 'model.norm.weight'):
      values = 3 * values
    weights[name] = values.astype(np.float32)
  return weights


def with_noise(weights: Weights, seed: int) -> Weights:
  """Returns the weights of a model that often agrees."""
  rng = np.random.default_rng(seed)
  return {
    name: x + (DRAFT_NOISE * x.std() * rng.normal(size=x.shape)).astype(x.dtype)
    for name, x in weights.items()
  }


def _eagle_weights(llama: Weights) -> Weights:
  """Draws a network that mostly drafts what its target was about to say: it has
  the target's logits, of the target's last layer and little else."""
  weights = draw(_eagle(EAGLE_SIZES), seed=6)
  width = EAGLE_SIZES['hidden_size']
  last = np.concatenate([np.zeros((width, width)), np.eye(width)], axis=1)
  weights['fc.weight'] = last.astype(np.float32) + 0.05 * weights['fc.weight']
  weights['lm_head.weight'] = 3 * llama['model.embed_tokens.weight']
  for name in ('self_attn.o_proj', 'mlp.down_proj'):
    weights[f'midlayer.{name}.weight'] *= 0.1
  return weights


def write_tokenizer(folder: Path, *, adds_eos: bool) -> None:
  """Writes a tokenizer of bytes; `adds_eos` ends an encoded text with EOS."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = [*SPECIAL_TOKENS, *alphabet]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=vocabulary, merges=[])
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens([*SPECIAL_TOKENS])
  if adds_eos:
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single='$A </s>', special_tokens=[('</s>', EOS)]
    )
  tokenizer.save(str(folder / 'tokenizer.json'))
  _write_json(folder / 'tokenizer_config.json', {'eos_token': '</s>'})


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
  return tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))


def _write_json(path: Path, value: object) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


def _write_native(
  folder: Path, network: str, sizes: dict, weights: Weights
) -> None:
  """Writes what `specdec train` and `specdec convert` write."""
  folder.mkdir()
  _write_json(folder / 'model.json', {'network': network, 'config': sizes})
  save_file(weights, folder / 'model.safetensors')


def _write_huggingface(folder: Path, config: dict, weights: Weights) -> None:
  folder.mkdir()
  _write_json(folder / 'config.json', config)
  save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})


def t5_params() -> dict:
  """Returns the parameters of `target` as T5X has them, a tree by name."""
  tree: dict = {}
  for name, leaf in draw(_t5(T5_SIZES), seed=0).items():
    *branches, last = name.split('/')
    node = tree
    for branch in branches:
      node = node.setdefault(branch, {})
    node[last] = leaf
  return tree


def write(folder: Path) -> None:
  """Writes all checkpoints, each in a folder of its name: the targets `target`
  and `llama`, and their drafters."""
  t5 = draw(_t5(T5_SIZES), seed=0)
  _write_native(folder / 'target', 't5', T5_SIZES, t5)
  _write_native(folder / 'model', 't5', T5_SIZES, with_noise(t5, seed=1))
  block_sizes = T5_SIZES | {'max_positions': MAX_POSITIONS}
  spec_drafter = draw(_spec_drafter(T5_SIZES), seed=2)
  _write_native(
    folder / 'spec_drafter', 'block_decoder', block_sizes, spec_drafter
  )
  gamma, width = HEADS_SIZES['gamma'], HEADS_SIZES['embed_dim']
  heads = {
    'wi': (gamma, width, HEADS_SIZES['mlp_dim']),
    'wo': (gamma, HEADS_SIZES['mlp_dim'], width),
  }
  _write_native(
    folder / 'block_heads', 'block_heads', HEADS_SIZES, draw(heads, seed=3)
  )
  tied = LLAMA_SIZES | {'tie_word_embeddings': True}
  architecture = {'architectures': ['LlamaForCausalLM']}
  llama = draw(_llama(LLAMA_SIZES), seed=4)
  _write_huggingface(folder / 'llama', tied | architecture, llama)
  draft = with_noise(llama, seed=5)
  _write_huggingface(folder / 'llama_draft', tied | architecture, draft)
  architecture = {'architectures': ['LlamaForCausalLMEagle3']}
  sizes = EAGLE_SIZES | architecture
  _write_huggingface(folder / 'eagle', sizes, _eagle_weights(llama))
  for name in ('target', 'model', 'llama', 'llama_draft'):
    is_encoded = name in ('target', 'model')
    write_tokenizer(folder / name, adds_eos=is_encoded)
