"""What counts as a difference between two records."""

import hashlib

from tests.recorded import differences, names, programs

MODULE = """#loc1 = loc("api.py":27:0)
module @jit_iterate attributes {mhlo.num_partitions = 1 : i32} {
  func.func public @main(%arg0: tensor<2xf32> loc("f(x)['\\"'")) -> \
(tensor<2xf32> {jax.result_info = "state.tokens"}) {
    %0 = call @_where_3(%arg0) : (tensor<2xf32>) -> tensor<2xf32> loc(#loc1)
    return %0 : tensor<2xf32> loc(callsite("a" at #loc1))
  } loc(#loc1)
  func.func private @_where_3(%arg0: tensor<2xf32>) -> tensor<2xf32> {
    return %arg0 : tensor<2xf32>
  }
}
"""


def recorded(text: str) -> dict:
  digest = hashlib.sha256(text.encode()).hexdigest()
  return {'plain': [{'sha256': digest, 'text': text}]}


def test_names_and_places_are_no_part_of_a_program():
  other = MODULE.replace('_where_3', 'choose').replace('jit_iterate', 'jit_run')
  other = other.replace('state.tokens', 'tokens').replace(':27:0', ':9:1')
  text = programs.normalized(MODULE)
  assert text == programs.normalized(other)
  assert 'loc' not in text
  assert 'call @f2(%arg0)' in text


def test_an_operation_is_part_of_a_program():
  before = programs.normalized(MODULE)
  after = programs.normalized(MODULE.replace('tensor<2xf32>', 'tensor<3xf32>'))
  [summary, lines] = differences.of_programs(recorded(before), recorded(after))
  assert summary == '/programs/plain: 1 of 1 programs are gone, 1 are new'
  assert '+    return %arg0 : tensor<3xf32>' in lines
  assert not list(differences.of_programs(recorded(before), recorded(before)))


def test_each_value_that_differs_has_its_place():
  before = {'a': [{'tokens': [1, 2], 'log_probs': ['-0x1p-1']}], 'b': 1}
  after = {'a': [{'tokens': [1, 3], 'log_probs': ['-0x1p-2']}], 'c': 1}
  assert list(differences.of_values(before, after)) == [
    '/a[0]/tokens[1]: 2 before, 3 after',
    "/a[0]/log_probs[0]: '-0x1p-1' before, '-0x1p-2' after",
    '/b: is gone',
    '/c: is new',
  ]
  assert not list(differences.of_values(before, before))


def test_rows_and_sections_that_are_missing_are_differences():
  assert list(differences.of_values([{'x': 1}, {}], [{'x': 1}])) == [
    ': 2 values before, 1 after'
  ]
  sections = {'names': {'flags': {'chat': ['--model', '--seed']}}}
  others = {'names': {'flags': {'chat': ['--model', '--top_k']}}, 'outputs': {}}
  found = differences.of_records({'sections': sections}, {'sections': others})
  assert list(found) == [
    '/names/flags/chat: --seed is gone',
    '/names/flags/chat: --top_k is new',
    '/outputs: is not in the record to compare with',
  ]


def test_names_in_gin_files_and_keys_of_json():
  config = """# infer.batch = 3
from __gin__ import dynamic_registration
MODEL = None  # A macro.
infer.infer:  # A block.
  mode = 'predict'
drafter/models.Model.sizes = %MODEL
"""
  assert names.gin_names(config) == [
    'MODEL',
    'drafter/models.Model.sizes',
    'infer.infer.mode',
  ]
  value = {'rows': [{'text': 'a', 'bias': {'17': 1.0}}], 'gamma': 3}
  assert sorted(names.keys_of(value)) == [
    '.gamma',
    '.rows',
    '.rows[].bias',
    '.rows[].bias.{}',
    '.rows[].text',
  ]
