"""Makes the golden folders of block drafters, and what their makers compute;
never edit them by hand.

Needs an environment of its own, and a checkout of z-lab's dflash, of which no
package has the model:

  pip install speculators==0.9.0 safetensors
  python -m tests.golden.make_block --dflash CHECKOUT

Writes `tiny_block_NAME/` for each of `CONFIGS`: a random drafter as its makers
write it, with tokens, features of a target, its embeddings and output head,
anchors, logits `[A, k, V_draft]` of blocks, and, where there is such a head,
the logits of their confidence `[A, k]`, in `golden.npz`.

The checkout of the `zlab_` folders was commit 44947fb, to which windows,
`is_causal` and a nested `block_size` had been added as in commit 10129599; make
them again from a checkout that has these.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

NUM_TOKENS, ANCHORS = 16, (3, 6, 10)
VOCAB, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM = 40, 16, 24, 4, 2, 6
LAYERS, BLOCK, MASK = 2, 5, 7
FULL, SLIDING = 'full_attention', 'sliding_attention'

SIZES = {
  'model_type': 'qwen3',
  'attention_bias': False,
  'attention_dropout': 0.0,
  'head_dim': HEAD_DIM,
  'hidden_act': 'silu',
  'hidden_size': EMBED,
  'initializer_range': 0.02,
  'intermediate_size': MLP,
  'layer_types': [FULL] * LAYERS,
  'max_position_embeddings': 128,
  'max_window_layers': LAYERS,
  'num_attention_heads': HEADS,
  'num_hidden_layers': LAYERS,
  'num_key_value_heads': KV_HEADS,
  'rms_norm_eps': 1e-6,
  'sliding_window': None,
  'use_cache': True,
  'use_sliding_window': False,
  'vocab_size': VOCAB,
}
WINDOW = {
  'layer_types': [SLIDING, FULL],
  'sliding_window': 6,
  'use_sliding_window': True,
}
# z-lab's older and newer files; keys as in its published ones.
OLDER = SIZES | {
  'architectures': ['DFlashDraftModel'],
  'auto_map': {'AutoModel': 'dflash.DFlashDraftModel'},
  'block_size': BLOCK,
  'bos_token_id': 1,
  'dflash_config': {'mask_token_id': MASK, 'target_layer_ids': [1, 3, 4]},
  'dtype': 'bfloat16',
  'eos_token_id': 2,
  'num_target_layers': 8,
  'rope_scaling': None,
  'rope_theta': 1e6,
  'tie_word_embeddings': False,
  'transformers_version': '4.57.3',
}
NEWER = {k: v for k, v in OLDER.items() if k != 'block_size'} | {
  'dflash_config': {
    'block_size': BLOCK,
    'mask_token_id': MASK,
    'target_layer_ids': [0, 5],
  },
  **WINDOW,
  'is_causal': False,
  'layer_types': [SLIDING] * LAYERS,
}


def of_speculators(algorithm: str, sizes: dict, **changes) -> dict:
  proposal = {
    'accept_tolerance': 0.0,
    'proposal_type': 'greedy',
    'speculative_tokens': BLOCK,
    'verifier_accept_k': 1,
  }
  stated = {
    'architectures': [
      {'dflash': 'DFlashDraftModel', 'dspark': 'DSparkDraftModel'}[algorithm]
    ],
    'aux_hidden_state_layer_ids': [2, 4, 5],
    'block_size': BLOCK,
    'draft_vocab_size': VOCAB,
    'dtype': 'float32',
    'mask_token_id': MASK,
    'sample_from_anchor': algorithm == 'dspark',
    'sliding_window_non_causal': False,
    'speculators_config': {
      'algorithm': algorithm,
      'default_proposal_method': 'greedy',
      'proposal_methods': [proposal],
      'verifier': {'architectures': ['Qwen3ForCausalLM'], 'name_or_path': None},
    },
    'speculators_model_type': algorithm,
    'speculators_version': '0.9.0',
    'target_hidden_size': None,
    'tie_word_embeddings': False,
    'transformer_layer_config': SIZES
    | {'rope_parameters': {'rope_theta': 50_000.0, 'rope_type': 'default'}}
    | sizes,
    'transformers_version': '5.19.0',
  }
  heads = {
    'confidence_head_with_markov': True,
    'enable_confidence_head': True,
    'markov_head_type': 'vanilla',
    'markov_rank': 4,
  }
  return stated | (heads if algorithm == 'dspark' else {}) | changes


CONFIGS = {
  'zlab_older': OLDER,
  'zlab_newer': NEWER,
  'zlab_causal': {k: v for k, v in OLDER.items() if k != 'is_causal'} | WINDOW,
  'dflash': of_speculators('dflash', WINDOW, draft_vocab_size=12),
  'dflash_bidirectional': of_speculators(
    'dflash', WINDOW, sliding_window_non_causal=True
  ),
  'dspark': of_speculators('dspark', {}, draft_vocab_size=12),
  'dspark_gated': of_speculators(
    'dspark', {}, markov_head_type='gated', sample_from_anchor=False
  ),
  'dspark_rnn': of_speculators('dspark', WINDOW, markov_head_type='rnn'),
}


def make_tensors(
  stated: dict, rng: np.random.Generator
) -> dict[str, np.ndarray]:
  """Random tensors of a drafter."""
  ids = stated.get('aux_hidden_state_layer_ids')
  ids = ids or stated['dflash_config']['target_layer_ids']
  draft = stated.get('draft_vocab_size', VOCAB)
  shapes = {
    'fc.weight': (EMBED, len(ids) * EMBED),
    'hidden_norm.weight': (EMBED,),
    'norm.weight': (EMBED,),
  }
  for i in range(LAYERS):
    layer = {
      'input_layernorm': (EMBED,),
      'post_attention_layernorm': (EMBED,),
      'self_attn.q_proj': (HEADS * HEAD_DIM, EMBED),
      'self_attn.k_proj': (KV_HEADS * HEAD_DIM, EMBED),
      'self_attn.v_proj': (KV_HEADS * HEAD_DIM, EMBED),
      'self_attn.o_proj': (EMBED, HEADS * HEAD_DIM),
      'self_attn.q_norm': (HEAD_DIM,),
      'self_attn.k_norm': (HEAD_DIM,),
      'mlp.gate_proj': (MLP, EMBED),
      'mlp.up_proj': (MLP, EMBED),
      'mlp.down_proj': (EMBED, MLP),
    }
    shapes |= {f'layers.{i}.{name}.weight': x for name, x in layer.items()}
  if rank := stated.get('markov_rank', 0):
    shapes |= {
      'markov_head.markov_w1.weight': (VOCAB, rank),
      'markov_head.markov_w2.weight': (draft, rank),
      'confidence_head.proj.weight': (1, EMBED + rank),
      'confidence_head.proj.bias': (1,),
    }
    head = stated['markov_head_type']
    if head == 'gated':
      shapes['markov_head.gate_proj.weight'] = rank, EMBED + rank
      shapes['markov_head.gate_proj.bias'] = (rank,)
    if head == 'rnn':
      joint = 3 * rank, 2 * rank + EMBED
      shapes['markov_head.joint_proj.weight'] = joint
      shapes['markov_head.joint_proj.bias'] = joint[:1]
  tensors = {
    name: (
      rng.uniform(0.5, 1.5, shape)
      if len(shape) == 1
      else rng.normal(0, 1.2 * shape[1] ** -0.5, shape)
    ).astype(np.float32)
    for name, shape in shapes.items()
  }
  if draft < VOCAB:
    drafted = np.sort(rng.choice(VOCAB, draft, replace=False)).astype(np.int64)
    tensors['d2t'] = drafted - np.arange(draft)
    tensors['t2d'] = np.isin(np.arange(VOCAB), drafted)
  return tensors


def load_state(model, folder: pathlib.Path, more=()) -> None:
  """Fills a module, which may lack nothing but what is the target's."""
  tensors = load_file(folder / 'model.safetensors')
  state = {name: torch.from_numpy(value) for name, value in tensors.items()}
  result = model.load_state_dict(state | dict(more), strict=False)
  assert not result.unexpected_keys, result
  assert set(result.missing_keys) <= {
    'verifier_lm_head.weight',
    'verifier_norm.weight',
  }, result
  model.eval()


def run_zlab(folder, tokens, features, embeddings, head):
  """Block by block, after the features of the text before each anchor."""
  from dflash.model import DFlashDraftModel
  from transformers import Qwen3Config

  config = Qwen3Config.from_pretrained(folder)
  model = DFlashDraftModel(config).to(torch.float32)
  load_state(model, folder)
  logits = []
  for anchor in ANCHORS:
    block = torch.full((1, BLOCK), model.mask_token_id)
    block[:, 0] = tokens[anchor]
    hidden = model(
      position_ids=torch.arange(anchor + BLOCK)[None],
      noise_embedding=embeddings[block],
      target_hidden=features[None, :anchor],
    )
    logits.append(hidden[0] @ head.T)
  return torch.stack(logits), None


def run_speculators(folder, tokens, features, embeddings, head):
  """Its training's forward pass; its metrics see what the heads computed."""
  from speculators import SpeculatorModelConfig
  from speculators.models.dflash import core as dflash
  from speculators.models.dspark import core as dspark

  config = SpeculatorModelConfig.from_pretrained(folder)
  config.transformer_layer_config._attn_implementation = 'eager'
  module, model_class = {
    'dflash': (dflash, dflash.DFlashDraftModel),
    'dspark': (dspark, dspark.DSparkDraftModel),
  }[config.speculators_model_type]
  model = model_class(config)
  tensors = load_file(folder / 'model.safetensors')
  rows = head
  if 't2d' in tensors:
    rows = head[torch.from_numpy(tensors['t2d'])]
  more = {'embed_tokens.weight': embeddings, 'lm_head.weight': rows}
  load_state(model, folder, more)
  seen = []

  def compute_metrics(logits, targets, *others, **options):
    seen.extend((logits, others[0]))
    return torch.zeros(()), {}

  module.compute_metrics = compute_metrics
  # Anchors are drawn where there is a loss: there and nowhere else.
  loss_mask = torch.zeros(1, NUM_TOKENS)
  loss_mask[:, list(ANCHORS)] = 1
  model(
    hidden_states=features[None],
    input_ids=tokens[None],
    loss_mask=loss_mask,
    verifier_last_hidden_states=torch.zeros(1, NUM_TOKENS, EMBED),
    document_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long),
    max_anchors=len(ANCHORS),
  )
  logits, confidence = seen
  shape = len(ANCHORS), BLOCK
  is_dspark = config.speculators_model_type == 'dspark'
  confidence = confidence.reshape(shape) if is_dspark else None
  return logits.reshape(*shape, -1), confidence


def make(name: str, output: pathlib.Path, seed: int) -> None:
  rng = np.random.default_rng(seed)
  folder = output / f'tiny_block_{name}'
  folder.mkdir(exist_ok=True)
  stated = CONFIGS[name]
  text = json.dumps(stated, indent=2) + '\n'
  (folder / 'config.json').write_text(text, encoding='utf-8')
  tensors = make_tensors(stated, rng)
  save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
  joined = tensors['fc.weight'].shape[1]
  tokens = rng.integers(0, VOCAB, NUM_TOKENS)
  features = rng.normal(0, 2, (NUM_TOKENS, joined)).astype(np.float32)
  embeddings = rng.normal(0, 1, (VOCAB, EMBED)).astype(np.float32)
  head = rng.normal(0, EMBED**-0.5, (VOCAB, EMBED)).astype(np.float32)
  run = run_zlab if name.startswith('zlab') else run_speculators
  with torch.no_grad():
    logits, confidence = run(
      folder, *map(torch.from_numpy, (tokens, features, embeddings, head))
    )
  arrays = {} if confidence is None else {'confidence': confidence.numpy()}
  np.savez(
    folder / 'golden.npz',
    tokens=tokens.astype(np.int32),
    features=features,
    embeddings=embeddings,
    head=head,
    anchors=np.array(ANCHORS, np.int32),
    logits=logits.numpy(),
    **arrays,
  )
  print(f'{name:20} logits up to {logits.abs().max():.2f}')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--dflash', type=pathlib.Path, help="a checkout of z-lab's dflash"
  )
  parser.add_argument('--only', choices=tuple(CONFIGS), action='append')
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  arguments = parser.parse_args()
  if arguments.dflash:
    sys.path.insert(0, str(arguments.dflash))
  for seed, name in enumerate(CONFIGS):
    if name in (arguments.only or CONFIGS):
      make(name, arguments.output, seed)


if __name__ == '__main__':
  main()
