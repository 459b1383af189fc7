"""A model in several GGUF files, and where tensors lie in a file."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import formats, gguf, loading
from specdec_jax.checkpoints.gguf import container
from specdec_jax.cli.main import main
from specdec_jax.models import llama
from specdec_jax.models.llama import RopeScaling
from tests.checkpoints.tiny_models import (
  assert_trees_equal,
  load,
  make_config,
  make_params,
  write_gguf,
)

gguf_package = pytest.importorskip('gguf')
pytest.importorskip('tokenizers')

CONFIG = make_config(is_tied=False, rope_scaling=RopeScaling(factor=32.0))
DIVISORS = llama.rope_divisors(
  CONFIG.rope_scaling, base=CONFIG.rope_base, head_dim=CONFIG.head_dim
)


def write_split(folder, **splitting):
  """Writes a model in several files, of which the last has the output weights
  and the divisors of scaled rotary positions; returns their paths."""
  params = make_params(CONFIG)
  kernel = np.asarray(params['logits_dense']['kernel'])
  write_gguf(
    folder / 'tiny.gguf',
    CONFIG,
    params,
    omit=('output.weight',),
    extra={
      'output.weight': np.ascontiguousarray(kernel.T),
      'rope_freqs.weight': DIVISORS,
    },
    **(splitting or {'split_max_tensors': 8}),
  )
  return sorted(folder.glob('tiny-*.gguf'))


@pytest.mark.parametrize(
  ('num_files', 'splitting'),
  [
    # Without the second file, it is a whole model with tied embeddings.
    (2, {'split_max_tensors': 20}),
    (3, {'split_max_tensors': 8}),
    (4, {'split_max_tensors': 8, 'small_first_shard': True}),
  ],
)
def test_a_split_model_is_read_whole(tmp_path, num_files, splitting):
  paths = write_split(tmp_path, **splitting)
  assert len(paths) == num_files
  names = {each.name for each in gguf_package.GGUFReader(paths[-1]).tensors}
  assert {'output.weight', 'rope_freqs.weight'} <= names
  for path in (paths[0], paths[-1]):
    config, params, vocabulary = load(gguf, path)
    assert config == CONFIG
    assert_trees_equal(params, make_params(CONFIG))
    assert vocabulary.eos_ids[0] == 2
    # A job digests all of them.
    assert formats.parts(path) == paths


def test_a_split_model_is_converted(tmp_path):
  first = write_split(tmp_path)[0]
  copy = str(tmp_path / 'copy')
  assert main(['convert', str(first), copy, '--to', 'huggingface']) == 0
  loaded = loading.load(copy)
  assert loaded.config == CONFIG
  assert_trees_equal(loaded.params, loading.load(str(first)).params)


def test_files_that_are_not_of_one_model_are_refused(tmp_path):
  paths = write_split(tmp_path)
  first, second, third = paths
  second.rename(tmp_path / 'elsewhere.gguf')
  with pytest.raises(
    ValueError, match=r'3 files.*00002-of-00003\.gguf is miss'
  ):
    load(gguf, first)
  # The third file twice.
  shutil.copy(third, second)
  with pytest.raises(ValueError, match=r'metadata, file 3 of 3.*name 2 of 3'):
    load(gguf, first)
  # A file of a split model under another name, which its tensors do not tell.
  alone = tmp_path / 'alone.gguf'
  shutil.copy(first, alone)
  with pytest.raises(ValueError, match=r'alone.*file 1 of 3.*NAME-00001-of'):
    load(gguf, alone)


def test_a_file_that_only_seems_split_is_refused(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny-00001-of-00002.gguf'
  write_gguf(path, config, make_params(config))
  shutil.copy(path, tmp_path / 'tiny-00002-of-00002.gguf')
  with pytest.raises(ValueError, match=r'file 1 of 1 .*name 1 of 2'):
    load(gguf, path)


@pytest.mark.parametrize(
  ('stated', 'message'),
  [
    ({'split.no': 0, 'split.count': 1, 'split.tensors.count': 20}, None),
    ({'split.count': 0}, None),
    ({'split.count': 3}, 'file 1 of 3'),
    ({'split.no': 1, 'split.count': 2}, 'file 2 of 2'),
    ({'split.count': 'two'}, "split.count is 'two'"),
    ({'split.tensors.count': 4}, 'count is 4, and .* 20 tensors'),
  ],
)
def test_what_a_file_says_of_splitting(tmp_path, stated, message):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config), metadata=stated)
  if message is None:
    assert load(gguf, path)[0] == config
  else:
    with pytest.raises(ValueError, match=message):
      load(gguf, path)


def move(path, name: str, *, offset: int) -> None:
  """Writes another offset of a tensor into a file."""
  content = bytearray(path.read_bytes())
  # Name, number of axes (32 bits), the axes (64 each), type (32), offset (64).
  at = content.index(name.encode()) + len(name)
  num_axes = int.from_bytes(content[at : at + 4], 'little')
  at += 4 + 8 * num_axes + 4
  content[at : at + 8] = offset.to_bytes(8, 'little')
  path.write_bytes(content)


def offsets(path) -> dict[str, int]:
  """Offsets as the file states them, behind its header."""
  tensors = container.open_gguf(path).tensors
  start = min(info.offset for info in tensors.values())
  return {name: info.offset - start for name, info in tensors.items()}


QUERY = 'blk.0.attn_q.weight'
LAST = 'blk.1.attn_v.weight'
OVERLAP = rf'tiny.*{QUERY}.*before tensor|before.*{QUERY}'
BAD_OFFSETS = {
  'overlaps the one before': (
    QUERY,
    lambda places: places[QUERY] - 32,
    OVERLAP,
  ),
  'overlaps the next': (QUERY, lambda places: places[QUERY] + 32, OVERLAP),
  'two in one place': (
    'blk.1.ffn_norm.weight',
    lambda places: places['blk.0.ffn_norm.weight'],
    r'blk\.\d\.ffn_norm.*blk\.\d\.ffn_norm',
  ),
  'unaligned': (
    LAST,
    lambda places: places[LAST] + 4,
    rf'{LAST} has the offset \d+, no mult',
  ),
}


@pytest.mark.parametrize(
  ('name', 'place', 'message'), BAD_OFFSETS.values(), ids=BAD_OFFSETS
)
def test_bad_offsets_are_refused(tmp_path, name, place, message):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  places = offsets(path)
  assert max(places, key=places.get) == LAST
  with open(path, 'ab') as file:
    file.write(bytes(64))  # Room for the last tensor to move.
  move(path, name, offset=place(places))
  with pytest.raises(ValueError, match=message):
    load(gguf, path)


def test_an_alignment_of_its_own(tmp_path):
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(
    path,
    config,
    make_params(config),
    metadata={'general.alignment': 128},
  )
  _, params, _ = load(gguf, path)
  assert_trees_equal(params, make_params(config))


def test_padding_between_tensors_is_none_of_them(tmp_path):
  """Tensors may lie apart, and in any order."""
  config = make_config()
  path = tmp_path / 'tiny.gguf'
  write_gguf(path, config, make_params(config))
  params = make_params(config)
  name = 'output_norm.weight'
  scale = params['decoder_norm']['scale'] = jnp.arange(32, dtype=jnp.float32)
  start = min(i.offset for i in container.open_gguf(path).tensors.values())
  content = path.read_bytes()
  at = start + -(-(len(content) - start) // 32) * 32 + 320
  padding = bytes(at - len(content))
  path.write_bytes(content + padding + np.asarray(scale).tobytes())
  move(path, name, offset=at - start)
  _, found, _ = load(gguf, path)
  assert_trees_equal(found, params)


def test_a_header_is_parsed_once_until_its_file_changes(tmp_path, monkeypatch):
  parse = container._parse_header
  parsed = []

  def parse_and_count(cursor, data):
    parsed.append(data.filename)
    return parse(cursor, data)

  monkeypatch.setattr(container, '_parse_header', parse_and_count)
  path = tmp_path / 'model.gguf'
  config = make_config()
  write_gguf(path, config, make_params(config))
  loading.load(str(path))
  assert len(parsed) == 1
  # Another file of that name is read, and its values are what one gets.
  wider = make_config(mlp_dim=2 * config.mlp_dim)
  write_gguf(path, wider, make_params(wider))
  assert loading.load(str(path)).config == wider
  assert len(parsed) == 2
