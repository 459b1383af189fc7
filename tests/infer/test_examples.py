"""Examples as `infer` encodes them, and what says that they are the same."""

import dataclasses
import json

import pytest

from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.infer import examples
from specdec_jax.infer.examples import Layout, Row
from specdec_jax.text.prompts import Dialogue
from specdec_jax.text.tasks import Example, Task


def row(ids, **fields):
  example = Example(inputs='Why?', **fields)
  return Row(index=0, example=example, ids=ids, num_cut=0)


def test_a_template_may_write_the_day_of_the_run():
  """As that of Llama 3.2 does; with the same messages it goes on tomorrow."""
  said = Dialogue([{'role': 'user', 'content': 'Why?'}])
  of = lambda ids, **fields: examples.digest([row(ids, **fields)])
  assert of((1, 2), dialogue=said) == of((1, 3), dialogue=said)
  other = dataclasses.replace(said, tools=[{'name': 'add'}])
  assert of((1, 2), dialogue=said) != of((1, 2), dialogue=other)
  assert of((1, 2)) != of((1, 3))


def test_a_refused_dialogue_is_named():
  class Vocabulary:
    eos_ids = (1,)

    def encode_chat(self, messages, tools, template_kwargs):
      raise ValueError('roles must alternate')

  layout = Layout(
    config=None, vocabulary=Vocabulary(), inputs_length=8, targets_length=8
  )
  example = Example(inputs='', dialogue=Dialogue([]))
  with pytest.raises(ValueError, match='example 4: roles must alternate'):
    examples.encode_one(3, example, layout)


def test_limits_of_a_lenient_rule_need_no_temperature():
  """They were checked as the rule reads them; an example's own are, here."""

  def found(**own):
    read = lambda: iter([Example(inputs='', settings=json.dumps(own))])
    names = ('repetition_penalty', 'top_k')
    task = Task(name='task', read=read, settings_fields=names)
    return examples.samplings(task, TextSettings(top_p=0.9))

  assert len(found(repetition_penalty=1.5)) == 2
  with pytest.raises(ValueError, match=r'example 1: .*changes nothing'):
    found(top_k=3)
