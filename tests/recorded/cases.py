"""What is decoded: each drafter, tree, rule and change of the logits, with the
doors through which it is recorded."""

from typing import Any, NamedTuple

from specdec_jax.assembly import drafters, rules

TEXTS = (
  'live ten dog eight yes jumps then.',
  'two over echo over echo.',
  'seas stars away birds sort live where.',
)
MAX_INPUT_TOKENS = 64
NUM_NEW = 8

PYTHON, STREAM, FLAGS, GIN, T5X = 'python', 'stream', 'flags', 'gin', 't5x'
DOORS = (PYTHON, FLAGS, GIN)
# The row of the tables whose texts are streamed, too.
STREAMED = 'model'

Options = dict[str, Any]


class Case(NamedTuple):
  """How texts are decoded.

  Attributes:
    target: the folder of the target.
    drafter: a name of `--drafter`.
    drafter_options: its options; `{folder}` is the folder of the checkpoints.
    rule: a name of `--verification`.
    rule_options: its options.
    temperature: 0 is greedy.
    logits: options that change the logits.
    load: options of the models, by their names in Python and of flags.
    flags: more flags of `generate`.
    bindings: more gin bindings of `infer`.
    doors: through which the texts are decoded.
  """

  target: str = 'target'
  drafter: str = 'none'
  drafter_options: Options = {}
  rule: str = 'speculative_sampling'
  rule_options: Options = {}
  temperature: float = 0.0
  logits: Options = {}
  load: Options = {}
  flags: tuple[str, ...] = ()
  bindings: Options = {}
  doors: tuple[str, ...] = DOORS

  @property
  def draft_model(self) -> str | None:
    """The folder of the drafter's weights, if it has any."""
    if self.drafter == 'model':
      return 'llama_draft' if self.target == 'llama' else 'model'
    has_weights = self.drafter in ('eagle', 'spec_drafter', 'block_heads')
    return self.drafter if has_weights else None


DRAFTERS: dict[str, Options] = {
  'none': {},
  'prompt_lookup': {'gamma': 3, 'max_ngram': 2, 'min_ngram': 1},
  'suffix': {'gamma': 3, 'suffix_text': '{folder}/texts.txt'},
  'ngram': {'gamma': 2, 'ngram_text': '{folder}/texts.txt'},
  'uniform': {'gamma': 2},
  'model': {'gamma': 3},
  'quantized': {'gamma': 3, 'bits': 4, 'layers': 1},
  'eagle': {'gamma': 3, 'lookup': True},
  'spec_drafter': {'gamma': 3},
  'block_heads': {'gamma': 2},
  'grammar': {'gamma': 2},
}
TREES: dict[str, Options] = {
  'prompt_lookup': {'gamma': 2, 'num_continuations': 3, 'min_ngram': 1},
  'model': {'gamma': 3, 'tree': (0, 0, 0, 1, 1, 4)},
  'quantized': {'gamma': 2, 'tree': 4},
  'eagle': {'gamma': 2, 'tree': 5},
}
TREE_RULES = ('traversal', 'target_sample_walk')
# Of a rule: options that show in the tokens, and the temperature for it.
RULES: dict[str, tuple[Options, float]] = {
  'speculative_sampling': ({'lenience': 0.3}, 1.0),
  'greedy': ({'lenience': 0.3}, 0.0),
  'block': ({}, 1.0),
  'top_beta': ({'beta': 4, 'tau': 3.0}, 0.0),
}
# The first token can be forced, or some kept from it, and `min_new_tokens`
# hides `min_length`.
LOGITS: dict[str, Options] = {
  'processors': {
    'repetition_penalty': 1.2,
    'presence_penalty': -0.3,
    'frequency_penalty': -0.3,
    'no_repeat_ngram_size': 2,
    'encoder_repetition_penalty': 1.5,
    'encoder_no_repeat_ngram_size': 2,
    'min_new_tokens': 5,
    'logit_bias': {1: 2.5, 55: 2.0},
    'sequence_bias': [[[12, 34], -6.0], [[42], 4.0]],
    'suppress_tokens': [17],
    'begin_suppress_tokens': [34],
    'bad_words_ids': [[55, 38]],
    'forced_eos_token_id': 11,
    'forced_decoder_ids': [[3, 12]],
  },
  'forced': {'forced_bos_token_id': 9, 'min_length': 7, 'logit_bias': {1: 4.0}},
  'drawn': {'top_k': 10, 'top_p': 0.9, 'min_p': 0.02, 'typical_p': 0.8},
}
REGEX = '(two|ten) (dogs|stars)'
# How weights, caches and calls are kept.
MODELS: dict[str, Options] = {
  'bfloat16': {'dtype': 'bfloat16'},
  'exact_bits': {'dtype': 'bfloat16', 'exact_bits': True},
  'int8 weights': {'weights': 'int8'},
  'int8 cache': {'cache_dtype': 'int8'},
}
# What `infer` alone does.
INFER: dict[str, tuple[str, Options]] = {
  'with scores': ('model', {'infer.mode': "'predict_with_aux'"}),
  'score': ('none', {'infer.mode': "'score'"}),
  'beams': ('none', {'Decoding.num_decodes': 3}),
  'drafted beams': ('model', {'Decoding.num_decodes': 3}),
  'all beams': (
    'none',
    {'Decoding.num_decodes': 2, 'Decoding.return_all_decodes': True},
  ),
  'samples': (
    'model',
    {'Decoding.num_samples': 2, 'Decoding.temperature': 1.0},
  ),
}
# What `generate` alone writes.
GENERATE: dict[str, tuple[str, ...]] = {
  'likeliest tokens': ('--top_logprobs', '2'),
  'a stop string': ('--stop', "'"),
  'samples': ('--num_return_sequences', '2', '--temperature', '1.0'),
}


def target_of(drafter: str) -> str:
  """Returns the folder of a target for which there is such a drafter."""
  return 'llama' if drafter == 'eagle' else 'target'


def _of_drafter(drafter: str, options: Options, **fields: Any) -> Case:
  return Case(
    target=target_of(drafter),
    drafter=drafter,
    drafter_options=options,
    **fields,
  )


def _drafters() -> dict[str, Case]:
  """Each drafter and tree, greedy through all doors and sampled in Python."""
  cases = {}
  for kind, table in (('drafter', DRAFTERS), ('tree', TREES)):
    for name, options in table.items():
      is_streamed = kind == 'drafter' and name == STREAMED
      doors = (*DOORS, STREAM) if is_streamed else DOORS
      cases[f'{kind} {name}, greedy'] = _of_drafter(name, options, doors=doors)
      cases[f'{kind} {name}, sampled'] = _of_drafter(
        name, options, temperature=1.0, doors=(PYTHON,)
      )
  return cases


def _rules() -> dict[str, Case]:
  cases = {}
  for rule, (options, temperature) in RULES.items():
    cases[f'rule {rule}'] = _of_drafter(
      'model',
      DRAFTERS['model'],
      rule=rule,
      rule_options=options,
      temperature=temperature,
    )
  for rule in TREE_RULES:
    cases[f'tree rule {rule}'] = _of_drafter(
      'model', TREES['model'], rule=rule, temperature=1.0
    )
  return cases


def _logits() -> dict[str, Case]:
  cases = {}
  for name, options in LOGITS.items():
    temperature = 1.0 if name == 'drawn' else 0.0
    cases[f'logits {name}, draft model'] = _of_drafter(
      'model',
      DRAFTERS['model'],
      temperature=temperature,
      logits=options,
      doors=(*DOORS, STREAM),
    )
    cases[f'logits {name}, prompt lookup'] = _of_drafter(
      'prompt_lookup',
      DRAFTERS['prompt_lookup'],
      temperature=temperature,
      logits=options,
      doors=(PYTHON, T5X),
    )
  return cases


def _grammars() -> dict[str, Case]:
  """Texts that match a grammar, which drafts what it leaves no choice of."""
  return {
    f'grammar, {drafter}': _of_drafter(
      drafter, DRAFTERS[drafter], logits={'regex': REGEX}
    )
    for drafter in ('grammar', 'model')
  }


def _models() -> dict[str, Case]:
  return {
    f'model {name}': Case(
      target='llama',
      drafter='model',
      drafter_options=DRAFTERS['model'],
      load=options,
    )
    for name, options in MODELS.items()
  }


def _commands() -> dict[str, Case]:
  cases = {}
  for name, (drafter, bindings) in INFER.items():
    cases[f'infer {name}'] = _of_drafter(
      drafter, DRAFTERS[drafter], bindings=bindings, doors=(GIN,)
    )
  for name, flags in GENERATE.items():
    cases[f'generate {name}'] = _of_drafter(
      'model', DRAFTERS['model'], flags=flags, doors=(FLAGS,)
    )
  return cases


_ALL: dict[str, Case] = {
  **_drafters(),
  **_rules(),
  **_logits(),
  **_grammars(),
  **_models(),
  **_commands(),
}
# Those whose drafter and rule are there: some are in extras.
CASES = {
  name: case
  for name, case in _ALL.items()
  if case.drafter in drafters.DRAFTERS and case.rule in rules.RULES
}
