"""Command-line options that subcommands share, and the checks on them."""

import argparse
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.assembly.rules import RULES
from specdec_jax.assembly.text_settings import TextSettings
from specdec_jax.launch import gin_launch
from specdec_jax.launch.numbers import json_object, positive_int
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.launch.visible_text import visible_lines
from specdec_jax.models.presets import DTYPES

Group = argparse._ArgumentGroup

DEFAULT_MODEL = 'smollm2-135m'
SIZES = 'of a T5X checkpoint: a name such as t5_1_1_small, or a model.json'
# Arguments of `--dtype`.
DTYPE: Mapping[str, Any] = {'choices': DTYPES, 'default': 'float32'}


def weights(text: str) -> str:
  """Checks an argument of `--weights`, as an argparse type."""
  # In fewer bits a target is for experiments in Python.
  if not re.fullmatch(r'int[48](:[1-9][0-9]*)?', text):
    raise argparse.ArgumentTypeError(
      f'must be int8, int4 or, with a scale per 64 weights, int4:64, got {text}'
    )
  return text


# Flags that several commands share.
_SHARED: Mapping[str, Mapping[str, Any]] = {
  'weights': {
    'metavar': 'INT',
    'type': weights,
    'help': "quantize the target's matrices: int8, int4, or int4:64 with a "
    'scale per 64 weights (default: none, stored in --dtype)',
  },
  'cache_dtype': {
    'choices': ('int8',),
    'help': "quantize the target's KV cache, with a scale per position and "
    'head (default: none, stored in --dtype)',
  },
  'exact_bits': {
    'action': 'store_true',
    'help': 'always call the target on the same number of positions, so that '
    'greedy text equals plain decoding at that width, also in bfloat16',
  },
  'forget': {
    'action': 'store_true',
    'help': 'first forget the gammas that were measured on this machine',
  },
  'measure_gamma': {
    'action': 'store_true',
    'help': 'before the job, decode its first rows (at most 128) with several '
    'gammas, and use the fastest; for runs without --gamma',
  },
  'chat': {'action': 'store_true', 'help': "apply the model's chat template"},
  'system': {'metavar': 'TEXT', 'help': 'the system message of a chat'},
  'chat_template_kwargs': {
    'metavar': 'JSON',
    'type': json_object,
    'help': 'variables passed to the chat template, such as '
    '\'{"enable_thinking": '
    "false}'",
  },
  'stop': {
    'metavar': 'TEXT',
    'action': 'append',
    'help': 'stop string: end a text before the first occurrence of TEXT; may '
    "be repeated (default: the model's stop_strings)",
  },
}


class Parser(argparse.ArgumentParser):
  """A parser whose errors are one line, without the usage."""

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Refuses unknown arguments, so that the error names the subcommand."""
    # argparse does not support flags such as --gin.NAME=VALUE.
    if self.get_default('gin_bindings') is not None:
      args = gin_launch.expand(args)
    # argparse would leave unknown arguments to the parser of `specdec` itself.
    parsed, rest = super().parse_known_args(args, namespace)
    if rest:
      message = f'unrecognized arguments: {" ".join(rest)}'
      # From --gama=3 to --gama.
      flags = [word.split('=')[0] for word in rest if word.startswith('--')]
      if flags:
        message += did_you_mean(flags[0], self._flags(), cutoff=0.7)
      self.error(message)
    return parsed, rest

  def error(self, message: str) -> NoReturn:
    line = f'{self.prog}: error: {message} ({self.prog} --help lists all)\n'
    self.exit(2, visible_lines(line))

  def _flags(self) -> list[str]:
    """Returns the flags that the help lists."""
    return re.findall(r'(?m)^  (?:-\w, )?(--\w+)', self.format_help())


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
  """Appends the default to the help of an option, unless it is None, False or
  empty."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    default = action.default
    if default is None or default is False or default == '':
      return action.help
    if isinstance(default, list):
      # As on the command line: several arguments.
      return f'{action.help} (default: {" ".join(map(str, default))})'
    return super()._get_help_string(action)


def add_timing(parser: argparse.ArgumentParser) -> Group:
  """Adds options of timing; returns the group."""
  group = parser.add_argument_group('timing')
  add = group.add_argument
  add(
    '--repeats',
    type=positive_int,
    default=5,
    help='timed runs per configuration',
  )
  add(
    '--plain_dtypes',
    nargs='+',
    choices=DTYPES,
    default=list(DTYPES),
    help='dtypes of plain decoding, of which the fastest is the baseline',
  )
  return group


def add_models(parser: argparse.ArgumentParser) -> None:
  """Adds the models, the drafter and the rule."""
  group = parser.add_argument_group('models')
  add = group.add_argument
  add(
    '--model',
    default=DEFAULT_MODEL,
    help='the target: a model of this package such as ende-mini, a .gguf '
    'file, a Hugging Face folder, a checkpoint of T5X or of specdec convert, '
    'hf:organisation/name, or random:t5_1_1_small for random weights',
  )
  add('--config', metavar='SIZES', help=SIZES)
  add(
    '--vocabulary',
    metavar='PATH',
    help='a SentencePiece model or a folder with a vocabulary, for target and '
    'draft model (default: the one beside the weights)',
  )
  add('--revision', help='branch, tag or commit of an hf: model')
  add(
    '--draft_model',
    help='the weights of the drafter, named like --model: a smaller model, an '
    'EAGLE-3 network, a Spec-Drafter or heads (default: the one this package '
    'has for --model and --drafter)',
  )
  add('--draft_config', metavar='SIZES', help='sizes of the draft model')
  add('--dtype', **DTYPE, help='of weights and caches')
  add('--draft_dtype', choices=DTYPES, help='(default: that of --dtype)')
  add_shared(group, 'weights', 'cache_dtype')
  add(
    '--drafter',
    choices=DRAFTERS,
    help='the drafting method (default: that of --draft_model; without it, '
    'the one this package has for --model, else prompt_lookup)',
  )
  add_flags(group, DRAFTERS.values())
  add(
    '--verification',
    choices=RULES,
    default='speculative_sampling',
    help='the acceptance rule',
  )
  add_flags(group, RULES.values())


def add_flags(
  group: Group, choices: Iterable[type], but: Collection[str] = ()
) -> None:
  """Adds the flags of several configs, without duplicates and without `but`."""
  added = set(but)
  for config in choices:
    for name, field in options_of(config).items():
      # Most of DRAFTERS have `gamma`: the first of them adds --gamma.
      if name in added:
        continue
      added.add(name)
      text = field.metadata['help']
      default = field.default
      if isinstance(default, bool):
        group.add_argument(
          f'--{name}', action='store_const', const=True, help=text
        )
        continue
      # The default is only shown: the namespace has None for a flag that is
      # not given, so that a flag of another config can be refused.
      if default not in (None, ''):
        text += f' (default: {default:g})'
      value_type = field.metadata['type'] or type(default)
      metavar = 'FILE' if value_type is str else None
      group.add_argument(
        f'--{name}', type=value_type, help=text, metavar=metavar
      )


def add_sampling(parser: argparse.ArgumentParser) -> Group:
  """Adds options of sampling; returns the group."""
  group = parser.add_argument_group('sampling')
  for name, field in options_of(TextSettings).items():
    value_type, text = field.metadata['type'], field.metadata['help']
    group.add_argument(
      f'--{name}', type=value_type, default=field.default, help=text
    )
  # Reports state the temperature.
  parser.set_defaults(temperature=0.0)
  group.add_argument('--seed', type=int, default=0, help='random seed')
  return group


def add_prompts(parser: argparse.ArgumentParser) -> Group:
  """Adds prompts and batch sizes; returns the group."""
  group = parser.add_argument_group('prompts')
  source = group.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='one prompt')
  source.add_argument(
    '--prompts',
    metavar='FILE',
    help='a prompt per line, or JSONL with "prompt", or with "messages" and '
    'optionally "tools"; - reads standard input',
  )
  add = group.add_argument
  add_shared(group, 'chat', 'system', 'chat_template_kwargs')
  add('--max_new_tokens', type=int, default=128, help='per prompt')
  add('--batch_size', type=int, default=1, help='rows decoded at once')
  add(
    '--num_devices', type=int, default=1, help='devices that share each batch'
  )
  return group


def add_shared(group: argparse._ActionsContainer, *names: str) -> None:
  """Adds flags that several commands share."""
  for name in names:
    group.add_argument(f'--{name}', **_SHARED[name])


def add_report(
  parser: argparse.ArgumentParser,
  text: str = 'write the figures',
  *,
  shown: str = 'table',
) -> None:
  """Adds --color and --json to a command that prints figures."""
  text += f'; - writes to standard output, instead of the {shown}'
  add_output(parser).add_argument('--json', metavar='OUT', help=text)


def add_output(parser: argparse.ArgumentParser) -> Group:
  """Adds --color; returns the group."""
  group = parser.add_argument_group('output')
  colors = ('auto', 'always', 'never')
  group.add_argument('--color', choices=colors, default='auto')
  return group
