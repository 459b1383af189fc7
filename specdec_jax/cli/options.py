"""Command-line options that subcommands share, and the checks on them."""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from specdec_jax.assembly.drafters import DRAFTERS
from specdec_jax.assembly.option_fields import options_of
from specdec_jax.assembly.rules import RULES
from specdec_jax.assembly.sampling import Sampling
from specdec_jax.launch.numbers import cost, number, positive_int, share
from specdec_jax.launch.spelling import did_you_mean
from specdec_jax.models.presets import DTYPES

Group = argparse._ArgumentGroup

DEFAULT_MODEL = 'smollm2-135m'
# Drafted tokens at most, where gamma is neither said nor chosen.
GAMMA = 8
# Arguments of `--dtype`.
DTYPE: Mapping[str, Any] = {'choices': DTYPES, 'default': 'float32'}
ADAPTIVE = ('threshold', 'heuristic', 'estimate')
# Below which --adaptive threshold ends a draft.
MIN_PROB = 0.4


class Parser(argparse.ArgumentParser):
  """Answers a wrong option with one line instead of the whole usage."""

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Refuses the rest at once, so that a subcommand names itself."""
    # argparse would have the parser of `specdec` say so, which has no options.
    found, rest = super().parse_known_args(args, namespace)
    if rest:
      self.error(f'unrecognized arguments: {" ".join(rest)}')
    return found, rest

  def _check_value(self, action: argparse.Action, value: Any) -> None:
    try:
      super()._check_value(action, value)
    except argparse.ArgumentError as error:
      error.message += did_you_mean(str(value), map(str, action.choices or ()))
      raise

  def error(self, message: str) -> NoReturn:
    if message == 'argument --prompt: expected one argument':
      message += '; write --prompt=TEXT if it begins with a dash'
    # From "unrecognized arguments: --gama=3" to "--gama", and from there to
    # "--gamma".
    if message.startswith('unrecognized'):
      flag = message.removeprefix('unrecognized arguments: ').split(' ')[0]
      flag = flag.split('=')[0]
      message += did_you_mean(flag, self._option_string_actions, cutoff=0.7)
    self.exit(
      2, f'{self.prog}: error: {message} ({self.prog} --help lists all)\n'
    )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
  """Appends each default to its help, unless it says that nothing is given."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    default = action.default
    if default is None or default is False or default == '':
      return action.help
    if isinstance(default, list):
      # As they are typed: several arguments.
      return f'{action.help} (default: {" ".join(map(str, default))})'
    return super()._get_help_string(action)


seed = number(int, lambda n: 0 <= n < 2**32, 'an integer from 0 to 2**32 - 1')


def add_timing(parser: argparse.ArgumentParser) -> Group:
  """Adds how often to time, and against what; returns the group."""
  group = parser.add_argument_group('timing')
  group.add_argument(
    '--repeats', type=positive_int, default=5, help='timed runs of each'
  )
  group.add_argument(
    '--plain_dtypes',
    nargs='+',
    choices=DTYPES,
    default=list(DTYPES),
    help='plain configurations to choose the fastest from',
  )
  return group


def add_models(parser: argparse.ArgumentParser) -> None:
  """Adds the models, the drafter and the rule."""
  group = parser.add_argument_group('models')
  add = group.add_argument
  add(
    '--model',
    default=DEFAULT_MODEL,
    help=f'the target: {DEFAULT_MODEL}, a model of this package such as '
    'ende-mini, a .gguf file, a Hugging Face folder, what T5X or specdec '
    'convert wrote, hf:organisation/name, or random:t5_1_1_small '
    'for random weights of named sizes',
  )
  add(
    '--config',
    metavar='SIZES',
    help='sizes (no options) of a T5X checkpoint without a model.json: a name '
    'such as t5_1_1_small, or the path of a model.json',
  )
  add(
    '--vocabulary',
    metavar='PATH',
    help='a SentencePiece model or a folder with a vocabulary, for target and '
    'draft model (default: what lies beside each)',
  )
  add(
    '--revision',
    help='branch, tag or commit of an hf: model; also written '
    'hf:organisation/name@REVISION',
  )
  add(
    '--draft_model',
    help='the weights of the drafter: a smaller model, an EAGLE-3 network, a '
    'Spec-Drafter or heads',
  )
  add('--draft_config', metavar='SIZES', help='sizes of the draft model')
  add('--dtype', **DTYPE, help='of weights and caches')
  add(
    '--draft_dtype',
    choices=DTYPES,
    help='of the draft model (default: that of --dtype)',
  )
  add_weights(add)
  add(
    '--drafter',
    choices=DRAFTERS,
    help='the source of guesses (default: what --draft_model is for, or '
    'prompt_lookup)',
  )
  add_flags(group, DRAFTERS.values())
  _add_adaptive(add)
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
  """Adds the flags that any of some choices has, each once; none of `but`."""
  added = set(but)
  for choice in choices:
    for name, field in options_of(choice).items():
      if name not in added:
        # Of DRAFTERS, all but one have `gamma`: --gamma is added once, of the
        # first, and only prompt_lookup brings --max_ngram.
        added.add(name)
        text, default = field.metadata['help'], field.default
        if isinstance(default, bool):
          group.add_argument(
            f'--{name}', action='store_const', const=True, help=text
          )
          continue
        # The namespace has None where nothing is said, so that an option of
        # another choice can be told from a default.
        if default not in (None, ''):
          text += f' (default: {default:g})'
        kind = field.metadata['type'] or type(field.default)
        metavar = 'FILE' if kind is str else None
        group.add_argument(f'--{name}', type=kind, help=text, metavar=metavar)


def _add_adaptive(add: Callable) -> None:
  """Adds how far a draft model goes, up to --gamma."""
  add(
    '--adaptive',
    choices=ADAPTIVE,
    help='let a draft model stop before gamma, still lossless: at a token that '
    'it doubts; by two more tokens after full acceptance and one less '
    'otherwise; or at the best gamma for the acceptance rate of late',
  )
  add(
    '--min_prob',
    type=share,
    help='with --adaptive: a drafted token to which the draft model gives less '
    f'is the last of its draft (default: {MIN_PROB} for threshold, else 0)',
  )
  add(
    '--draft_cost',
    metavar='C',
    type=cost,
    help='for --adaptive estimate: time of a drafted token over that of a '
    'target run, c of `calibrate`',
  )


def add_weights(add: Callable) -> None:
  """Adds of how many bits the target's weights are."""
  add(
    '--weights',
    metavar='INT',
    help="keep the target's matrices as integers: int8, int4, or int4:64 with "
    'a scale for each 64 weights (default: in --dtype)',
  )


def add_sampling(parser: argparse.ArgumentParser) -> Group:
  """Adds how tokens are sampled; returns the group."""
  group = parser.add_argument_group('sampling')
  for name, field in options_of(Sampling).items():
    kind, text = field.metadata['type'], field.metadata['help']
    group.add_argument(f'--{name}', type=kind, default=field.default, help=text)
  group.add_argument('--seed', type=seed, default=0, help='of all draws')
  return group


def add_prompts(parser: argparse.ArgumentParser) -> Group:
  """Adds what to decode, and how much of it at once; returns the group."""
  group = parser.add_argument_group('prompts')
  add = group.add_argument
  # Either is needed, and never both.
  source = group.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='one prompt')
  source.add_argument(
    '--prompts',
    metavar='FILE',
    help='one prompt per line, or JSONL with "prompt", or with "messages" and '
    'perhaps "tools" for the chat template; - reads standard input',
  )
  add_chat(add)
  add('--max_new_tokens', type=positive_int, default=128, help='per row')
  add('--batch_size', type=positive_int, default=1, help='rows decoded at once')
  add(
    '--num_devices',
    type=positive_int,
    default=1,
    help='devices that share the rows of a batch',
  )
  return group


def add_exact_bits(group: Group) -> None:
  """Adds whether drafts may change the last bits of logits."""
  group.add_argument(
    '--exact_bits',
    action='store_true',
    help='call the target at one width, drafts or not, so that greedy text is '
    'that of plain decoding in bfloat16 too: of --drafter none with this flag '
    'and the same --gamma',
  )


def add_forget(parser: argparse.ArgumentParser) -> None:
  """Adds whether earlier choices of gamma count."""
  parser.add_argument(
    '--forget',
    action='store_true',
    help='first forget which gammas were chosen on this machine',
  )


def add_chat(add: Callable) -> None:
  """Adds how a prompt becomes a message to the model."""
  add('--chat', action='store_true', help="apply the model's chat template")
  add(
    '--system',
    metavar='TEXT',
    help='with --chat: the message of the system, before each prompt',
  )


def add_stop(add: Callable) -> None:
  """Adds the strings that end a text."""
  add(
    '--stop',
    metavar='TEXT',
    action='append',
    help='end a text before the first occurrence of TEXT, which can span '
    'tokens; may be given several times. Special tokens are no text',
  )


def add_report(
  parser: argparse.ArgumentParser,
  text: str = 'write the figures',
  *,
  shown: str = 'table',
) -> None:
  """Adds whether to colour a table, or to write its figures."""
  add_output(parser).add_argument(
    '--json',
    metavar='OUT',
    help=f'{text}; - writes to standard output, instead of the {shown}',
  )


def add_output(parser: argparse.ArgumentParser) -> Group:
  """Adds whether to colour what is printed; returns the group."""
  group = parser.add_argument_group('output')
  group.add_argument(
    '--color',
    choices=('auto', 'always', 'never'),
    default='auto',
    help='auto colours a terminal',
  )
  return group
