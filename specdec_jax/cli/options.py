"""Command-line options that subcommands share, and the checks on them."""

import argparse
from typing import Any, NoReturn

from specdec_jax import logits
from specdec_jax.cli import model_options
from specdec_jax.drafters.stateless import MAX_GAMMA
from specdec_jax.launch.numbers import number, positive_int
from specdec_jax.models.presets import DTYPES

DRAFTERS = ('prompt_lookup', 'ngram', 'uniform', 'model', 'none')
VERIFICATIONS = ('speculative_sampling', 'greedy', 'block')
ADAPTIVE = ('threshold', 'heuristic', 'estimate')
# What changes nothing at temperature 0.
_SAMPLING_ONLY = ('top_k', 'top_p', 'min_p')
# Under which --adaptive threshold ends a draft.
_MIN_PROB = 0.4


class Parser(argparse.ArgumentParser):
  """Answers a wrong option with one line instead of the whole usage."""

  def error(self, message: str) -> NoReturn:
    if message == 'argument --prompt: expected one argument':
      message += '; write --prompt=TEXT if it begins with a dash'
    self.exit(
      2, f'{self.prog}: error: {message} ({self.prog} --help lists all)\n'
    )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
  """Appends each default but None to its help."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    if action.default is None or action.default is False:
      return action.help
    return super()._get_help_string(action)


gamma = number(
  int, lambda n: 1 <= n <= MAX_GAMMA, f'an integer from 1 to {MAX_GAMMA}'
)
seed = number(int, lambda n: 0 <= n < 2**32, 'an integer from 0 to 2**32 - 1')
temperature = number(
  float,
  lambda x: x == 0 or logits.MIN_TEMPERATURE <= x < float('inf'),
  f'0, which is greedy, or a number of at least {logits.MIN_TEMPERATURE:g}',
)
share = number(float, lambda x: 0 <= x <= 1, 'a number in [0, 1]')
cost = number(float, lambda x: 0 <= x < float('inf'), 'a number of at least 0')
fraction = number(float, lambda x: 0 < x <= 1, 'a number in (0, 1]')


def dtypes(text: str) -> list[str]:
  """An argparse type: names of `DTYPES` with commas between."""
  names = text.split(',')
  for name in names:
    if name not in DTYPES:
      raise argparse.ArgumentTypeError(
        f'takes {" and ".join(DTYPES)} with commas between, got {name!r}'
      )
  return names


def add_timing(parser: argparse.ArgumentParser) -> Any:
  """How often, and against what; returns the group."""
  group = parser.add_argument_group('timing')
  group.add_argument(
    '--repeats', type=positive_int, default=5, help='timed runs of each'
  )
  add_plain_dtypes(group)
  return group


def add_plain_dtypes(parser: Any) -> None:
  """`--plain_dtypes`, to a parser or to a group of one."""
  parser.add_argument(
    '--plain_dtypes',
    metavar='DTYPES',
    type=dtypes,
    default=','.join(DTYPES),
    help='plain configurations to choose the fastest from',
  )


def add_models(parser: argparse.ArgumentParser) -> None:
  """The models, the drafter and the rule."""
  group = parser.add_argument_group('models')
  model_options.add_arguments(group)
  group.add_argument(
    '--drafter',
    choices=DRAFTERS,
    help='the source of guesses (default: model with --draft_model, else '
    'prompt_lookup)',
  )
  group.add_argument(
    '--gamma',
    type=gamma,
    default=8,
    help='drafted tokens an iteration, at most',
  )
  group.add_argument(
    '--max_ngram',
    type=positive_int,
    default=3,
    help='longest suffix that prompt_lookup looks up',
  )
  group.add_argument(
    '--min_ngram',
    type=positive_int,
    help='shortest suffix that prompt_lookup trusts (default: 2, or max_ngram '
    'if that is less)',
  )
  group.add_argument(
    '--ngram_text', metavar='FILE', help='the text that ngram counts'
  )
  _add_adaptive(group)
  group.add_argument(
    '--verification',
    choices=VERIFICATIONS,
    default='speculative_sampling',
    help='the acceptance rule',
  )
  group.add_argument(
    '--lenience',
    type=fraction,
    default=1.0,
    help='below 1, accepts more and is no longer lossless',
  )
  group.add_argument(
    '--dtype', choices=DTYPES, default='float32', help='of weights and caches'
  )
  group.add_argument(
    '--draft_dtype',
    choices=DTYPES,
    help='of the draft model (default: that of --dtype)',
  )


def _add_adaptive(group: Any) -> None:
  """How far a draft model goes, up to --gamma."""
  group.add_argument(
    '--adaptive',
    choices=ADAPTIVE,
    help='let a draft model stop before gamma, still lossless: at a token that '
    'it doubts; by two more tokens after full acceptance and one less '
    'otherwise; or at the best gamma for the acceptance rate of late',
  )
  group.add_argument(
    '--min_prob',
    type=share,
    help='with --adaptive: a drafted token to which the draft model gives less '
    f'is the last of its draft (default: {_MIN_PROB} for threshold, else 0)',
  )
  group.add_argument(
    '--draft_cost',
    metavar='C',
    type=cost,
    help='for --adaptive estimate: time of a drafted token over that of a '
    'target run, c of `calibrate`',
  )


def add_sampling(parser: argparse.ArgumentParser) -> Any:
  """Standardised sampling; returns the group."""
  group = parser.add_argument_group('sampling')
  group.add_argument(
    '--temperature', type=temperature, default=0.0, help='0 is greedy'
  )
  group.add_argument('--top_k', type=positive_int, help='keep the k likeliest')
  group.add_argument(
    '--top_p', type=fraction, help='keep the likeliest with this much mass'
  )
  group.add_argument(
    '--min_p',
    type=share,
    help="keep those with at least this share of the likeliest's probability",
  )
  group.add_argument('--seed', type=seed, default=0, help='of all draws')
  return group


def add_prompts(parser: argparse.ArgumentParser) -> Any:
  """What to decode, and how much of it at once; returns the group."""
  group = parser.add_argument_group('prompts')
  source = group.add_mutually_exclusive_group(required=True)
  source.add_argument('--prompt', help='one prompt')
  source.add_argument(
    '--prompts',
    metavar='FILE',
    help='one prompt a line, or JSONL with a key "prompt"; - reads standard '
    'input',
  )
  group.add_argument(
    '--chat', action='store_true', help="apply the model's chat template"
  )
  group.add_argument(
    '--system',
    metavar='TEXT',
    help='with --chat: the message of the system, before each prompt',
  )
  group.add_argument(
    '--max_new_tokens', type=positive_int, default=128, help='a row'
  )
  group.add_argument(
    '--batch_size', type=positive_int, default=1, help='rows decoded at once'
  )
  group.add_argument(
    '--num_devices',
    type=positive_int,
    default=1,
    help='devices that share the rows of a batch',
  )
  return group


def add_output(parser: argparse.ArgumentParser) -> Any:
  """Whether to colour what is printed; the group, for more options."""
  group = parser.add_argument_group('output')
  group.add_argument(
    '--color',
    choices=('auto', 'always', 'never'),
    default='auto',
    help='auto colours a terminal',
  )
  return group


def check(args: argparse.Namespace) -> None:
  """Finds options that contradict each other, before anything is loaded.

  Sets `args.drafter`, `args.draft_dtype`, `args.min_ngram` and, with
  `--adaptive`, `args.min_prob` where they were left open.

  Raises:
    ValueError: if they do.
  """
  if args.drafter is None:
    args.drafter = 'model' if args.draft_model else 'prompt_lookup'
  if args.drafter == 'model' and not args.draft_model:
    raise ValueError('--drafter model needs --draft_model')
  if args.draft_model and args.drafter != 'model':
    raise ValueError(
      f'--draft_model is for --drafter model, not {args.drafter}'
    )
  model_options.check(args)
  if args.drafter == 'ngram' and not args.ngram_text:
    raise ValueError('--drafter ngram needs --ngram_text, the text to count')
  if args.ngram_text and args.drafter != 'ngram':
    raise ValueError(f'--ngram_text is for --drafter ngram, not {args.drafter}')
  if args.draft_dtype and args.drafter != 'model':
    raise ValueError(
      f'--draft_dtype is for --drafter model, not {args.drafter}'
    )
  args.draft_dtype = args.draft_dtype or args.dtype
  _check_adaptive(args)
  if args.min_ngram is None:
    args.min_ngram = min(2, args.max_ngram)
  if args.min_ngram > args.max_ngram:
    raise ValueError(
      f'--min_ngram {args.min_ngram} exceeds --max_ngram {args.max_ngram}'
    )
  _check_rule(args)
  if args.system is not None and not args.chat:
    raise ValueError('--system is for --chat, which is not given')
  if args.batch_size % args.num_devices:
    raise ValueError(
      f'a batch of {args.batch_size} rows does not divide over '
      f'{args.num_devices} devices'
    )


def _check_rule(args: argparse.Namespace) -> None:
  """Raises ValueError unless verification and sampling fit together."""
  if args.verification == 'greedy' and args.temperature != 0:
    raise ValueError(
      '--verification greedy decodes the argmax: it needs --temperature 0, '
      f'got {args.temperature}'
    )
  # Which reads the target's probabilities at temperature 1.
  is_lenient_greedy = args.verification == 'greedy' and args.lenience < 1
  is_greedy = args.temperature == 0 and not is_lenient_greedy
  for name in _SAMPLING_ONLY:
    if is_greedy and getattr(args, name) is not None:
      raise ValueError(
        f'--{name} {getattr(args, name):g} changes nothing at --temperature 0, '
        'which is greedy: give a --temperature above 0, or leave it out'
      )
  if (
    args.lenience < 1
    and not args.temperature
    and args.verification == ('speculative_sampling')
  ):
    raise ValueError(
      f'--lenience {args.lenience:g} changes nothing at --temperature 0, where '
      'speculative sampling accepts the likeliest token alone: give '
      '--verification greedy, which accepts tokens nearly as likely'
    )
  if args.verification == 'block' and args.lenience != 1:
    raise ValueError(
      '--verification block is lossless and has no lenience, got '
      f'{args.lenience}'
    )


def _check_adaptive(args: argparse.Namespace) -> None:
  """Raises ValueError unless the options of a gamma that varies fit."""
  if args.adaptive is None:
    for name in ('min_prob', 'draft_cost'):
      if getattr(args, name) is not None:
        raise ValueError(f'--{name} is for --adaptive, which is not given')
    return
  if args.drafter != 'model':
    raise ValueError(
      f'--adaptive {args.adaptive} is for --drafter model, not {args.drafter}'
    )
  if args.adaptive == 'estimate' and args.draft_cost is None:
    raise ValueError(
      '--adaptive estimate needs --draft_cost, which `specdec calibrate` '
      'measures as c'
    )
  if args.adaptive != 'estimate' and args.draft_cost is not None:
    raise ValueError(
      f'--draft_cost is for --adaptive estimate, not {args.adaptive}'
    )
  if args.min_prob is None:
    args.min_prob = _MIN_PROB if args.adaptive == 'threshold' else 0.0
