"""Vocabularies and token files: `specdec data vocabulary`, `data prepare`."""

import hashlib
import io
import json
import re

import numpy as np
import pytest

from specdec_jax.cli import main
from specdec_jax.text import sentencepiece_vocabulary
from specdec_jax.training.data import preparation, token_files
from tests.edits import cut, edit_files

pytest.importorskip('sentencepiece')
pytest.importorskip('rich')

SIZE = 300


TEXT = (
  'tool library package documentation measurement of development files query '
  'network protocol graphical interface server music video jukebox wizard'
)


def sentence(i):
  words = TEXT.split()
  return ' '.join(words[(i * k + k) % len(words)] for k in range(1, 3 + i % 9))


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpora') / 'pairs'
  folder.mkdir()
  for split, count in {'train': 60, 'test': 9}.items():
    lines = [
      {'inputs': sentence(i), 'targets': f'{sentence(i)} Größe', 'group': 'g'}
      for i in range(count)
    ]
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / f'{split}.jsonl').write_text(text)
  return folder


@pytest.fixture(scope='module')
def model(corpus):
  path = corpus.parent / 'spm.model'
  assert train(corpus, path) == 0
  return path


def train(corpus, path, size=SIZE):
  arguments = ['--inputs', str(corpus), '--out', str(path), '--size', str(size)]
  return main.main(['data', 'vocabulary', *arguments])


def prepare(inputs, model, out, *options):
  arguments = ['--vocabulary', str(model), '--out', str(out)]
  return main.main(
    ['data', 'prepare', '--inputs', str(inputs), *arguments, *options]
  )


def test_vocabularies_are_reproducible_and_lossless(corpus, model, tmp_path):
  assert train(corpus, tmp_path / 'again.model') == 0
  assert (tmp_path / 'again.model').read_bytes() == model.read_bytes()
  vocabulary = sentencepiece_vocabulary.load(model, extra_ids=0)
  processor = vocabulary.processor
  assert vocabulary.vocab_size == SIZE
  ids = processor.pad_id(), processor.eos_id(), processor.unk_id()
  assert (*ids, processor.bos_id()) == (0, 1, 2, -1)
  text = 'A „Zitat“ … of 1024 Ж 中'
  assert vocabulary.decode(vocabulary.encode(text)) == text


def test_too_little_text_for_a_vocabulary(corpus, tmp_path, capfd):
  assert train(corpus, tmp_path / 'large.model', 8192) == 2
  (complaint,) = capfd.readouterr().err.splitlines()
  assert 'no vocabulary of 8192 can be trained on this text: Voc' in complaint
  assert train(corpus, tmp_path / 'small.model', 10) == 2
  assert not list(tmp_path.iterdir())


def test_a_vocabulary_of_a_file_of_no_text(tmp_path, capfd):
  (tmp_path / 'a.md').write_text('text')
  assert train(tmp_path / 'a.md', tmp_path / 'spm.model') == 2
  assert '.jsonl, .tsv, .txt' in capfd.readouterr().err


def test_examples_come_back(corpus, model, tmp_path):
  for name in ('out', 'again'):
    assert prepare(corpus, model, tmp_path / name) == 0
  for name in ('train.npz', 'test.npz', 'tokens.json', 'spiece.model'):
    contents = [
      (tmp_path / out / name).read_bytes() for out in ('out', 'again')
    ]
    assert contents[0] == contents[1]
  tokens = token_files.load(tmp_path / 'out' / 'test.npz')
  assert len(tokens) == 9
  assert tokens.targets.tokens.dtype == np.uint16
  vocabulary = sentencepiece_vocabulary.load(model, extra_ids=0)
  for i in range(9):
    inputs, targets = tokens.inputs[i], tokens.targets[i]
    assert inputs[-1] == targets[-1] == 1
    assert vocabulary.decode(inputs) == sentence(i)
    assert vocabulary.decode(targets) == f'{sentence(i)} Größe'


def test_the_description(corpus, model, tmp_path):
  assert prepare(corpus, model, tmp_path / 'out') == 0
  description = token_files.load_description(tmp_path / 'out')
  token_files.check_vocabulary(tmp_path / 'out', model.read_bytes())
  with pytest.raises(ValueError, match='made with vocabulary'):
    token_files.check_vocabulary(tmp_path / 'out', b'another')
  assert description.at('vocabulary').count('size') == SIZE
  for split, counts in description.at('splits').values.items():
    path = tmp_path / 'out' / f'{split}.npz'
    tokens = token_files.load(path)
    assert counts['examples'] == counts['read'] == len(tokens)
    assert counts['target_tokens'] == tokens.targets.tokens.size
    content = path.read_bytes()
    assert counts['sha256'] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize('too_long', ['drop', 'trim'])
def test_long_pairs(corpus, model, tmp_path, too_long):
  limits = ['--max_input_tokens', '8', '--max_target_tokens', '12']
  options = [*limits, '--too_long', too_long]
  assert prepare(corpus, model, tmp_path / 'all') == 0
  assert prepare(corpus, model, tmp_path / 'out', *options) == 0
  every = token_files.load(tmp_path / 'all' / 'train.npz')
  kept = token_files.load(tmp_path / 'out' / 'train.npz')
  description = token_files.load_description(tmp_path / 'out')
  counts = description.at('splits').at('train').values
  is_long = (every.inputs.lengths > 8) | (every.targets.lengths > 12)
  assert 0 < is_long.sum() < 60
  if too_long == 'drop':
    assert counts['dropped'] == is_long.sum()
    rows = np.flatnonzero(~is_long)
  else:
    assert counts['trimmed'] == is_long.sum()
    rows = np.arange(60)
  assert len(kept) == len(rows)
  for i, row in enumerate(rows):
    inputs, targets = every.inputs[row], every.targets[row]
    assert kept.targets[i].tolist() == targets[:12].tolist()
    # An input still ends in EOS; a target that goes on does not.
    ended = [*inputs[:7], 1] if len(inputs) > 8 else inputs
    assert kept.inputs[i].tolist() == list(ended)


def test_long_texts_in_parts(model, tmp_path):
  texts = [sentence(i) for i in range(9)]
  (tmp_path / 'lm.txt').write_text('\n'.join(texts) + '\n')
  options = ['--max_target_tokens', '10', '--too_long', 'split']
  assert prepare(tmp_path / 'lm.txt', model, tmp_path / 'out', *options) == 0
  tokens = token_files.load(tmp_path / 'out' / 'lm.npz')
  assert tokens.inputs is None
  assert len(tokens) > 9
  assert tokens.targets.lengths.max() <= 10
  vocabulary = sentencepiece_vocabulary.load(model, extra_ids=0)
  flat = tokens.targets.tokens
  rows = np.split(flat, np.flatnonzero(flat == 1) + 1)[:-1]
  assert [vocabulary.decode(row) for row in rows] == texts


def test_tables_and_prefixes(model, tmp_path, capfd):
  (tmp_path / 'a.tsv').write_text('tool\tpackage\nof\tlibrary\n')
  inputs = tmp_path / 'a.tsv'
  assert prepare(inputs, model, tmp_path / 'out', '--prefix', 'of: ') == 0
  tokens = token_files.load(tmp_path / 'out' / 'a.npz')
  vocabulary = sentencepiece_vocabulary.load(model, extra_ids=0)
  assert vocabulary.decode(tokens.inputs[1]) == 'of: of'
  assert vocabulary.decode(tokens.targets[1]) == 'library'
  (tmp_path / 'b.txt').write_text('tool\n')
  options = ['--prefix', 'of: ']
  assert prepare(tmp_path / 'b.txt', model, tmp_path / 'no', *options) == 2
  assert 'b.txt has no inputs' in capfd.readouterr().err
  (tmp_path / 'b.jsonl').write_text('{"text": "tool"}\n')
  assert prepare(tmp_path, model, tmp_path / 'no') == 2
  assert 'b.jsonl and' in capfd.readouterr().err


@pytest.mark.parametrize(
  ('name', 'text', 'reason'),
  [
    ('a.tsv', 'one\ttwo\none\n', 'a.tsv, line 2 has 1 columns, and 2 are'),
    (
      'a.jsonl',
      '{"inputs": "x"}\n',
      'line 1 needs the strings "inputs" .*keys: .inputs',
    ),
    (
      'a.jsonl',
      '{"text": "x", "inputs": "y", "targets": "z"}\n',
      '"text" alone; .*keys',
    ),
    ('a.jsonl', '{"text": "x"\n', 'a.jsonl, line 1 is not JSON'),
    ('a.jsonl', '{"text": "x"}\n{"inputs": "x", "targets": "y"}\n', 'lines wi'),
    (
      'a.jsonl',
      f'{{"inputs": "{"tool " * 99}", "targets": "y"}}\n{{"text": "x"}}\n',
      'lines with inputs and lines without',
    ),
    ('a.txt', 'tool ' * 99, 'no example left of 1: 1 exceed 64 input or 64'),
    ('a.txt', '', 'a.txt holds no example'),
    ('a.txt', b'\xff\n', 'is not UTF-8 text'),
    ('a.jsonl', '{"text": "\\ud800"}\n', 'line 1 is not valid Unicode'),
    ('a.md', 'text', r'neither a text file \(.jsonl, .tsv, .txt\)'),
  ],
)
def test_malformed_text(model, tmp_path, capfd, name, text, reason):
  path = tmp_path / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  assert prepare(path, model, tmp_path / 'out') == 2
  (complaint,) = capfd.readouterr().err.splitlines()
  assert re.search(reason, complaint)
  assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_file_that_is_no_vocabulary(corpus, tmp_path, capfd):
  (tmp_path / 'bad.model').write_bytes(b'no model')
  assert prepare(corpus, tmp_path / 'bad.model', tmp_path / 'out') == 2
  assert 'no SentencePiece' in capfd.readouterr().err


def test_large_token_ids_come_back(tmp_path):
  tokens = token_files.from_rows([[5, 1], [1]], [[6, 7, 1], [70_000, 1]])
  assert tokens.targets.tokens.dtype == np.int32
  token_files.save(tmp_path / 'a.npz', tokens)
  loaded = token_files.load(tmp_path / 'a.npz')
  assert loaded.targets[1].tolist() == [70_000, 1]


def one_array(contents: bytes) -> bytes:
  del contents
  file = io.BytesIO()
  np.save(file, np.arange(5, dtype=np.int32))
  return file.getvalue()


@pytest.mark.parametrize(
  'edit',
  [
    cut(-60),
    cut(90),
    b'',
    b'text',
    one_array,
  ],
  ids=['cut', 'much cut', 'empty', 'text', 'one array'],
)
def test_what_is_no_token_file_is_refused(tmp_path, edit):
  tokens = token_files.from_rows([[5, 1], [1]], [[6, 7, 1], [70_000, 1]])
  token_files.save(tmp_path / 'a.npz', tokens)
  edit_files(tmp_path, {'a.npz': edit})
  with pytest.raises(ValueError, match='not a token file'):
    token_files.load(tmp_path / 'a.npz')


def _targets(tokens, offsets) -> dict:
  return {'targets': tokens, 'target_offsets': np.asarray(offsets)}


FLAT, ENDS = np.array([6, 7, 1, 70_000, 1], np.int32), np.array([0, 5])
BAD_ARRAYS = {
  'no targets': ({'other': FLAT}, r"it has \['other'\]"),
  'offsets that end early': (_targets(FLAT, [0, 3]), r'offsets.*5 tokens'),
  'fractions': (_targets(FLAT + 0.5, ENDS), 'no token ids'),
  'negative ids': (_targets(-FLAT, ENDS), 'no token ids'),
  'strings': (_targets(FLAT.astype(str), ENDS), 'no token ids'),
  'ids of two axes': (_targets(FLAT[None], ENDS), 'no token ids'),
  'offsets of two axes': (_targets(FLAT, ENDS[None]), 'no token ids'),
  'offsets as floats': (_targets(FLAT, ENDS * 1.0), 'no token ids'),
  'no axes': (_targets(FLAT[0], ENDS[0]), 'no token ids'),
}


@pytest.mark.parametrize(
  ('arrays', 'message'), BAD_ARRAYS.values(), ids=BAD_ARRAYS
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, arrays, message):
  path = tmp_path / 'a.npz'
  np.savez(path, **arrays)
  with pytest.raises(ValueError, match=message):
    token_files.load(path)


def test_a_missing_description_is_named(tmp_path):
  with pytest.raises(ValueError, match=r'tokens\.json'):
    token_files.load_description(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\n \n')
  assert list(preparation.read(path)) == [(None, 'a\u2028b')]
