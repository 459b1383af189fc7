"""Renders conversations by Hugging Face transformers, in the manner of Gemma 4.

Needs an environment of its own: transformers is no dependency of the package.

  pip install transformers==5.24.0 jinja2
  python -m tests.golden.make_gemma4_chats [--output tests/golden]

Writes gemma4_chats.json: for each conversation its messages, tools and
variables, and the text that `gemma4_template.TEMPLATE` makes of them.
"""

import argparse
import itertools
import json
import pathlib

from transformers.utils.chat_template_utils import render_jinja_template

from tests.gemma4_template import CLOSE, OPEN, TEMPLATE

THOUGHTS = f'{OPEN}thought\nHm, 3?\n{CLOSE}'
TOOL = {
  'type': 'function',
  'function': {
    'name': 'weather',
    'description': 'The weather of a city.',
    'parameters': {
      'type': 'object',
      'properties': {
        'city': {'type': 'string', 'enum': ['Rome', 'Bonn']},
        'days': {'type': 'integer', 'nullable': True},
      },
      'required': ['city'],
    },
  },
}
ARGUMENTS = {'city': 'Rome', 'days': 2, 'deep': {'a': [1, 'x', True]}}
CALL = {'type': 'function', 'function': {'name': 'weather'}}
CALL['function']['arguments'] = ARGUMENTS


def user(content):
  return {'role': 'user', 'content': content}


def answer(content, **fields):
  return {'role': 'assistant', 'content': content, **fields}


def tool(content, **fields):
  return {'role': 'tool', 'content': content, **fields}


def parts(*texts):
  return [{'type': 'text', 'text': text} for text in texts]


CALLED = [user('Rome?'), answer('', tool_calls=[CALL])]
CONVERSATIONS = [
  [user(' Hi ')],
  [{'role': 'system', 'content': ' Be brief. '}, user('Hi')],
  [user('Hi'), answer('Hello'), user('And?')],
  # Thoughts of earlier turns, also twice in one, and empty.
  [user('Hi'), answer(f'{THOUGHTS}Hello'), user('And?')],
  [
    user('Hi'),
    answer(f'{THOUGHTS}Hel{THOUGHTS}lo'),
    user('And?'),
    answer(f'{OPEN}thought\n{CLOSE}Yes'),
    user('So?'),
  ],
  # Broken off while it thought.
  [user('Hi'), answer(f'{OPEN}thought\nHm'), user('And?')],
  [user('Hi'), answer('Hello', reasoning_content='Hm'), user('And?')],
  [user(parts('a ', 'b')), answer(parts(f'{THOUGHTS}c')), user('d')],
  # Calls of tools, with and without what was thought before them.
  CALLED,
  [*CALLED, tool('20 C', name='weather')],
  [*CALLED, tool('20 C')],
  [
    user('Rome?'),
    answer('', tool_calls=[CALL], reasoning_content='Ask.'),
    tool('20 C', name='weather'),
  ],
  [
    user('Rome?'),
    answer('Wait', tool_calls=[CALL, CALL], reasoning='Ask.'),
    tool('20 C', name='weather'),
    tool('{"t": 20}', name='weather'),
    answer('It is 20.'),
    user('Bonn?'),
  ],
]
VARIABLES = [{}, {'enable_thinking': True}, {'enable_thinking': False}]


def rendered(messages, tools, variables) -> str:
  [text], _ = render_jinja_template(
    [messages],
    tools=tools,
    chat_template=TEMPLATE,
    add_generation_prompt=True,
    bos_token='<bos>',
    **variables,
  )
  return text


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  output = parser.parse_args().output
  cases = itertools.product(CONVERSATIONS, [None, [TOOL]], VARIABLES)
  chats = [
    {
      'messages': messages,
      'tools': tools,
      'variables': variables,
      'text': rendered(messages, tools, variables),
    }
    for messages, tools, variables in cases
  ]
  lines = ',\n'.join(json.dumps(chat, ensure_ascii=False) for chat in chats)
  (output / 'gemma4_chats.json').write_text(f'[\n{lines}\n]\n')
  print(len(chats), 'conversations')


if __name__ == '__main__':
  main()
