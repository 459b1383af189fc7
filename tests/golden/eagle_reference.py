"""EAGLE-3's forward pass in numpy, in float64, from the tensors of a file.

It is written from the description of the network and knows nothing of
`models.drafting.eagle`: one position after the other, without a cache or a
batch.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np


class Folder(NamedTuple):
  """A drafter as it is published.

  Attributes:
    stated: config.json; the sizes of the layer lie in one object of it in the
      spelling of speculators.
    tensors: float64 arrays `[out, in]` by SafeAILab's names.
    is_fed_back: whether `norm_output` means that the normed state is fed back.
  """

  stated: dict
  tensors: dict[str, np.ndarray]
  is_fed_back: bool

  @property
  def sizes(self) -> dict:
    return self.stated.get('transformer_layer_config', self.stated)


def read(folder: pathlib.Path) -> Folder:
  from safetensors.numpy import load_file

  tensors = {}
  for name, values in load_file(folder / 'model.safetensors').items():
    name = name.removeprefix('model.').replace('layers.0.', 'midlayer.')
    tensors[name] = values.astype(np.float64)
  stated = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  is_fed_back = 'midlayer' not in (folder / 'model.safetensors').read_text(
    encoding='latin-1'
  )
  return Folder(stated, tensors, is_fed_back)


def unrolled_logits(
  folder: Folder,
  tokens: np.ndarray,
  features: np.ndarray,
  embeddings: np.ndarray,
  num_steps: int,
) -> np.ndarray:
  """Logits of draft tokens, `[steps, T, V_draft]`.

  At step i and position t they are those of token t + 2 + i: features are known
  of the positions up to t, and tokens up to t + 1 + i.

  Args:
    folder: of `read`.
    tokens: ids `[T + steps]` or more.
    features: `[T, k * target_embed]`.
    embeddings: `[V, embed]`, the target's; the drafter's own come first.
    num_steps: drafted positions at each of the T.
  """
  table = folder.tensors.get('embed_tokens.weight', embeddings)
  joined = join(folder, features)
  logits = np.zeros((num_steps, len(features), len(head(folder))))
  for t in range(len(features)):
    hidden = list(joined[: t + 1])
    for i in range(num_steps):
      after = table[tokens[1 : t + 2 + i]]
      out = layer(folder, after, np.stack(hidden))[-1]
      normed = norm(folder, 'norm', out)
      is_fed_back = folder.is_fed_back and folder.stated.get('norm_output')
      hidden.append(normed if is_fed_back else out)
      is_raw = not folder.is_fed_back and not folder.stated.get(
        'norm_output', True
      )
      logits[i, t] = head(folder) @ (out if is_raw else normed)
  return logits


def head(folder: Folder) -> np.ndarray:
  return folder.tensors['lm_head.weight']


def target_ids(folder: Folder) -> np.ndarray:
  """The target's id of each draft token."""
  ids = np.arange(len(head(folder)))
  return ids + folder.tensors.get('d2t', np.zeros(len(ids))).astype(int)


def join(folder: Folder, features: np.ndarray) -> np.ndarray:
  """The features of each position, `[T, k * target_embed]`, as one state."""
  weight = folder.tensors['fc.weight']
  if folder.stated.get('norm_before_fc'):
    features = norm(folder, 'input_norm', features)
  if folder.stated.get('fc_norm'):
    names = sorted(n for n in folder.tensors if n.startswith('fc_norm.'))
    parts = np.split(features, len(names), axis=-1)
    features = np.concatenate(
      [norm(folder, f'fc_norm.{i}', part) for i, part in enumerate(parts)], -1
    )
  return features @ weight.T


def layer(
  folder: Folder, embeddings: np.ndarray, hidden: np.ndarray
) -> np.ndarray:
  """The decoder layer over all positions, `[T, embed]` of both to the same."""
  tensors = folder.tensors
  normed = norm(folder, 'midlayer.hidden_norm', hidden)
  residual = normed if folder.stated.get('norm_before_residual') else hidden
  x = np.concatenate(
    [norm(folder, 'midlayer.input_layernorm', embeddings), normed], axis=-1
  )
  x = residual + attention(folder, x)
  y = norm(folder, 'midlayer.post_attention_layernorm', x)
  gate = y @ tensors['midlayer.mlp.gate_proj.weight'].T
  up = y @ tensors['midlayer.mlp.up_proj.weight'].T
  inner = gate / (1 + np.exp(-gate)) * up
  return x + inner @ tensors['midlayer.mlp.down_proj.weight'].T


def attention(folder: Folder, x: np.ndarray) -> np.ndarray:
  """Causal grouped-query attention, `[T, 2 * embed]` to `[T, embed]`."""
  sizes, tensors = folder.sizes, folder.tensors
  num_heads = sizes['num_attention_heads']
  num_kv_heads = sizes.get('num_key_value_heads', num_heads)
  head_dim = sizes.get('head_dim') or sizes['hidden_size'] // num_heads

  def heads(name: str, count: int) -> np.ndarray:
    weight = tensors[f'midlayer.self_attn.{name}_proj.weight']
    y = (x @ weight.T).reshape(len(x), count, head_dim)
    if f'midlayer.self_attn.{name}_norm.weight' in tensors:
      y = norm(folder, f'midlayer.self_attn.{name}_norm', y)
    return y

  queries = rotated(sizes, heads('q', num_heads))
  keys = rotated(sizes, heads('k', num_kv_heads))
  values = heads('v', num_kv_heads)
  mixed = np.zeros_like(queries)
  for t in range(len(x)):
    for h in range(num_heads):
      shared = h * num_kv_heads // num_heads
      scores = keys[: t + 1, shared] @ queries[t, h] / np.sqrt(head_dim)
      weights = np.exp(scores - scores.max())
      mixed[t, h] = weights @ values[: t + 1, shared] / weights.sum()
  flat = mixed.reshape(len(x), -1)
  return flat @ tensors['midlayer.self_attn.o_proj.weight'].T


def rotated(sizes: dict, x: np.ndarray) -> np.ndarray:
  """Each head of `[T, H, D]` turned by its position: dimension i and i + D/2
  are a pair."""
  rope = sizes.get('rope_parameters') or sizes
  half = x.shape[-1] // 2
  wavelengths = (
    2 * np.pi * rope.get('rope_theta', 10_000.0) ** (np.arange(half) / half)
  )
  frequencies = 2 * np.pi / stretched(sizes, wavelengths)
  angles = np.arange(len(x))[:, None, None] * frequencies
  first, second = x[..., :half], x[..., half:]
  return np.concatenate(
    [
      first * np.cos(angles) - second * np.sin(angles),
      second * np.cos(angles) + first * np.sin(angles),
    ],
    axis=-1,
  )


def stretched(sizes: dict, wavelengths: np.ndarray) -> np.ndarray:
  """Wavelengths as Llama 3.1 stretches them: long ones by a factor, short ones
  not, and frequencies between the two in between."""
  scaling = sizes.get('rope_parameters') or sizes.get('rope_scaling') or {}
  if scaling.get('rope_type', 'default') == 'default':
    return wavelengths
  assert scaling['rope_type'] == 'llama3'
  length = scaling['original_max_position_embeddings']
  low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
  kept = (length / wavelengths - low) / (high - low)
  kept = np.minimum(np.maximum(kept, 0), 1)
  return wavelengths / (kept + (1 - kept) / scaling['factor'])


def norm(folder: Folder, name: str, x: np.ndarray) -> np.ndarray:
  mean_square = np.mean(x**2, axis=-1, keepdims=True)
  epsilon = folder.sizes.get('rms_norm_eps', 1e-6)
  return x / np.sqrt(mean_square + epsilon) * folder.tensors[f'{name}.weight']
