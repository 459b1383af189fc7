"""The training of an EAGLE-3 network (Li et al., arXiv 2503.01840).

It is trained on texts of its target, and on the states that the target had
while it wrote them (`training.data.written_texts`). A training step unrolls the
steps of drafting: the network reads its own hidden states, but the true tokens,
since drafts after a wrong token are rejected anyway.
"""

import functools
import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specdec_jax import arrays, base
from specdec_jax.base import Array
from specdec_jax.checkpoints import loading
from specdec_jax.models.drafting.eagle import Eagle, EagleConfig
from specdec_jax.models.layers import RMSNorm, applied
from specdec_jax.models.llama import LlamaConfig
from specdec_jax.training import chunked
from specdec_jax.training.losses import ArrayTree, Batch, LossFn, LossSums

# The key of `head_digest` in the description of written texts.
HEAD_DIGEST = 'head_sha256'
# The parameters that `Eagle.project` reads.
_PROJECTION = ('decoder_norm', 'logits_dense')
# How soon `lk_loss` turns from the divergence to alpha.
_SHARPNESS = 3.0


@base.value
class TargetHead:
  """The parameters of a target that are needed besides its stored streams.

  Attributes:
    embedding: `[V, embed]`, of its tokens.
    rows: `[V, embed]`, of its logits; the embedding where they are tied.
    norm: `[embed]`, the scale of its last norm.
  """

  embedding: Array
  rows: Array
  norm: Array


def read_target(target: str, dtype: DTypeLike) -> tuple[LlamaConfig, ArrayTree]:
  """Reads a Llama-type target, named as for `--model`; else ValueError."""
  config, params = loading.read(loading.locate(target), dtype=jnp.dtype(dtype))
  check_target(target, config)
  return config, params


def check_target(target: str, config: object) -> None:
  """Raises ValueError unless the target so called has a `TargetHead`."""
  if not isinstance(config, LlamaConfig):
    raise ValueError(f'{target} is no Llama-type decoder')


def head_of(config: LlamaConfig, params: ArrayTree) -> TargetHead:
  """Takes the head of a Llama-type target, from its params."""
  embedding = params['token_embedder']['embedding']
  rows = embedding if config.is_tied else params['logits_dense']['kernel'].T
  norm = params['decoder_norm']['scale']
  return TargetHead(embedding=embedding, rows=rows, norm=norm)


def head_digest(head: TargetHead) -> str:
  """Computes a digest of a target's head, which identifies it in the texts that
  it wrote."""
  digest = hashlib.sha256()
  # As bfloat16, so that it is the same in every dtype.
  for array in (head.norm, head.rows):
    digest.update(np.asarray(array.astype(jnp.bfloat16)).tobytes())
  return digest.hexdigest()


class UnrolledAttention:
  """The attention of unrolled steps, for `Eagle`'s `mix`, called in order."""

  def __init__(self, mask: Array, scale: float):
    """`mask` is bool `[B, T, T]`: which keys of step 0 each position sees."""
    self.mask = mask
    self.scale = scale
    self.steps: list[tuple[Array, Array]] = []

  def __call__(self, queries: Array, keys: Array, values: Array) -> Array:
    self.steps.append((keys, values))
    batch, num_heads, length, head_dim = queries.shape
    by_group = (batch, keys.shape[1], -1, length, head_dim)
    # Queries by the keys that they share: 4 heads over 2 are [B, 2, 2, T, D].
    scaled = queries * jnp.asarray(self.scale, queries.dtype)
    scaled = scaled.reshape(by_group)
    # Drafting from position t, step i, counted from 0, reads true features up
    # to t and the drafts of steps 1 to i. Here drafting starts from all t at
    # once: a query sees the keys of step 0 up to its position, in its text, and
    # the key of every later step at its position. At step 2 from position t:
    # scores over the keys of step 0 up to t, then one for each of steps 1 and 2
    # at t. One softmax runs over all of them.
    (first_keys, first_values), *later = self.steps
    scores = _product('bhgqd,bhsd->bhgqs', scaled, first_keys)
    lowest = jnp.finfo(scores.dtype).min
    scores = jnp.where(self.mask[:, None, None], scores, lowest)
    later_scores = [
      _product('bhgqd,bhqd->bhgq', scaled, step_keys)[..., None]
      for step_keys, _ in later
    ]
    scores = jnp.concatenate([scores, *later_scores], -1)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights.astype(values.dtype)
    mixed = _product('bhgqs,bhsd->bhgqd', weights[..., :length], first_values)
    for i, (_, step_values) in enumerate(later):
      share = weights[..., length + i]
      mixed += _product('bhgq,bhqd->bhgqd', share, step_values)
    mixed = mixed.reshape(batch, num_heads, length, head_dim)
    mixed = mixed.transpose(0, 2, 1, 3).astype(queries.dtype)
    return mixed.reshape(batch, length, num_heads * head_dim)


def _product(equation: str, *operands: Array) -> Array:
  return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def ahead(x: Array, distance: int) -> Array:
  """Shifts `[B, T, ...]` left by `distance`, filling with zeros."""
  # Of a row [a, b, c, d], 1 ahead is [b, c, d, 0], and 1 behind [0, a, b, c].
  padding = [(0, 0), (0, distance)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, padding)[:, distance:]


def behind(x: Array, distance: int) -> Array:
  """Shifts `[B, T, ...]` right by `distance`, filling with zeros."""
  padding = [(0, 0), (distance, 0)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, padding)[:, : x.shape[1]]


def unroll(
  config: EagleConfig,
  params: ArrayTree,
  embedding: Array,
  batch: Batch,
  features: Array,
  *,
  num_steps: int,
) -> list[Array]:
  """Computes the hidden states, `[B, T, embed]`, of every step of drafting from
  every position, which `Eagle.project` takes: at step i, counted from 0, and
  position t, the logits are those of what follows token t + i + 1.

  Parameters are in the config's dtype; `embedding`, `[V, embed]`, is of the
  target's tokens; `features` are `[B, T, k * target_embed]`.
  """
  tokens = batch['decoder_target_tokens']
  segments = batch['decoder_segment_ids']
  # Step 0 sees its own text: in segments [1, 1, 2], position 2 only itself.
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  mask = segments[:, :, None] == segments[:, None, :]
  mask &= (positions[:, None] >= positions[None, :])[None]
  mix = UnrolledAttention(mask, config.head_dim**-0.5)
  apply = applied(Eagle(config))
  hidden = [apply(params, features, method=Eagle.join)]
  nothing = jnp.zeros((0, 0, 0, 0), config.dtype)  # There is no cache.
  for i in range(num_steps):
    next_tokens = ahead(tokens, i + 1)
    rows = jnp.take(embedding, next_tokens, axis=0, mode='clip')
    rows = rows.astype(config.dtype)
    begin = jnp.full(tokens.shape[0], i, jnp.int32)
    after, *_ = apply(params, rows, hidden[-1], nothing, nothing, begin, mix)
    hidden.append(after)
  return hidden[1:]


def target_states(
  head: TargetHead, last: Array, batch: Batch, *, epsilon: float
) -> tuple[Array, Array]:
  """Computes the target's states before its logits, `[B, T, embed]`, and the
  float32 normaliser `[B, T]` of the logits, over all tokens.

  `last` is what left the target's last layer, `[B, T, embed]`. The normaliser
  is meaningless where a prompt's token follows.
  """
  # log p = logit - normaliser. Of the token that was written next, log p was
  # recorded and the logit is computed here, without those of all V.
  norm = RMSNorm(epsilon, head.rows.dtype)
  x = applied(norm)({'scale': head.norm}, last)
  next_rows = jnp.take(head.rows, ahead(batch['decoder_target_tokens'], 1), 0)
  next_logits = _product('btd,btd->bt', x, next_rows)
  return x, next_logits - ahead(batch['log_probs'], 1)


def target_log_probs(rows: Array, x: Array, normalizer: Array) -> Array:
  """Computes the target's log-probabilities of the tokens whose `rows` these
  are, float32 `[..., V_draft]`, from what `target_states` returns."""
  # At most 0 but for rounding; meaningless ones would overflow.
  logits = _product('...d,vd->...v', x, rows)
  return jnp.minimum(logits - normalizer[..., None], 0.0)


def lk_loss(log_p: Array, logits: Array) -> tuple[Array, Array, Array]:
  """Computes the LK loss (arXiv 2602.23881), its divergence, and alpha.

  alpha = sum min(p, q): a token drawn from q is accepted with that probability.
  The loss is lambda KL(p | q) + (1 - lambda) (1 - alpha), and lambda, which is
  exp(-3 alpha), counts as a constant. Sums run over the tokens that can be
  drafted; p is not renormalised, and its mass elsewhere is lost to alpha.

  `log_p` and `logits` are `[..., V_draft]`; the results float32 `[...]`.
  """
  # Of p = [.6, .3], with .1 elsewhere, and q = [.5, .5], alpha is .5 + .3.
  log_q = jax.nn.log_softmax(logits)
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  alpha = jnp.minimum(p, q).sum(-1)
  kl = (p * (log_p - log_q)).sum(-1)
  # The divergence dominates where alpha is small, and alpha where it is large.
  share = jax.lax.stop_gradient(jnp.exp(-_SHARPNESS * alpha))
  return share * kl + (1 - share) * (1 - alpha), kl, alpha


def eagle_loss(
  config: EagleConfig,
  *,
  target: str,
  num_steps: int = 4,
  decay: float = 0.8,
) -> LossFn:
  """Returns a loss: the sum over unrolled steps of `decay`^i times `lk_loss`,
  per position of a text after which tokens are drafted. `target` is a model, as
  for `--model`.

  It reports `nats`, the divergence at the first step; `accuracy`, how often the
  likeliest token of that step is the true one; `alpha_1` and so on, the mean
  alpha of every step; `coverage`, the target's mass on the draft vocabulary."""
  if num_steps < 1:
    raise ValueError(f'num_steps must be at least 1, got {num_steps}')
  target_config, target_params = read_target(target, config.dtype)
  head = head_of(target_config, target_params)
  epsilon = target_config.norm_epsilon
  sums_of = functools.partial(_loss_sums, config, decay=decay)

  def loss_fn(params, batch: Batch, key: Array | None) -> LossSums:
    del key
    ids = params['target_ids']
    rounded = jax.tree.map(lambda x: x.astype(config.dtype), params)
    rounded['target_ids'] = ids
    streams = batch['streams']
    # The last of the concatenated streams is the target's output.
    begin = streams.shape[-1] - target_config.embed_dim
    features, last = jnp.split(streams, [begin], axis=-1)
    x, normalizer = target_states(head, last, batch, epsilon=epsilon)
    hidden = unroll(
      config, rounded, head.embedding, batch, features, num_steps=num_steps
    )
    # Step i from position t goes to t + i + 1: one distribution for all steps.
    moved = lambda steps: [behind(x, i + 1) for i, x in enumerate(steps)]
    is_counted = [_is_counted(batch, i) for i in range(num_steps)]
    counted = jnp.stack(moved(is_counted), axis=2)
    hidden_there = jnp.stack(moved(hidden), axis=2)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    return chunked.summed(
      sums_of,
      {name: rounded[name] for name in _PROJECTION if name in rounded},
      flat(hidden_there),
      {
        'x': flat(x),
        'normalizer': flat(normalizer),
        'counted': flat(counted),
        'written': flat(ahead(batch['decoder_target_tokens'], 1)),
      },
      {'rows': jnp.take(head.rows, ids, axis=0), 'target_ids': ids},
      is_needed=flat(counted).any(-1),
    )

  return loss_fn


def _is_counted(batch: Batch, step: int) -> Array:
  """Marks, bool `[B, T]`, the positions from which a step of drafting has a
  loss: those from the last token but one of the prompt on."""
  segments = batch['decoder_segment_ids']
  weights = batch['decoder_loss_weights']
  # A draft from t begins with token t + 2: t + 1 is the pending token. Step i
  # drafts token t + i + 2, which has to be of the same text.
  is_first = (ahead(weights, 2) > 0) & (ahead(segments, 2) == segments)
  return is_first & (ahead(segments, step + 2) == segments)


def _loss_sums(
  config: EagleConfig,
  projection: ArrayTree,
  hidden: Array,
  target: Mapping[str, Array],
  shared: Mapping[str, Array],
  *,
  decay: float,
) -> LossSums:
  """Sums `eagle_loss` over N positions of n steps: `hidden` `[N, n, embed]`."""
  ids = shared['target_ids']
  counted = target['counted'].astype(jnp.float32)
  log_p = target_log_probs(shared['rows'], target['x'], target['normalizer'])
  params = {**projection, 'target_ids': ids}
  logits = applied(Eagle(config))(params, hidden, method=Eagle.project)
  loss, kl, alpha = lk_loss(log_p[:, None], logits)
  num_steps = hidden.shape[1]
  decays = jnp.asarray([decay**i for i in range(num_steps)], jnp.float32)
  first = counted[:, 0]
  weights = counted.sum(0)
  alphas = (alpha * counted).sum(0)
  mass = (jnp.exp(log_p).sum(-1) * first).sum()
  likeliest = jnp.take(ids, arrays.argmax(logits[:, 0]))
  is_correct = likeliest == target['written']
  figures = {
    f'alpha_{i + 1}': jnp.stack((alphas[i], weights[i]))
    for i in range(num_steps)
  }
  return LossSums(
    loss=(loss * counted * decays[None]).sum(),
    nats=(kl[:, 0] * first).sum(),
    num_correct=jnp.where(is_correct, first, 0.0).sum(),
    weight=weights[0],
    figures=figures | {'coverage': jnp.stack((mass, weights[0]))},
  )
