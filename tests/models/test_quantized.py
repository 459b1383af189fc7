"""Packed weights, and the drafter that is the target in few bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import verification
from specdec_jax.assembly.decoder import own_params
from specdec_jax.assembly.drafters import Quantized
from specdec_jax.assembly.drafters.choice import Target
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.base import Params
from specdec_jax.models import families, layers, products, quantized
from specdec_jax.models.drafting import draft_vocabulary
from specdec_jax.models.quantized import SCALE, Bits
from specdec_jax.sharding import mesh
from tests import decoders, slow, toy, toy_gemma, toy_t5, trial
from tests.cli import tiny

V = 12
ROWS = [[3, 4, 5], [2], [7, 9], [10, 4, 4]]
CONFIGS = {
  'Llama': toy.llama_config(V, num_layers=3),
  'Llama, tied, windows': toy.llama_config(
    V, num_layers=3, is_tied=True, windows=(3, 0)
  ),
  'T5': toy_t5.config(V, num_layers=2),
  'T5, tied': toy_t5.config(V, num_layers=2, is_tied=True),
  'T5, decoder only': toy_t5.config(V, num_layers=2, num_encoder_layers=0),
  'Gemma 3': toy_gemma.decoder(V),
  'T5Gemma': toy_gemma.encoder_decoder(V),
}
every_network = slow.parametrize('name', CONFIGS, now=['Llama'])


def params_of(name: str, seed: int = 1):
  config = CONFIGS[name]
  make = toy.llama_params if 'Llama' in name else toy_t5.params
  if 'Gemma' in name:
    make = toy_gemma.params
  return make(config, seed=seed)


def prompt_of(name: str):
  has_encoder = families.has_encoder(CONFIGS[name])
  return toy.prompt(ROWS, width=3, encoder_rows=ROWS if has_encoder else None)


def whole(params):
  """The tree with the weights that packed ones stand for."""
  found = {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      found[name] = whole(leaf)
    elif name + SCALE in params:
      found[name] = quantized.unpacked(leaf, params[name + SCALE])
    elif not name.endswith(SCALE):
      found[name] = leaf
  return found


def logits_of(name: str, params):
  model, prompt = toy.compiled(families.language_model(CONFIGS[name])), None
  prompt = prompt_of(name)
  cache = model.init(params, prompt, 24)
  return np.asarray(model.extend(params, prompt.decoder_tokens, cache)[0])


@pytest.mark.parametrize('bits', [8, 4, 3])
@pytest.mark.parametrize('group', [None, 4])
def test_integers_are_the_nearest(bits, group):
  rng = np.random.default_rng(bits)
  kernel = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32).at[:, 5].set(0)
  tree = quantized.packed({'kernel': kernel}, Bits(bits, group))
  values, scale = tree['kernel'], tree['kernel' + SCALE]
  assert values.shape == kernel.shape
  assert values.dtype == jnp.int8
  assert scale.shape == (8 // group if group else 1, 6)
  assert scale.dtype == jnp.float32
  numbers = np.asarray(values, np.int32)
  limit = 2 ** (bits - 1)
  assert -limit <= numbers.min()
  assert numbers.max() <= limit - 1
  errors = np.abs(quantized.unpacked(values, scale) - kernel)
  each = np.repeat(scale, 8 // scale.shape[0], axis=0)
  assert np.all(errors <= 0.5001 * each)
  # The largest of each that share a scale uses the last integer.
  for part in np.split(numbers[:, :5], scale.shape[0]):
    assert np.all(np.abs(part).max(axis=0) >= limit - 1)
  assert not numbers[:, 5].any()


@pytest.mark.parametrize('group', [None, 4])
@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('name', ['kernel', 'embedding'])
def test_products_in_bfloat16_are_summed_in_float32(name, rows, group):
  rng = np.random.default_rng(0)
  matrix = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
  x = jnp.asarray(rng.normal(size=(rows, 1, 8)), jnp.bfloat16)
  tree = quantized.packed({name: matrix}, Bits(8, group))
  pair, axis = (tree[name], tree[name + SCALE]), int(name == 'embedding')
  found = jax.jit(quantized.product, static_argnums=3)(x, *pair, axis)
  weights = np.asarray(quantized.unpacked(*pair), np.float64)
  expected = np.asarray(x, np.float64) @ (weights.T if axis else weights)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_qwix_packs_the_same():
  qarray = pytest.importorskip('qwix._src.core.qarray')
  kernel = jnp.asarray(
    np.random.default_rng(0).normal(size=(8, 6)), jnp.float32
  )
  for bits, group in ((8, None), (4, None), (4, 4)):
    how = qarray.HowToQuantize(
      qtype=jnp.int8 if bits == 8 else jnp.int4,
      channelwise_axes=(1,),
      tiled_axes={0: group} if group else {},
    )
    expected = qarray.quantize(kernel, how)
    found = quantized.packed({'kernel': kernel}, Bits(bits, group))
    np.testing.assert_array_equal(
      np.asarray(found['kernel'], np.int32),
      np.asarray(expected.qvalue, np.int32),
    )
    np.testing.assert_allclose(
      found['kernel' + SCALE], expected.scale, rtol=1e-6
    )


@pytest.mark.parametrize(
  'text', ['int9', 'int', '4', 'int4:0', 'int4:', 'int1']
)
def test_other_weights_are_refused(text):
  with pytest.raises(ValueError, match='none of int8, int4'):
    Model(checkpoint='smollm2-135m', weights=text)


def test_a_group_divides():
  with pytest.raises(ValueError, match=r'groups of 3 .* an axis of 8'):
    quantized.packed({'kernel': jnp.ones((8, 6))}, Bits(4, 3))


@pytest.mark.slow
@every_network
@pytest.mark.parametrize('bits', [Bits(8), Bits(4, 2)])
def test_a_packed_network_is_that_of_its_weights(name, bits):
  """Projections, embeddings and logits, with copies for CPUs and without."""
  config, params = CONFIGS[name], params_of(name)
  packed = quantized.packed(params, bits)
  expected = logits_of(name, whole(packed))
  copied = products.with_cpu_copies(packed, is_tied=config.is_tied)
  for tree in (packed, copied):
    np.testing.assert_allclose(
      logits_of(name, tree), expected, rtol=1e-4, atol=1e-4
    )
  assert np.abs(expected - logits_of(name, params)).max() > 1e-3
  # Shapes without weights are those of the weights.
  shapes = quantized.packed(families.param_shapes(config), bits)
  like = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
  assert like(shapes) == like(packed)
  kind = jnp.int8 if bits.bits == 8 else jnp.int4
  embedding = families.network(config).token_embedder(shapes)['embedding']
  assert embedding.dtype == kind
  assert layers.num_params(packed) == layers.num_params(params)
  # What is packed so already is left as it is.
  again = jax.tree.leaves(quantized.packed(packed, bits))
  pairs = zip(again, jax.tree.leaves(packed), strict=True)
  assert all(one is other for one, other in pairs)


@slow.parametrize('name', ['Llama', 'Llama, tied, windows'], now=['Llama'])
def test_a_draft_vocabulary_cuts_packed_weights(name):
  config, ids = CONFIGS[name], np.array([1, 4, 7], np.int32)
  packed = quantized.packed(params_of(name), Bits(8))
  cut = draft_vocabulary.with_logits_of(packed, ids, is_tied=config.is_tied)
  found, expected = logits_of(name, cut), logits_of(name, packed)
  np.testing.assert_allclose(found, expected[..., ids], rtol=1e-5, atol=1e-5)


def made_for(name: str, temperature: float = 0.0, **options):
  """A drafter of two tokens, and from a target's parameters its own."""
  target = Target(
    name=name,
    config=CONFIGS[name],
    vocabulary=None,
    sampling=TextSettings(temperature=temperature),
  )
  made = Quantized(**options).make(target, Fixed(2))
  return made.drafter, lambda params: made.join(params, ())


@every_network
@pytest.mark.parametrize('layers_', [None, 1])
def test_greedy_tokens_are_the_targets(name, layers_):
  params = params_of(name)
  drafter, join = made_for(name, bits=4, layers=layers_)
  model, prompt = families.language_model(CONFIGS[name]), prompt_of(name)
  greedy = {'to_probs': decoders.GREEDY}
  plain = decoders.plain(model, Params(params), prompt, **greedy)
  both = Params(params, join(params))
  found = decoders.speculate(model, both, drafter, prompt, **greedy)
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  counts = found.statistics
  assert 0 < counts.num_accepted.sum() <= counts.num_tested.sum()


@pytest.mark.slow
def test_all_bits_and_layers_accept_everything():
  """A target that is packed already drafts for itself without a mistake."""
  name = 'Llama'
  packed = quantized.packed(params_of(name), Bits(8))
  drafter, join = made_for(name, bits=8)
  model, prompt = families.language_model(CONFIGS[name]), prompt_of(name)
  found = decoders.speculate(
    model,
    Params(packed, join(packed)),
    drafter,
    prompt,
    to_probs=decoders.GREEDY,
    rule='greedy',
  )
  counts = found.statistics
  assert counts.num_accepted.sum() == counts.num_tested.sum() > 0


@slow.parametrize(
  ('layers_', 'kept'),
  [
    (None, (0, 1, 2, 3, 4, 5)),
    (4, (0, 2, 3, 5)),
    ('::2', (0, 2, 4)),
    (':2', (0, 1)),
    ('0,1,5', (0, 1, 5)),
    ([0, 3], (0, 3)),
  ],
  now=[(4, (0, 2, 3, 5)), ('::2', (0, 2, 4))],
)
def test_layers_that_draft(layers_, kept):
  from specdec_jax.assembly.drafters import quantized as choice

  assert choice._layer_numbers(layers_, 6) == kept
  config = toy.llama_config(V, num_layers=6, windows=(1, 2, 3))
  short = choice._shortened(config, 'num_layers', kept)
  assert short.num_layers == len(kept)
  assert short.windows == tuple((1, 2, 3)[i % 3] for i in kept)


@pytest.mark.parametrize('layers_', ['::2', '1::2', 1, ':2', ':3'])
def test_an_encoder_keeps_its_windows(layers_):
  from specdec_jax.assembly.drafters import quantized as choice

  config = toy_gemma.encoder_decoder(V, num_layers=6, windows=(4096, 0))
  shorten = functools.partial(choice._shortened, config, 'num_decoder_layers')
  kept = choice._layer_numbers(layers_, 6)
  # The decoder's windows are the encoder's: 4096, 0, 4096 of three layers.
  if layers_ in ('::2', '1::2'):
    with pytest.raises(ValueError, match='windows of the encoder'):
      shorten(kept)
  else:
    short = shorten(kept)
    assert short.num_decoder_layers == len(kept)
    assert short.windows == config.windows


@pytest.mark.parametrize(
  'layers_', [0, 7, '6', '1,0', '0,0', '4:', '::x', 'all', (), (-1,)]
)
def test_layers_that_are_not_there_are_refused(layers_):
  with pytest.raises(ValueError, match=r'layers .*(some of 0 to 2|no number)'):
    made_for('Llama', layers=layers_)


def test_a_group_has_weights():
  with pytest.raises(ValueError, match='int4:0'):
    made_for('Llama', group=0)


@every_network
def test_what_is_not_packed_is_shared(name):
  config, params = CONFIGS[name], params_of(name)
  copied = products.with_cpu_copies(params, is_tied=config.is_tied)
  _, join = made_for(name, layers=1)
  own = own_params(Params(copied, join(copied)))
  # Norms, tables of positions, the encoder, and embeddings that are only read.
  for path, leaf in jax.tree.leaves_with_path(own):
    name = path[-1].key
    assert name.endswith(SCALE) or quantized.is_packed(leaf), path
    assert config.is_tied or 'embedding' not in name
    assert 'encoder' not in [part.key for part in path]
  shapes = families.param_shapes(config)
  of_shapes = own_params(Params(shapes, join(shapes)))
  num_bytes, least, whole = map(mesh.tree_bytes, (own, of_shapes, params))
  # On a CPU 4 bits take a byte.
  assert 0.5 * num_bytes < least < num_bytes < 0.6 * whole


G_TEST = 'Packed weights through the compiled loop, false alarm rate 1e-9'


def _trial(name: str):
  """A target of packed weights, and a drafter of fewer bits and layers."""
  config = toy.llama_config(4, num_layers=2)
  params = toy.llama_params(config, seed=1)
  if name == 'T5':
    config = toy_t5.config(4, num_layers=2)
    params = toy_t5.params(config, seed=1, scale=2.5)
  target = Target(
    name=name,
    config=config,
    vocabulary=None,
    sampling=TextSettings(temperature=1.0),
  )
  made = Quantized(bits=3, layers=1).make(target, Fixed(2))
  packed = quantized.packed(params, Bits(8))
  return trial.Trial(
    target=families.language_model(config),
    params=Params(packed, made.join(packed, ())),
    drafter=made.drafter,
    verify_fn=verification.speculative_sampling,
    prompts=((0,), (0, 2), (2, 1, 0)),
    num_new=(4, 4, 3),
    encoder_rows=((1, 3), (2,), (3, 1, 2, 1)) if name == 'T5' else None,
    eos_id=3,
  )


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('name', ['Llama', 'T5'])
def test_the_distribution_is_the_packed_targets(name, record_property):
  result = trial.check(
    _trial(name),
    record_property,
    G_TEST,
    f'{name} in int8, drafted by a layer in 3 bits',
    num_decodes=100_800,
  )
  accepted = np.sum(result.statistics.num_accepted)
  assert 0 < accepted < np.sum(result.statistics.num_tested)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize('variant', ["the target's q", 'whole weights'])
def test_wrong_ones_are_rejected(variant):
  """Drafts of packed weights with the q of the target, and a packed target
  that is taken for one in float32."""
  right = _trial('Llama')
  own = right.params.target
  if variant == 'whole weights':
    params = right.params._replace(
      target=quantized.packed(whole(right.params.target), Bits(3))
    )

    def forward(_, ids):
      cache = right.target.init(own, toy.prompt([[0]] * len(ids)), 9)
      return right.target.extend(own, ids, cache)[0]

    broken = right._replace(params=params, forward=forward)
  else:
    inner = right.drafter

    def propose(params, row_keys, context, state):
      draft, first = inner.propose(params[0], row_keys, context, state[0])
      other, second = inner.propose(params[1], row_keys, context, state[1])
      return draft.replace(probs=other.probs), (first, second)

    own = right.params.drafter
    broken = right._replace(
      params=right.params._replace(
        drafter=(own, toy.perturb(whole(own), seed=3, scale=0.1))
      ),
      drafter=inner._replace(
        init=lambda params, prompt, max_len: tuple(
          inner.init(each, prompt, max_len) for each in params
        ),
        propose=propose,
      ),
    )
  assert trial.run(
    broken, num_decodes=trial.NUM_DECODES // 4
  ).report.is_rejected


TEXTS = ['the ab in', 'he the']


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  return tiny.write_model(tmp_path_factory.mktemp('packed') / 'model')


@pytest.mark.slow
@pytest.mark.parametrize('weights', ['int8', 'int4:8'])
def test_weights_are_packed_where_they_are_loaded(folder, weights, capfd):
  """In Python and by flags, with the drafter and without."""
  load = functools.partial(specdec_jax.load, folder, weights=weights)
  plain, drafted = load(drafter='none'), load(drafter='quantized', gamma=2)
  bits = quantized.bits_of(weights)
  assert all(
    quantized.is_packed(leaf)
    for path, leaf in jax.tree.leaves_with_path(plain.params.target)
    if path[-1].key in ('kernel', 'embedding')
  )
  expected = quantized.packed(
    specdec_jax.load(folder, drafter='none').params.target, bits
  )
  jax.tree.map(np.testing.assert_array_equal, plain.params.target, expected)
  texts = [
    [each.text for each in specdec_jax.generate(one, TEXTS, max_new_tokens=9)]
    for one in (plain, drafted)
  ]
  assert texts[0] == texts[1]
  result = tiny.run(
    capfd,
    *('generate', '--model', folder, '--weights', weights, '--json', '-'),
    *('--drafter', 'quantized', '--gamma', '2', '--max_new_tokens', '9'),
    *('--bits', '8', '--group', '4', '--layers', '1', '--prompt', TEXTS[0]),
  )
  assert (result.status, result.err) == (0, '')
  assert result.records()[0]['text'] == texts[0][0]
