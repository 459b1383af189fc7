"""What decoders promise, in `infer`: the self-test of `exact_bits`, packed
caches and chat templates."""

# ruff: noqa: F811
import pytest

pytest.importorskip('gin')
pytest.importorskip('jinja2')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax import lazy
from specdec_jax.infer import decoding
from tests.checkpoints import tiny_t5
from tests.cli import tiny
from tests.cli.test_chat_template_doors import (  # noqa: F401
  NUM_NEW,
  OFF,
  decoder,
  expected,
  model,
  prompts_file,
)
from tests.cli.tiny import assert_refused
from tests.decoding.test_exact_bits import (  # noqa: F401
  assert_refused as self_test_fails,
)
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, records, result


def test_the_self_test_comes_before_the_first_example(
  self_test_fails, tmp_path
):
  infer_runs.write_task(tmp_path / 'task.jsonl', 4)
  command = infer_runs.argv(
    tiny_t5.write_model(tmp_path / 'model'),
    tmp_path / 'task.jsonl',
    tmp_path / 'out',
    infer_runs.gin_file('drafters/prompt_lookup.gin'),
    Decoding__exact_bits=True,
  )
  self_test_fails(*command)


def test_beams_need_their_extra(monkeypatch):
  monkeypatch.setattr(lazy, 'is_installed', lambda module: False)
  with pytest.raises(ValueError, match='of the extra contrib/beams, whose'):
    decoding.Decoding(num_decodes=2)


def test_a_dry_run_counts_the_bytes(capfd, tmp_path):
  """By gin: of 8 features in float32, 32 bytes, 8 and a scale's 4 are left."""
  task, folder = tmp_path / 'task.jsonl', tmp_path / 'model'
  infer_runs.write_task(task, 9)
  folder.mkdir()
  tiny_t5.write_model(folder)
  rows = {}
  for bound in (None, 'int8'):
    out = tmp_path / f'{bound}'
    command = infer_runs.argv(folder, task, out, CACHE_DTYPE=repr(bound))
    result = tiny.run(capfd, *command, '--dry_run')
    assert result.status == 0, result.err
    rows[bound] = infer_runs.dry_run_rows(result.out)['caches and state']
  assert rows['int8'][1] < 0.5 * rows[None][1]


@pytest.mark.slow
def test_chat_templates(run, model, expected, prompts_file, tmp_path):
  thinking, silent = expected
  how = {
    'TASK_FEATURE_LENGTHS': f"{{'inputs': 128, 'targets': {NUM_NEW}}}",
    'find.inputs_field': "'prompt'",
    'find.chat': True,
  }
  for folder, more, texts in (
    ('a', {}, [thinking, silent, silent, thinking, thinking]),
    (
      'b',
      {'find.chat_template_kwargs': repr(OFF)},
      [silent, silent, silent, thinking, silent],
    ),
  ):
    command = argv(model, prompts_file, tmp_path / folder, **how, **more)
    done = run(*command)
    assert done.status == 0, done
    found = records(result(tmp_path / folder, 'prompts'))
    assert [line['prediction'] for line in found] == texts
    assert {line['inputs']['inputs_pretokenized'] for line in found} == {'ab'}
  texts = tmp_path / 'texts.txt'
  texts.write_text('ab')
  of_texts = how | {
    'find.chat': False,
    'find.chat_template_kwargs': repr(OFF),
  }
  refused = run(*argv(model, texts, tmp_path / 'c', **of_texts))
  assert_refused(refused, 'chat_template_kwargs is for chat')
