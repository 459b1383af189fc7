"""What `measure` has for other calls: a gamma for a job, and plain decoding."""

import functools

import pytest

pytest.importorskip('sentencepiece')

import specdec_jax
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.cli import from_flags, options
from specdec_jax.measure import timing
from tests.assembly.conftest import folder  # noqa: F401
from tests.assembly.tiny_api import TEXTS
from tests.cli.test_model_options import bare, beside  # noqa: F401


@pytest.mark.slow
def test_gamma_is_measured_before_a_job_and_remembered(
  folder,  # noqa: F811
  tmp_path,
  monkeypatch,
  caplog,
):
  """Sampled, so that every gamma gives other texts."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  caplog.set_level('INFO', logger='specdec_jax')
  load = functools.partial(
    specdec_jax.load, folder, drafter='uniform', temperature=1.0
  )
  auto = load()
  texts = [TEXTS[i % 5] for i in range(18)]
  usual = {'max_new_tokens': 5, 'batch_size': 2}
  measured = list(
    specdec_jax.generate(auto, texts, measure_gamma=True, **usual)
  )
  [choice] = auto.gammas.values()
  assert choice.source == 'measure_gamma'
  assert set(choice.tokens_per_second) == {'0', '1', '3', '7'}
  assert caplog.messages[-1] == choice.sentence
  given = load(gamma=choice.gamma) if choice.gamma else load(drafter='none')
  expected = list(specdec_jax.generate(given, texts, **usual))
  assert [each.gamma for each in measured] == [choice.gamma] * len(texts)
  tokens = [each.tokens for each in expected]
  assert [each.tokens for each in measured] == tokens
  # It serves later calls, of any number of texts, and other decoders.
  for decoder in (auto, load()):
    again = list(specdec_jax.generate(decoder, texts[:3], **usual))
    assert [each.tokens for each in again] == tokens[:3]
  assert caplog.messages[-1] == choice.sentence


def test_plain_decoding_has_none_of_the_limits_of_a_lenient_rule(
  folder,  # noqa: F811
):
  """Greedy decoding reads no top_p, but the rule that drafts are checked by."""
  decoder = specdec_jax.load(
    folder, gamma=2, verification='greedy', lenience=0.5, top_p=0.9
  )
  assert timing.plain(decoder, 'bfloat16').sampling == TextSettings(
    temperature=0.0
  )


def test_plain_decoding_is_of_the_same_files(bare, beside):  # noqa: F811
  """`bench` and `calibrate` load the target once more, in other dtypes."""
  parser = options.Parser()
  options.add_models(parser)
  options.add_sampling(parser)
  options.add_prompts(parser)
  args = parser.parse_args(['--model', str(bare), '--prompt', 'a', *beside])
  decoder = from_flags.choices(args).build()
  loaded = timing.plain(decoder, 'bfloat16')
  assert loaded.config.dtype == 'bfloat16'
  assert loaded.vocabulary.vocab_size == 85
