"""What turns out wrong once a model is at hand, or is to be had."""

import json
import sys

import jax
import pytest

from specdec_jax.assembly import decoder
from specdec_jax.checkpoints import gguf
from tests.checkpoints import tiny_models
from tests.cli import tiny
from tests.cli.tiny import assert_refused
from tests.edits import edit_files


@pytest.fixture
def generate(run, model):
  def call(*options):
    has_prompt = any(str(each).startswith('--prompt') for each in options)
    prompt = () if has_prompt else ('--prompt', 'the in ab')
    usual = ('--model', model, '--max_new_tokens', '8')
    return run('generate', *usual, *prompt, *options)

  return call


@pytest.fixture
def files(tmp_path):
  """A folder with models and texts that are damaged, and some that are not."""
  whole = tmp_path / 'tiny.gguf'
  config = tiny_models.make_config()
  params = tiny_models.make_params(config)
  tiny_models.write_gguf(whole, config, params)
  assert gguf.read_config(whole).vocab_size == config.vocab_size
  mamba = {'general.architecture': 'mamba'}
  tiny_models.write_gguf(
    tmp_path / 'mamba.gguf', config, params, metadata=mamba
  )
  edit_files(
    tmp_path,
    {
      'cut.gguf': whole.read_bytes()[:-1000],
      'short.gguf': b'GGUF',
      'text.gguf': b'not a model',
      'prompts.txt': 'ab',
      'long.txt': 'ab\n' + ' the' * 200,
      'empty.txt': b'',
      'binary.txt': b'\xff',
      'line_3.txt': b'{\n\n"\xff"',
    },
  )
  return tmp_path


NGRAM = '--drafter=ngram'
REFUSED = {
  'unknown model': (['--model=gpt-5'], 'no model', 'smollm2'),
  'no name': (['--model='], 'no model', 'smollm2'),
  'no such GGUF': (['--model=/no/such.gguf'], 'no model', 'smollm2'),
  'unknown draft model': (['--draft_model=gpt-5'], "'gpt-5'"),
  'no model in the folder': (['--model={files}'], '{files}'),
  'cut': (['--model={files}/cut.gguf'], '{files}/cut.gguf', 'truncated'),
  '4 bytes': (['--model={files}/short.gguf'], '{files}/short.gguf'),
  'no GGUF': (['--model={files}/text.gguf'], '{files}/text.gguf'),
  'Mamba': (['--model={files}/mamba.gguf'], '{files}/mamba.gguf', 'mamba'),
  'large gamma': (['--gamma=128'], 'gamma 128', 'context of 128'),
  'long prompt': ([f'--prompt={" the" * 200}'], '200 tokens', '128'),
  'long text': (['--max_new_tokens=124'], 'max_new_tokens to 12'),
  'very long text': (['--max_new_tokens=999999999999'], '128'),
  'long second prompt': (['--prompts={files}/long.txt'], 'prompt 2 has 200'),
  'gamma of plain decoding': (
    ['--drafter=none', '--gamma=128'],
    'gamma only with exact_bits',
  ),
  'no text to count': (
    [NGRAM, '--ngram_text={files}/none.txt'],
    *('ngram_text', 'No such file'),
  ),
  'empty text': ([NGRAM, '--ngram_text={files}/empty.txt'], 'holds no text'),
  'binary text': ([NGRAM, '--ngram_text={files}/binary.txt'], 'not UTF-8'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_models_and_files_do_not_allow(generate, files, case):
  flags, *parts = REFUSED[case]
  named = lambda text: text.replace('{files}', str(files))
  assert_refused(generate(*map(named, flags)), *map(named, parts))


def test_a_repository_without_a_network(generate, monkeypatch):
  constants = pytest.importorskip('huggingface_hub.constants')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  assert_refused(generate('--model', 'hf:no/such'), 'hf:no/such', 'network')
  assert_refused(generate('--model', 'hf:nosuch'), 'hf:organisation/name')


def test_differing_vocabularies_name_the_first_ids(generate, make_model):
  tokens = tiny.make_tokens()
  tokens[10], tokens[11] = tokens[11], tokens[10]
  other = make_model('swapped', tokenizer=tiny.make_tokenizer(tokens))
  assert_refused(generate('--draft_model', other), 'id 10')


def test_a_model_without_a_chat_template(generate, make_model):
  plain = make_model('plain', chat_template=None)
  assert_refused(generate('--model', plain, '--chat'), 'no chat template')


@pytest.mark.parametrize(
  'option',
  [
    ('--drafter=suffix', '--suffix_text'),
    ('--drafter=ngram', '--ngram_text'),
    ('--drafter=none', '--json_schema'),
  ],
  ids=lambda option: option[-1],
)
@pytest.mark.parametrize(
  ('name', 'reason'),
  [
    ('none.txt', 'cannot read {path}: No such file or directory'),
    ('', 'cannot read {path}: Is a directory'),
    (
      'line_3.txt',
      '{path}, line 3 is not UTF-8 text: invalid start byte at byte 4',
    ),
  ],
  ids=['no file', 'folder', 'no UTF-8'],
)
def test_a_file_of_an_option_that_is_no_text(
  generate, files, option, name, reason
):
  """Says which option, which file and why, in words."""
  path = files / name
  result = generate(*option, path)
  reason = reason.format(path=path)
  assert_refused(result, f'error: {option[-1].removeprefix("--")}: {reason}')
  assert 'Errno' not in result.err


@pytest.mark.parametrize('option', ['--json', '--trace'])
@pytest.mark.parametrize(
  ('path', 'parts'),
  [
    ('{files}/none/out', ['{option} {files}/none/out', 'no folder']),
    ('{files}', ['a folder']),
    ('', ['empty']),
    ('{files}/./prompts.txt', ['--prompts and {option} are both']),
  ],
  ids=['no folder', 'folder', 'empty', 'prompts'],
)
def test_outputs_that_cannot_be_written(
  generate, files, option, path, parts, monkeypatch
):
  """They are found before the model is loaded, and harm no other file."""
  monkeypatch.setattr(decoder, 'build', None)
  prompts = files / 'prompts.txt'
  path, *parts = (
    text.format(files=files, option=option) for text in (path, *parts)
  )
  assert_refused(generate('--prompts', prompts, option, path), *parts)
  assert prompts.read_text() == 'ab'


def test_outputs_must_differ(generate, tmp_path):
  path = tmp_path / 'out'
  result = generate('--json', path, '--trace', path)
  assert_refused(result, '--json', '--trace', 'both')
  assert_refused(generate('--trace', '-'), '--trace needs')
  assert not path.exists()


@pytest.mark.parametrize('option', ['--json', '--trace'])
def test_a_full_disk(generate, option):
  result = generate(option, '/dev/full')
  assert result.status == 2
  assert result.err == 'specdec: error: /dev/full: No space left on device\n'


def test_a_disk_that_fills_up(generate, tmp_path):
  path = tmp_path / 'out.jsonl'
  with tiny.files_of_at_most(600):  # Enough for what it says.
    result = generate('--json', path, '--max_new_tokens', '100')
  assert result.status == 2
  kept, error = result.err.splitlines()
  (begun,) = tmp_path.iterdir()
  assert kept.endswith(f'what this run wrote is in {begun}')
  assert error == f'specdec: error: {path}: File too large'


@pytest.mark.parametrize('options', [(), ('--json', '-')])
def test_standard_output_on_a_full_disk(generate, monkeypatch, options):
  with open('/dev/full', 'w') as full:
    monkeypatch.setattr(sys, 'stdout', full)
    result = generate(*options)
    # As Python does at its end, when an error would add lines of its own.
    full.flush()
  assert result.status == 2
  assert result.err == (
    'specdec: error: standard output: No space left on device\n'
  )


def test_a_platform_that_is_not_there(generate, monkeypatch):
  def devices():
    raise RuntimeError("Unable to initialize backend 'tpu': none\nfound")

  monkeypatch.setattr(jax, 'devices', devices)
  assert_refused(generate(), "backend 'tpu'")


@pytest.mark.parametrize(
  ('error', 'status', 'part'),
  [
    (KeyError('layers'), 1, "KeyError: 'layers'"),
    (ValueError('odd\nshape'), 2, 'ValueError: odd shape'),
    (MemoryError(), 2, 'out of memory'),
    (RuntimeError('RESOURCE_EXHAUSTED: 9 GB'), 2, 'out of memory'),
    (RuntimeError('INTERNAL: Out of memory allocating 9'), 2, 'out of memory'),
  ],
)
def test_bugs_can_be_diagnosed(generate, monkeypatch, error, status, part):
  def fail(*args, **kwargs):
    raise error

  monkeypatch.setattr(decoder, 'build', fail)
  result = generate()
  assert result.status == status
  assert result.err.startswith('specdec: error: ')
  assert part in result.err
  assert result.err.count('\n') == 1
  monkeypatch.setenv('SPECDEC_TRACEBACK', '1')
  with pytest.raises(type(error)):
    generate()


def burst_at_q(tensors):
  """The embedding of one token overflows bfloat16, though not float32."""
  q = tiny.make_tokens().index('Q')
  tensors['token_embedder/embedding'][q] = 3.4e38
  tensors['logits_dense/kernel'][:, q] = 0


@pytest.mark.parametrize('options', [(), ('--trace',), ('--color', 'always')])
def test_logits_that_are_no_numbers(generate, make_model, tmp_path, options):
  if options == ('--trace',):
    options = ('--trace', tmp_path / 'trace.jsonl')
  path = tmp_path / 'out.jsonl'
  burst_model = make_model('burst', change=tiny.burst)
  result = generate('--model', burst_model, '--json', path, *options)
  assert result.status == 2
  assert tiny.without_styles(result.out).strip() == ''
  assert result.err.count('\n') == 1
  assert 'prompt 1: after 0 new' in result.err
  assert '(NaN)' in result.err
  record = json.loads(path.read_text())
  assert (record['text'], record['tokens']) == ('', [])
  assert 'NaN' in record['error']


def test_one_row_of_no_numbers_leaves_the_others_alone(
  generate, make_model, tmp_path
):
  path = tmp_path / 'prompts.txt'
  path.write_text('the in\nthe Q\nab ab\n')
  options = (
    *('--model', make_model('burst_at_q', change=burst_at_q)),
    *('--dtype', 'bfloat16', '--prompts', path, '--json', '-'),
  )
  result = generate(*options, '--batch_size', '3')
  assert result.status == 2
  assert result.err.startswith('specdec: error: prompt 2: ')
  assert result.err.count('\n') == 1
  records = result.records()
  assert [len(record['tokens']) for record in records] == [8, 0, 8]
  assert ['error' in record for record in records] == [False, True, False]
  # Alone, one after another, they fare the same; sums over other shapes of
  # batches may round otherwise.
  alone = generate(*options).records()
  take = lambda lines: [line.pop('log_probs', []) for line in lines]
  of_alone, of_batch = take(alone), take(records)
  assert alone == records
  for one, other in zip(of_alone, of_batch, strict=True):
    assert one == pytest.approx(other, rel=1e-6)
