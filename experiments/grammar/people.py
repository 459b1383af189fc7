"""Sentences about people, and the schema of what is to be extracted."""

import itertools
import json

TASK = 'Write down as JSON what is said of this person. {}'
PEOPLE = [
  f'{name} is {age} years old, works as {job} in {city} and {owns} a car.'
  for (name, age), (job, city), owns in itertools.product(
    [('Maria Keller', 41), ('John Smith', 29), ('Aiko Tanaka', 63),
     ('Omar Haddad', 35), ('Lucia Rossi', 52)],
    [('a nurse', 'Zurich'), ('a baker', 'Dublin'), ('a pilot', 'Osaka'),
     ('a teacher', 'Cairo'), ('an engineer', 'Milan')],
    ['owns', 'does not own', 'has sold', 'has just bought'],
  )
]  # fmt: skip
_SHORT = {'type': 'string', 'minLength': 1, 'maxLength': 24}
PERSON = {
  'type': 'object',
  'properties': {
    'full_name': _SHORT,
    'age_in_years': {'type': 'string', 'pattern': '^[0-9]{1,3}$'},
    'occupation': _SHORT,
    'city_of_work': _SHORT,
    'has_a_car': {'type': 'boolean'},
  },
  'additionalProperties': False,
}
PERSON['required'] = [*PERSON['properties']]


def json_of(i: int) -> str:
  """What there is to extract from a sentence."""
  sentence = PEOPLE[i % len(PEOPLE)]
  words = sentence.split()
  occupation, _, rest = sentence.partition(' works as ')[2].partition(' in ')
  values = {
    'full_name': ' '.join(words[:2]),
    'age_in_years': words[3],
    'occupation': occupation,
    'city_of_work': rest.partition(' ')[0],
    'has_a_car': ' owns ' in sentence,
  }
  return json.dumps(values, separators=(',', ':'))
