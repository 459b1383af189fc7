"""What examples of a task are to `specdec infer`: tokens, chats, and settings
of their own."""

import functools
import json
import re
import types

import pytest

pytest.importorskip('gin')
pytest.importorskip('sentencepiece')
pytest.importorskip('tensorstore')

from specdec_jax.checkpoints import loading
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout
from specdec_jax.models import presets
from specdec_jax.text import tasks
from tests.cli.tiny import assert_refused
from tests.infer import infer_runs
from tests.infer.infer_runs import argv, gin_file, predictions, records, result


def test_inputs_of_their_own_tokens_are_trimmed_as_t5x_does(t5):
  """A text keeps its EOS; tokens of a SeqIO task are cut where they are."""
  model = loading.load(str(t5))
  layout = Layout(
    config=model.config,
    vocabulary=model.vocabulary,
    inputs_length=4,
    targets_length=4,
  )
  (text,) = records_of('two dogs and five cats', None, layout)
  assert len(text.ids) == 4
  assert text.ids[-1] == 1
  (tokens,) = records_of('', (5, 6, 7, 8, 9, 1), layout)
  assert tokens.ids == (5, 6, 7, 8)
  assert tokens.num_cut == 2


@pytest.mark.parametrize('end', [(), (1,), (3,)])
def test_a_prompt_of_tokens_loses_whichever_eos_it_ends_with(end):
  layout = decoder_only_layout(eos_ids=(1, 3))
  (row,) = records_of('', (5, 3, 6, *end), layout)
  assert row.ids == (5, 3, 6)


@pytest.mark.parametrize('unknown', [-2, 8192])
def test_a_token_that_the_model_has_not_is_named(unknown):
  layout = decoder_only_layout(eos_ids=(1,))
  with pytest.raises(ValueError, match=f'token {unknown}, .* 0 to 8191'):
    list(records_of('', (5, unknown, 7), layout))


def decoder_only_layout(eos_ids):
  return Layout(
    config=presets.preset('lm_nano'),
    vocabulary=types.SimpleNamespace(eos_ids=eos_ids),
    inputs_length=8,
    targets_length=4,
  )


def records_of(inputs, input_ids, layout):
  example = tasks.Example(inputs=inputs, input_ids=input_ids)
  task = tasks.Task(name='task', read=lambda: iter([example]))
  return examples.encode(task, layout, 0, 1)


def test_messages_and_texts_of_chat_are_those_of_generate(run, model, tmp_path):
  path = tmp_path / 'dialogues.jsonl'
  user = {'role': 'user', 'content': 'a b'}
  answer = {'role': 'assistant', 'content': 'c'}
  lines = [{'prompt': 'a b'}, {'messages': [user, answer, user]}]
  path.write_text('\n'.join(map(json.dumps, lines)))
  chat = {
    'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
    'Decoding.batch_size': 2,
    'find.inputs_field': "'prompt'",
    'find.chat': True,
    'find.system': "'d'",
  }
  done = run(*argv(model, path, tmp_path, **chat))
  assert done.status == 0, done
  assert 'chat template' not in done.err
  generated = run(
    *('generate', '--model', model, '--prompts', path, '--max_new_tokens=12'),
    *('--chat', '--system=d', '--drafter=none', '--batch_size=2', '--json=-'),
  )
  found = records(result(tmp_path, 'dialogues'))
  texts = [each['text'] for each in generated.records()]
  assert [line['prediction'] for line in found] == texts
  assert texts[0] != texts[1]
  assert found[1]['inputs']['inputs_pretokenized'] == 'a b'
  short = chat | {'TASK_FEATURE_LENGTHS': "{'inputs': 4, 'targets': 12}"}
  refused = run(*argv(model, path, tmp_path / 'short', **short))
  assert_refused(refused, 'example 1 has messages of', 'room for 4')


def test_predictions_match_a_grammar_that_gin_binds(run, t5, task, tmp_path):
  pytest.importorskip('llguidance')
  regex = r'[a-d]{1,3}( (the|fox) (live|big)){2}\.'
  infer = functools.partial(
    argv,
    t5,
    task,
    Decoding__regex=repr(regex),
    # Room for a letter a token.
    TASK_FEATURE_LENGTHS="{'inputs': 12, 'targets': 32}",
  )
  beams = run(*infer(tmp_path / 'beams', Decoding__num_decodes=2))
  assert_refused(
    beams, 'a beam search takes no grammar (regex, json_schema, grammar)'
  )
  found = []
  for name, kind in (
    ('prompt_lookup', 'PromptLookup'),
    ('grammar', 'GrammarDrafter'),
  ):
    # Without a gamma so few examples are decoded plainly.
    gamma = {f'drafters__{kind}__gamma': 4}
    drafter = gin_file(f'drafters/{name}.gin')
    done = run(*infer(tmp_path / name, drafter, **gamma))
    assert done.status == 0, done
    found.append(predictions(result(tmp_path / name)))
    assert sum(x['aux']['accepted'] for x in records(result(tmp_path / name)))
  assert found[0] == found[1]
  assert len(found[0]) == infer_runs.NUM_EXAMPLES
  assert all(re.fullmatch(regex, text) for text in found[0])


def test_examples_have_settings_of_their_own(once, run, t5, task, tmp_path):
  path, fields = tmp_path / 'own.jsonl', "['min_new_tokens', 'bad_words_ids']"
  usual = predictions(result(once[0]))
  own = {'min_new_tokens': 14, 'bad_words_ids': [[5], [9, 3]]}
  lines = records(task)
  for line in lines[::2]:
    line |= own
  path.write_text('\n'.join(map(json.dumps, lines)))
  mixed, same = tmp_path / 'mixed', tmp_path / 'same'
  infer = functools.partial(run, *argv(t5, path, mixed))
  assert infer(f'--gin.find.settings_fields={fields}').status == 0
  bindings = {f'Decoding__{name}': value for name, value in own.items()}
  assert run(*argv(t5, task, same, **bindings)).status == 0
  found = predictions(result(mixed, 'own'))
  assert found[1::2] == usual[1::2]
  assert found[::2] == predictions(result(same))[::2] != usual[::2]
  for fields, words in (
    ("['inputs']", "'inputs' is no setting of how texts are sampled"),
    ("['temprature']", 'did you mean temperature?'),
    ("['min_new_tokens']", 'example 3: min_new_tokens should be'),
  ):
    lines[2]['min_new_tokens'] = -1
    path.write_text('\n'.join(map(json.dumps, lines)))
    assert_refused(infer(f'--gin.find.settings_fields={fields}'), words)
  long = argv(t5, task, tmp_path / 'no', Decoding__min_new_tokens=999)
  assert_refused(run(*long), "min_new_tokens 999 exceeds TASK_FEATURE_LENGTHS'")


@pytest.mark.slow
def test_examples_have_temperatures_of_their_own(once, run, t5, task, tmp_path):
  path, lines = tmp_path / 'own.jsonl', records(task)
  for line in lines[::2]:
    line['temperature'] = 0
  path.write_text('\n'.join(map(json.dumps, lines)))
  drawn = {'Decoding__temperature': 1.0, 'Decoding__top_k': 20}
  mixed, same = tmp_path / 'mixed', tmp_path / 'same'
  infer = functools.partial(argv, t5, path, mixed)
  fields = "--gin.find.settings_fields=['temperature']"
  assert run(*infer(fields, **drawn)).status == 0
  assert run(*argv(t5, task, same, **drawn)).status == 0
  found = predictions(result(mixed, 'own'))
  assert found[::2] == predictions(result(once[0]))[::2]
  assert found[1::2] == predictions(result(same))[1::2]
  lines[0]['temperature'] = 0.5
  path.write_text('\n'.join(map(json.dumps, lines)))
  assert_refused(
    run(*infer(fields, Decoding__num_decodes=2)), 'num_decodes 2 draws nothing'
  )


@pytest.mark.seqio
def test_features_of_a_seqio_task_are_settings(once, run, t5, task, tmp_path):
  """As the keys of a .jsonl; where a text is empty, nothing is said."""
  seqio = pytest.importorskip('seqio')
  pytest.importorskip('llguidance')
  import tensorflow as tf

  lines, path = records(task), tmp_path / 'lines.jsonl'
  own = {'temperature': 1.0, 'repetition_penalty': 3.0, 'suppress_tokens': [5]}
  nothing = {'temperature': 0.0, 'repetition_penalty': 1.0}
  regexes = ['', '', '[a-d]{2}( the){0,2}', '']
  told = [
    {**line, **(own if i % 2 else nothing), 'regex': regexes[i % 4]}
    for i, line in enumerate(lines)
  ]
  fields = [*own, 'regex']
  features = {
    name: [x.get(name, []) for x in told] for name in ('inputs', *fields)
  }
  features['suppress_tokens'] = tf.ragged.constant(features['suppress_tokens'])
  text = seqio.Feature(
    seqio.PassThroughVocabulary(size=1),
    add_eos=False,
    dtype=tf.string,
    rank=0,
  )
  seqio.TaskRegistry.add(
    'own_settings',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: (
        tf.data.Dataset.from_tensor_slices(features)
      ),
      splits=['test'],
    ),
    preprocessors=[],
    output_features={'inputs': text},
  )
  is_said = lambda name, x: x != '' or name != 'regex'
  path.write_text(
    '\n'.join(
      json.dumps({name: x for name, x in line.items() if is_said(name, x)})
      for line in told
    )
  )
  found = []
  for name, source in (('own_settings', 'own_settings'), ('lines', path)):
    out, flag = tmp_path / name, f'--gin.find.settings_fields={fields}'
    done = run(*argv(t5, source, out, flag))
    assert done.status == 0, done
    found.append(predictions(result(out, name)))
  assert found[0] == found[1]
  usual = predictions(result(once[0]))
  assert found[0][::4] == usual[::4]
  assert found[0][1::2] != usual[1::2]
  assert all(re.fullmatch(regexes[2], x) for x in found[0][2::4])
