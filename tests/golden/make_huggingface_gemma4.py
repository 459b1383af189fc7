"""Makes tiny Gemma 4 models of Hugging Face transformers, assistants for them,
and a Qwen3-MoE; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.24.0 safetensors
  python tests/golden/make_huggingface_gemma4.py [--output tests/golden]

Writes random models as `save_pretrained` writes them, each with a golden.npz:
token ids and their logits, `ids` and `logits`. Texts are longer than the
windows.

- `tiny_gemma4`: shaped like the 31B, with full layers whose value is their key,
  and whose heads have another number and size;
- `tiny_gemma4_e2b`: per-layer embeddings, layers that share keys and values and
  have a feed-forward twice as wide;
- `tiny_gemma4_moe`: shaped like the 26B-A4B, with experts;
- `tiny_qwen3_moe`: a Qwen3-MoE, whose weights of experts do not sum to 1;
- `tiny_gemma4_assistant` and `tiny_gemma4_e2b_assistant`: assistants for the
  first two, with logits of all tokens and of clusters. Their golden.npz has,
  for `lengths` of the rows of the target's `ids`, the `logits` of the drafts
  that follow, `[B, G, V]`, and these `drafts`; and their texts.npz the greedy
  texts of target and assistant together, `tokens` `[N, MAX_LENGTH]` for prompts
  that are the first `lengths` of them.
"""

import argparse
import pathlib

import numpy as np
import torch
import transformers

VOCAB_SIZE = 96
WINDOW = 5
SLIDING, FULL = 'sliding_attention', 'full_attention'
SIZES = {
  'vocab_size': VOCAB_SIZE,
  'hidden_size': 24,
  'intermediate_size': 32,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'global_head_dim': 16,
  'max_position_embeddings': 128,
  'sliding_window': WINDOW,
  'hidden_size_per_layer_input': 0,
  'vocab_size_per_layer_input': 0,
  'attn_implementation': 'eager',
}
DENSE = {
  'num_hidden_layers': 5,
  'layer_types': [SLIDING, SLIDING, FULL, SLIDING, FULL],
  'num_global_key_value_heads': 1,
  'attention_k_eq_v': True,
  'final_logit_softcapping': 12.0,
}
PER_LAYER = {
  'num_hidden_layers': 6,
  'layer_types': [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
  'num_key_value_heads': 1,
  'num_kv_shared_layers': 3,
  'use_double_wide_mlp': True,
  'hidden_size_per_layer_input': 8,
  'vocab_size_per_layer_input': VOCAB_SIZE,
  'final_logit_softcapping': 30.0,
}
EXPERTS = {
  'num_hidden_layers': 3,
  'layer_types': [SLIDING, SLIDING, FULL],
  'num_global_key_value_heads': 1,
  'attention_k_eq_v': True,
  'enable_moe_block': True,
  'num_experts': 6,
  'top_k_experts': 2,
  'moe_intermediate_size': 8,
}


ASSISTANT = {
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 3,
  'layer_types': [SLIDING, SLIDING, FULL],
}
NUM_DRAFTS = 3
NUM_PROMPTS, MAX_LENGTH = 50, 40


def randomise(model, seed: int) -> None:
  """Weights under which texts vary, and every part of a layer is felt."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if 'norm' in name or name.endswith('scale'):
        parameter.normal_(std=0.3).add_(1)
      elif 'embed_tokens' in name:
        parameter.normal_(std=0.3)
      elif 'per_layer_input_gate' in name:
        # GELU of large negative numbers is noise, which a norm would amplify.
        parameter.normal_(std=0.02)
      else:
        parameter.normal_(std=0.4)
    for name, buffer in model.named_buffers():
      if name.endswith('layer_scalar'):
        buffer.uniform_(0.5, 1.0)


def gemma_4(sizes: dict):
  config = transformers.Gemma4TextConfig(**SIZES | sizes)
  return transformers.Gemma4ForCausalLM(config)


def qwen3_moe():
  keys = ('vocab_size', 'hidden_size', 'num_attention_heads', 'head_dim')
  return transformers.Qwen3MoeForCausalLM(
    transformers.Qwen3MoeConfig(
      **{key: SIZES[key] for key in keys},
      num_hidden_layers=2,
      num_key_value_heads=2,
      num_experts=6,
      num_experts_per_tok=2,
      moe_intermediate_size=8,
      norm_topk_prob=False,
      max_position_embeddings=128,
      attn_implementation='eager',
    )
  )


def make_decoder(folder: pathlib.Path, model, seed: int) -> None:
  """Saves a random decoder, some token ids and its logits for them."""
  randomise(model, seed)
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  ids = torch.randint(2, VOCAB_SIZE, (3, 24))
  with torch.no_grad():
    logits = model.eval()(ids, output_hidden_states=True).logits
  np.savez_compressed(
    folder / 'golden.npz',
    ids=ids.numpy().astype(np.int32),
    logits=logits.numpy(),
  )
  print(folder.name, f'{logits.abs().max():.2f}')


def load(cls: type, folder: pathlib.Path):
  return cls.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  ).eval()


def make_assistant(
  folder: pathlib.Path,
  target_folder: pathlib.Path,
  target_sizes: dict,
  seed: int,
  **head,
) -> None:
  """Saves a random assistant for a saved target, and what it drafts."""
  target = load(transformers.Gemma4ForCausalLM, target_folder)
  keys = (
    'num_key_value_heads',
    'num_global_key_value_heads',
    'attention_k_eq_v',
  )
  of_target = {key: x for key, x in target_sizes.items() if key in keys}
  model = transformers.Gemma4AssistantForCausalLM(
    transformers.Gemma4AssistantConfig(
      text_config={**SIZES, **of_target, **ASSISTANT},
      backbone_hidden_size=target.config.hidden_size,
      attn_implementation='eager',
      **head,
    )
  ).eval()
  randomise(model, seed)
  if model.masked_embedding is not None:
    model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  all_ids = torch.tensor(np.load(target_folder / 'golden.npz')['ids']).long()
  lengths = [3, 13, 20]
  logits, drafts = zip(
    *[
      draft(target, model, ids[None, :length])
      for ids, length in zip(all_ids, lengths, strict=True)
    ],
    strict=True,
  )
  np.savez_compressed(
    folder / 'golden.npz',
    ids=all_ids.numpy().astype(np.int32),
    lengths=np.array(lengths, np.int32),
    logits=np.concatenate(logits),
    drafts=np.concatenate(drafts).astype(np.int32),
  )
  print(folder.name, np.concatenate(drafts).tolist())


def draft(target, model, ids) -> tuple[np.ndarray, np.ndarray]:
  """Drafts after a text of one row, as transformers' generator does once the
  target has read all of it but the last token."""
  embedding = target.get_input_embeddings()
  with torch.no_grad():
    seen = target(
      ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True
    )
    token, hidden = ids[:, -1:], seen.hidden_states[-1][:, -1:]
    logits, drafts = [], []
    for _ in range(NUM_DRAFTS):
      outputs = model(
        inputs_embeds=torch.cat([embedding(token), hidden], dim=-1),
        position_ids=torch.tensor([[ids.shape[1] - 1]]),
        shared_kv_states=seen.shared_kv_states,
      )
      token, hidden = outputs.logits.argmax(-1), outputs.last_hidden_state
      logits.append(outputs.logits)
      drafts.append(token)
  return torch.cat(logits, 1).numpy(), torch.cat(drafts, 1).numpy()


def make_texts(folder: pathlib.Path, target_folder: pathlib.Path) -> None:
  """Saves what a saved target generates greedily with its assistant."""
  target = load(transformers.Gemma4ForCausalLM, target_folder)
  model = load(transformers.Gemma4AssistantForCausalLM, folder)
  model.generation_config.num_assistant_tokens = NUM_DRAFTS
  target.generation_config.eos_token_id = None
  rng = np.random.default_rng(0)
  prompts = [
    rng.integers(2, VOCAB_SIZE, rng.integers(1, 12)) for _ in range(NUM_PROMPTS)
  ]
  options = {'do_sample': False, 'max_length': MAX_LENGTH}
  texts, num_equal = [], 0
  for prompt in prompts:
    ids = torch.tensor(prompt)[None]
    text = target.generate(ids, assistant_model=model, **options)
    num_equal += torch.equal(text, target.generate(ids, **options))
    texts.append(text.numpy())
  np.savez_compressed(
    folder / 'texts.npz',
    tokens=np.concatenate(texts).astype(np.int32),
    lengths=np.array([len(prompt) for prompt in prompts], np.int32),
  )
  print(folder.name, f'{num_equal} of {NUM_PROMPTS} texts are plain ones')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  output = parser.parse_args().output
  torch.set_num_threads(1)
  make_decoder(output / 'tiny_gemma4', gemma_4(DENSE), 1)
  make_decoder(output / 'tiny_gemma4_e2b', gemma_4(PER_LAYER), 2)
  make_decoder(output / 'tiny_gemma4_moe', gemma_4(EXPERTS), 3)
  make_decoder(output / 'tiny_qwen3_moe', qwen3_moe(), 6)
  make_assistant(
    output / 'tiny_gemma4_assistant', output / 'tiny_gemma4', DENSE, 4
  )
  make_assistant(
    output / 'tiny_gemma4_e2b_assistant',
    output / 'tiny_gemma4_e2b',
    PER_LAYER,
    5,
    use_ordered_embeddings=True,
    num_centroids=12,
    centroid_intermediate_top_k=3,
  )
  for name in ('tiny_gemma4', 'tiny_gemma4_e2b'):
    make_texts(output / f'{name}_assistant', output / name)


if __name__ == '__main__':
  main()
