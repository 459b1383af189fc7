"""Makes the golden EAGLE-3 folders, and the logits that their makers compute;
never edit them by hand.

Needs an environment of its own, and a checkout of SafeAILab's EAGLE, which is
no package:

  pip install torch==2.13.0 transformers==5.23.0 safetensors datasets loguru \\
      pillow pydantic pydantic-settings
  pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 \\
      specforge==0.2.0 nemo-automodel==0.7.0
  python -m tests.golden.make_eagle --eagle CHECKOUT

Writes `tiny_eagle_safeailab/`, `tiny_eagle_specforge/`,
`tiny_eagle_speculators/` and `tiny_eagle_nemo/`: random drafters as each of the
four writes them, with tokens, features of a target, its embeddings, and logits
`[steps, T, V_draft]` in `golden.npz`; see `eagle_reference.unrolled_logits`.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

NUM_TOKENS, NUM_STEPS = 8, 3
VOCAB, EMBED, MLP, HEADS, KV_HEADS = 40, 16, 24, 4, 2

SIZES = {
  'vocab_size': VOCAB,
  'hidden_size': EMBED,
  'intermediate_size': MLP,
  'num_hidden_layers': 1,
  'num_attention_heads': HEADS,
  'num_key_value_heads': KV_HEADS,
  'hidden_act': 'silu',
  'max_position_embeddings': 128,
}
# Sizes and keys as the four have them in their published files.
CONFIGS = {
  'safeailab': SIZES
  | {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
    'initializer_range': 0.02,
    'rms_norm_eps': 1e-5,
    'tie_word_embeddings': False,
    'torch_dtype': 'float16',
    'transformers_version': '4.28.1',
    'use_cache': True,
    'draft_vocab_size': 12,
  },
  'specforge': SIZES
  | {
    'architectures': ['LlamaForCausalLMEagle3'],
    'model_type': 'llama',
    'attention_bias': False,
    'attention_dropout': 0.0,
    'bos_token_id': 1,
    'draft_vocab_size': 12,
    'eagle_config': {'eagle_aux_hidden_state_layer_ids': [1, 4, 8]},
    'eos_token_id': 2,
    'fc_norm': True,
    'head_dim': 6,
    'initializer_range': 0.02,
    'max_window_layers': 48,
    'norm_output': False,
    'pad_token_id': 0,
    'rms_norm_eps': 1e-6,
    'rope_scaling': None,
    'rope_theta': 1e6,
    'sliding_window': None,
    'target_hidden_size': 20,
    'tie_word_embeddings': False,
    'torch_dtype': 'float32',
    'transformers_version': '4.53.2',
    'use_cache': True,
    'use_sliding_window': False,
  },
  'speculators': {
    'architectures': ['Eagle3DraftModel'],
    'draft_vocab_size': 12,
    'eagle_aux_hidden_state_layer_ids': [1, 3, 5, 8],
    'embed_requires_grad': False,
    'fc_norm': False,
    'norm_before_fc': True,
    'norm_before_residual': True,
    'norm_output': True,
    'speculators_config': {
      'algorithm': 'eagle3',
      'default_proposal_method': 'greedy',
      'proposal_methods': [
        {
          'accept_tolerance': 0.0,
          'proposal_type': 'greedy',
          'speculative_tokens': 3,
          'verifier_accept_k': 1,
        }
      ],
      'verifier': {'architectures': ['Qwen3ForCausalLM'], 'name_or_path': None},
    },
    'speculators_model_type': 'eagle3',
    'speculators_version': '0.9.0',
    'target_hidden_size': None,
    'tie_word_embeddings': False,
    'transformer_layer_config': SIZES
    | {
      'model_type': 'qwen3',
      'head_dim': 6,
      'layer_types': ['full_attention'],
      'rope_parameters': {'rope_theta': 50_000.0, 'rope_type': 'default'},
      'sliding_window': None,
      '_attn_implementation_autoset': True,
    },
    'transformers_version': '5.15.0',
  },
  'nemo': SIZES
  | {
    'architectures': ['LlamaEagle3DraftModel'],
    'model_type': 'llama',
    'num_hidden_layers': 12,
    'attention_bias': False,
    'attention_dropout': 0.0,
    'attn_implementation': 'eager',
    'bos_token_id': 1,
    'draft_vocab_size': VOCAB,
    'dtype': 'float32',
    'eos_token_id': 2,
    'fc_norm': True,
    'head_dim': 4,
    'initializer_range': 0.02,
    'mlp_bias': False,
    'norm_output': True,
    'pad_token_id': 0,
    'parallel_drafting': False,
    'pretraining_tp': 1,
    'rms_norm_eps': 1e-5,
    'rope_parameters': {
      'factor': 8.0,
      'high_freq_factor': 4.0,
      'low_freq_factor': 1.0,
      'original_max_position_embeddings': 16,
      'rope_theta': 500.0,
      'rope_type': 'llama3',
    },
    'target_hidden_size': EMBED,
    'tie_word_embeddings': False,
    'transformers_version': '5.15.0',
    'use_cache': True,
  },
}
HAS_EMBEDDINGS = ('specforge', 'nemo')


def make_tensors(
  spelling: str, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Random tensors under the names of a spelling."""
  stated = CONFIGS[spelling]
  sizes = stated.get('transformer_layer_config', stated)
  head_dim = sizes.get('head_dim', EMBED // HEADS)
  target = stated.get('target_hidden_size') or EMBED
  ids = stated.get('eagle_aux_hidden_state_layer_ids', (0, 0, 0))
  joined, draft = len(ids) * target, stated['draft_vocab_size']
  shapes = {
    'fc': (EMBED, joined),
    'midlayer.hidden_norm': (EMBED,),
    'midlayer.input_layernorm': (EMBED,),
    'midlayer.post_attention_layernorm': (EMBED,),
    'midlayer.self_attn.q_proj': (HEADS * head_dim, 2 * EMBED),
    'midlayer.self_attn.k_proj': (KV_HEADS * head_dim, 2 * EMBED),
    'midlayer.self_attn.v_proj': (KV_HEADS * head_dim, 2 * EMBED),
    'midlayer.self_attn.o_proj': (EMBED, HEADS * head_dim),
    'midlayer.mlp.gate_proj': (MLP, EMBED),
    'midlayer.mlp.up_proj': (MLP, EMBED),
    'midlayer.mlp.down_proj': (EMBED, MLP),
    'norm': (EMBED,),
    'lm_head': (draft, EMBED),
  }
  if spelling in HAS_EMBEDDINGS:
    shapes['embed_tokens'] = VOCAB, EMBED
  if stated.get('fc_norm'):
    shapes |= {f'fc_norm.{i}': (target,) for i in range(3)}
  if stated.get('norm_before_fc'):
    shapes['input_norm'] = (joined,)
  if sizes['model_type'] == 'qwen3':
    shapes |= {f'midlayer.self_attn.{x}_norm': (head_dim,) for x in 'qk'}
  tensors = {
    f'{name}.weight': (
      rng.uniform(0.5, 1.5, shape)
      if len(shape) == 1
      else rng.normal(0, 1.2 * shape[1] ** -0.5, shape)
    ).astype(np.float32)
    for name, shape in shapes.items()
  }
  if draft < VOCAB:
    ids = np.sort(rng.choice(VOCAB, draft, replace=False)).astype(np.int64)
    tensors['d2t'] = ids - np.arange(draft)
    tensors['t2d'] = np.isin(np.arange(VOCAB), ids)
  return {rename(spelling, name): value for name, value in tensors.items()}


def rename(spelling: str, name: str) -> str:
  if spelling in ('speculators', 'nemo'):
    name = name.replace('midlayer.', 'layers.0.')
  is_outside = name.startswith(('lm_head', 'd2t', 't2d'))
  return f'model.{name}' if spelling == 'nemo' and not is_outside else name


def state_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
  tensors = load_file(folder / 'model.safetensors')
  return {name: torch.from_numpy(value) for name, value in tensors.items()}


def load_state(model, state: dict[str, torch.Tensor], embeddings) -> None:
  """Fills a module, which may lack nothing but what is the target's."""
  found = model.load_state_dict(state, strict=False)
  assert not found.unexpected_keys, found
  target = {'embed_tokens.weight', 'd2t', 't2d', 'norm.weight'}
  missing = set(found.missing_keys) - target
  assert not [n for n in missing if not n.startswith('verifier')], missing
  if 'embed_tokens.weight' in found.missing_keys:
    model.embed_tokens.weight.data = embeddings
  model.eval()


def run_safeailab(folder, tokens, features, embeddings):
  """A prefix and then a token at a time, as its decoding loop does it."""
  import cnets
  import configs

  stated = json.loads((folder / 'config.json').read_text())
  config = configs.EConfig(**stated)
  # As transformers 4 left them, for which this code is.
  config.rope_scaling = stated.get('rope_scaling')
  config.rope_theta = stated.get('rope_theta', 10_000.0)
  model = cnets.Model(config)
  load_state(model, state_of(folder), embeddings)
  logits = torch.zeros(NUM_STEPS, NUM_TOKENS, config.draft_vocab_size)
  for t in range(NUM_TOKENS):
    hidden, cache = features[None, : t + 1], None
    after = tokens[None, 1 : t + 2]
    for i in range(NUM_STEPS):
      out, cache = model(
        hidden, input_ids=after, past_key_values=cache, use_cache=True
      )
      hidden, after = out[:, -1:], tokens[None, t + 2 + i : t + 3 + i]
      logits[i, t] = model.lm_head(model.norm(hidden[0, 0]))
  return logits


def run_specforge(folder, tokens, features, embeddings):
  """Its training's unrolled steps, each attending to those before."""
  from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
  from transformers import LlamaConfig

  config = LlamaConfig.from_pretrained(folder)
  model = LlamaForCausalLMEagle3(config, attention_backend='sdpa')
  load_state(model, state_of(folder), embeddings)
  positions = torch.arange(NUM_TOKENS)[None]
  hidden = model.project_hidden_states(features[None])
  mask = model.prepare_decoder_attention_mask(
    torch.ones(1, NUM_TOKENS, dtype=torch.bool), hidden, 1, NUM_TOKENS, 0
  )
  cache, logits = [[], []], []
  for i in range(NUM_STEPS):
    hidden = model.backbone(
      model.embed_input_ids(tokens[None, 1 + i : 1 + i + NUM_TOKENS]),
      hidden,
      cache,
      mask,
      positions,
    )
    logits.append(model.compute_logits(hidden)[0])
  return torch.stack(logits)


def run_speculators(folder, tokens, features, embeddings):
  """Its training's unrolled steps; the logits are seen at the head."""
  from speculators.models.eagle3 import (
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
  )

  config = Eagle3SpeculatorConfig.from_pretrained(folder)
  config.transformer_layer_config._attn_implementation = 'eager'
  model = Eagle3DraftModel(config)
  load_state(model, state_of(folder), embeddings)
  logits = []
  model.lm_head.register_forward_hook(
    lambda module, inputs, output: logits.append(output[0])
  )
  # Text follows the T positions, as these steps shift tokens in from there.
  padding = len(tokens) - 1 - NUM_TOKENS
  padded = torch.nn.functional.pad(features, (0, 0, 0, padding))
  model(
    hidden_states=padded[None],
    input_ids=tokens[None, 1:],
    document_ids=torch.zeros(1, len(padded), dtype=torch.long),
    ttt_steps=NUM_STEPS,
  )
  return torch.stack(logits)[:, :NUM_TOKENS]


def run_nemo(folder, tokens, features, embeddings):
  """Its training's unrolled steps."""
  from nemo_automodel.components.speculative.eagle.draft_llama import (
    LlamaEagle3DraftModel,
  )
  from transformers import LlamaConfig

  config = LlamaConfig.from_pretrained(folder)
  model = LlamaEagle3DraftModel(config).to(torch.float32)
  load_state(model, state_of(folder), embeddings)
  mask = torch.ones(1, NUM_TOKENS, dtype=torch.long)
  hidden = model.project_hidden_states(features[None])
  cache, logits = [[], []], []
  for i in range(NUM_STEPS):
    hidden = model(
      tokens[None, 1 + i : 1 + i + NUM_TOKENS],
      hidden,
      mask,
      cache_hidden=cache,
    )
    logits.append(model.compute_logits(hidden)[0])
  return torch.stack(logits)


MAKERS: dict[str, Callable] = {
  'safeailab': run_safeailab,
  'specforge': run_specforge,
  'speculators': run_speculators,
  'nemo': run_nemo,
}


def make(spelling: str, output: pathlib.Path, seed: int) -> None:
  rng = np.random.default_rng(seed)
  folder = output / f'tiny_eagle_{spelling}'
  folder.mkdir(exist_ok=True)
  stated = CONFIGS[spelling]
  text = json.dumps(stated, indent=2) + '\n'
  (folder / 'config.json').write_text(text, encoding='utf-8')
  tensors = make_tensors(spelling, rng)
  save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
  [joined] = (v.shape[1] for k, v in tensors.items() if k.endswith('fc.weight'))
  tokens = rng.integers(0, VOCAB, NUM_TOKENS + NUM_STEPS)
  features = rng.normal(0, 2, (NUM_TOKENS, joined)).astype(np.float32)
  embeddings = rng.normal(0, 1, (VOCAB, EMBED)).astype(np.float32)
  with torch.no_grad():
    logits = MAKERS[spelling](
      folder, *map(torch.from_numpy, (tokens, features, embeddings))
    )
  np.savez(
    folder / 'golden.npz',
    tokens=tokens.astype(np.int32),
    features=features,
    embeddings=embeddings,
    logits=logits.numpy(),
  )
  print(f'{spelling:12} logits up to {logits.abs().max():.2f}')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--eagle', type=pathlib.Path, help="a checkout of SafeAILab's EAGLE"
  )
  parser.add_argument('--only', choices=tuple(MAKERS), action='append')
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  arguments = parser.parse_args()
  if arguments.eagle:
    sys.path.insert(0, str(arguments.eagle / 'eagle' / 'model'))
  for seed, spelling in enumerate(MAKERS):
    if spelling in (arguments.only or MAKERS):
      make(spelling, arguments.output, seed)


if __name__ == '__main__':
  main()
