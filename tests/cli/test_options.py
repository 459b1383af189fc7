"""Options: every wrong one gets one sentence, before any model is loaded."""

import json
from pathlib import Path

import jax
import pytest

from specdec_jax import lazy
from specdec_jax.assembly import decoder, lengths
from specdec_jax.assembly.drafters import DraftModel
from specdec_jax.assembly.lengths import Fixed
from specdec_jax.assembly.models import Model
from specdec_jax.cli import from_flags, options
from specdec_jax.drafters.prompt_lookup import checked_min_ngram
from tests.cli.commands import DECODING_COMMANDS
from tests.cli.tiny import assert_refused

ROOT = Path(__file__).parents[2]
PROMPT = ('--prompt', 'hello')
PROMPTS = sorted(ROOT.glob('experiments/prompts/*.jsonl'))
COMPLAINTS = {
  'unknown drafter': (('--drafter', 'magic'), "'magic'", 'prompt_lookup'),
  'unknown verification': (('--verification', 'lax'), "'lax'", 'block'),
  'unknown dtype': (('--dtype', 'int8'), "'int8'", 'bfloat16'),
  'unknown option': (('--gama', '3'), '--gama', 'did you mean --gamma?'),
  'gin without gin': (('--gin.FOO=3',), 'arguments: --gin.FOO=3 ('),
  'gamma 0': (('--gamma', '0'), '--gamma', 'from 1 to 1024', 'got 0'),
  'gamma -1': (('--gamma=-1',), '--gamma', 'from 1 to 1024', 'got -1'),
  'gamma 1e9': (
    ('--gamma', '1000000000'),
    '--gamma: must be an integer from 1 to 1024, or auto in a command that',
  ),
  'gamma of words': (('--gamma', 'many'), '--gamma', 'got many'),
  'cold': (('--temperature=-0.1',), '--temperature', 'got -0.1'),
  'too cold': (('--temperature', '1e-40'), '--temperature', '1e-06'),
  'temperature nan': (('--temperature', 'nan'), '--temperature', 'got nan'),
  'temperature inf': (('--temperature', 'inf'), '--temperature', 'got inf'),
  'top_p 0': (('--top_p', '0'), '--top_p', '(0, 1]; 1 keeps all, got 0'),
  'top_p above 1': (('--top_p', '1.01'), '--top_p', 'keeps all, got 1.01'),
  'min_p above 1': (('--min_p', '1.01'), '--min_p', '[0, 1], got 1.01'),
  'idle min_p': (
    ('--min_p', '0.1'),
    'min_p 0.1 changes nothing at temperature 0',
  ),
  'idle top_p': (
    ('--top_p', '0.9'),
    'top_p 0.9 changes nothing at temperature 0',
  ),
  'idle top_k': (('--top_k', '4'), 'top_k 4 changes nothing at temperature 0'),
  'top_k -1': (('--top_k=-1',), '--top_k', 'at least 0'),
  'weights int3': (
    ('--weights', 'int3'),
    'must be int8, int4 or, with a scale per 64 weights, int4:64, got',
  ),
  'weights int4:0': (('--weights', 'int4:0'), '--weights', 'got int4:0'),
  'lenience 0': (('--lenience', '0'), '--lenience', '(0, 1]'),
  'negative seed': (('--seed=-1',), 'seed', 'got -1'),
  'no new tokens': (('--max_new_tokens', '0'), 'max_new_tokens', 'got 0'),
  'batch 0': (('--batch_size', '0'), 'batch_size', 'got 0'),
  'shrinking n-grams': (
    ('--max_ngram', '2', '--min_ngram', '3'),
    'min_ngram 3 exceeds max_ngram 2',
  ),
  'no draft model': (('--drafter', 'model'), 'model needs a draft model'),
  'idle draft model': (
    ('--drafter', 'uniform', '--draft_model', 'x'),
    'not uniform',
  ),
  'dtype of no draft model': (
    ('--drafter', 'suffix', '--draft_dtype', 'float32'),
    '--draft_dtype is for --draft_model, which is not given',
  ),
  'no text to count': (
    ('--drafter', 'ngram'),
    'drafter ngram needs ngram_text',
  ),
  'idle text to count': (('--ngram_text', 'x'), 'not prompt_lookup'),
  'threshold without a draft model': (
    ('--drafter', 'suffix', '--min_prob', '0.4'),
    'min_prob is for drafter model or quantized or eagle or',
    ', not suffix',
  ),
  'a tree for copies': (
    ('--drafter', 'prompt_lookup', '--tree', '4'),
    'tree is for drafter model or quantized or eagle or',
    'or none, not prompt_lookup',
  ),
  'a tree that is none': (
    ('--draft_model', 'x', '--tree', '0,0,9'),
    'tree: in a draft tree every parent comes before its child: [0, 0, 9]',
  ),
  'a tree in words': (
    ('--draft_model', 'x', '--tree', 'wide'),
    'argument --tree: must be a number of nodes, the parents of nodes',
    'got wide',
  ),
  'a path without its parent': (
    ('--draft_model', 'x', '--tree', '[(0,), (1, 0)]'),
    'tree: the tree has the path [1, 0] without [1]',
  ),
  'too many nodes': (
    ('--draft_model', 'x', '--tree', '9999'),
    'tree: a tree has 1 to 1024 nodes, got 9999',
  ),
  'a tree deeper than gamma': (
    ('--draft_model', 'x', '--tree', '0,1,2', '--gamma', '2'),
    'tree is 3 deep, and gamma is 2',
  ),
  'a tree that varies': (
    ('--draft_model', 'x', '--tree', '4', '--min_prob', '0.4'),
    'min_prob ends chains, not trees',
  ),
  'a tree to be measured': (
    ('--draft_model', 'x', '--tree', '4', '--gamma', 'auto'),
    'gamma auto and tree each say how much',
  ),
  'a tree after copies': (
    ('--drafter', 'eagle', '--draft_model', 'x', '--tree', '4', '--lookup'),
    'lookup copies chains, not trees',
  ),
  'a tree judged as a chain': (
    ('--draft_model', 'x', '--tree', '4', '--verification', 'block'),
    'verification block judges chains',
  ),
  'continuations judged leniently': (
    ('--num_continuations', '2', '--temperature', '1', '--lenience', '0.5'),
    'verification speculative_sampling judges chains',
  ),
  'a chain judged as a tree': (
    ('--verification', 'traversal'),
    'verification traversal judges trees',
  ),
  'continuations to be measured': (
    ('--num_continuations', '2', '--gamma', 'auto'),
    'gamma auto and num_continuations each say how much',
  ),
  'threshold of two': (('--min_prob', '2'), '--min_prob', '[0, 1], got 2'),
  'greedy, sampled': (
    ('--verification', 'greedy', '--temperature', '1'),
    'verification greedy needs temperature 0',
    'temperature 0, got 1.0',
  ),
  'lenience that nothing follows from': (
    ('--lenience', '0.05'),
    'lenience 0.05 changes nothing at temperature 0',
    'verification greedy',
  ),
  'lenient block': (
    ('--verification', 'block', '--lenience', '0.9'),
    'lenience is for verification speculative_sampling or greedy, not',
  ),
  'uneven mesh': (
    ('--batch_size', '3', '--num_devices', '2'),
    '3 rows do not divide over 2 devices',
  ),
  'sizes of no draft model': (
    ('--draft_config', 't5_1_1_small'),
    '--draft_config is for --draft_model',
  ),
  'system without chat': (('--system', 'x'), 'system is for chat'),
  'empty prompt': (('--prompt', ''), 'the prompt is empty'),
  'blank prompt': (('--prompt', ' \n'), 'the prompt is empty'),
  'half a character': (('--prompt', '\udcff'), 'not valid Unicode'),
  'no prompt': (('--prompt',), 'argument --prompt: expected one argument'),
  'two sources': (('--prompts', 'x'), 'not allowed with'),
}


@pytest.fixture
def no_model(monkeypatch):
  """Loading a model is an error that no test expects."""
  monkeypatch.setattr(decoder, 'build', None)


@pytest.mark.parametrize(
  'command', [name for name in DECODING_COMMANDS if name != 'calibrate']
)
@pytest.mark.parametrize('case', COMPLAINTS)
def test_a_wrong_option_gets_one_sentence(run, no_model, command, case):
  given, *parts = COMPLAINTS[case]
  prompt = () if '--prompt' in given else PROMPT
  assert_refused(run(command, *prompt, *given), *parts)


@pytest.mark.parametrize(
  ('name', 'meant'),
  [
    ('smolm2-135m', 'smollm2-135m'),
    ('Org/X-1B', 'hf:Org/X-1B'),
    ('random:lm_minni', 'lm_mini'),
  ],
)
def test_a_model_that_is_nearly_known(run, name, meant):
  outcome = run('generate', *PROMPT, '--model', name)
  assert_refused(outcome, f'did you mean {meant}?')


WRONG_COMMANDS = {
  'no command': ([], 'command'),
  'mistyped command': (['generat'], "'generat'", 'generate'),
  'no prompt': (['generate'], '--prompt', '--prompts', 'required'),
  'mistyped flag': (
    ['generate', *PROMPT, '--promt', 'a'],
    *('--promt', 'mean --prompt?'),
  ),
  'greedy samples': (
    ['generate', *PROMPT, '--num_return_sequences', '4'],
    *('--num_return_sequences 4', 'temperature 0'),
  ),
  'empty stop': (['generate', *PROMPT, '--stop', ''], 'stop string is empty'),
  'too many devices': (
    ['generate', *PROMPT, '--num_devices', '512', '--batch_size', '512'],
    'num_devices 512: ',
  ),
}


@pytest.mark.parametrize('case', WRONG_COMMANDS)
def test_a_wrong_command_gets_one_sentence(run, no_model, case):
  words, *parts = WRONG_COMMANDS[case]
  assert_refused(run(*words), *parts)


REQUIRED = {'generate': PROMPT}
for rows in lazy.installed(
  'tests.infer.contract_rows:REQUIRED_FLAGS',
  'tests.training.contract_rows:REQUIRED_FLAGS',
):
  REQUIRED |= rows


@pytest.mark.parametrize('command', REQUIRED)
def test_an_unknown_option_points_to_the_help_of_its_command(run, command):
  result = run(*command.split(), *REQUIRED[command], '--unknown')
  assert_refused(result, ': --unknown', f'specdec {command} --help')


def test_lines_with_settings_of_their_own(run, no_model, tmp_path):
  path = tmp_path / 'lines.jsonl'
  warm = {'prompt': 'a', 'temperature': 0.5}
  cold = {'prompt': 'b', 'temperature': 0}
  path.write_text('\n'.join(map(json.dumps, (warm, cold))))
  samples = ('--prompts', path, '--temperature', '1')
  # Refused for the line that is greedy, whatever the flag says.
  result = run('generate', *samples, '--num_return_sequences', '2')
  assert_refused(result, 'line 2: --num_return_sequences 2', 'temperature 0')


@pytest.mark.parametrize('path', PROMPTS, ids=lambda path: path.name)
def test_our_own_prompts_are_read(run, path):
  """All of a file is, before a model."""
  outcome = run('generate', '--model', 'nowhere', '--prompts', path)
  assert_refused(outcome, "no model is called 'nowhere'")


def test_plain_decoding_takes_no_gamma(run):
  options = ('--model', 'lm-nano', '--drafter', 'none', '--gamma', '3')
  for command in ('generate', 'chat'):
    prompt = PROMPT if command == 'generate' else ()
    result = run(command, *prompt, *options)
    assert_refused(result, 'gamma only with exact_bits', 'leave gamma out')


def test_a_folder_that_takes_no_files(run, no_model):
  result = run('generate', *PROMPT, '--json', '/proc/out.jsonl')
  assert_refused(result, 'cannot write --json /proc/out.jsonl: ')
  assert 'lock' not in result.err


@pytest.mark.parametrize('command', ['generate', 'chat', 'convert', 'doctor'])
def test_help_names_the_options(run, command):
  result = run(command, '--help')
  assert (result.status, result.err) == (0, '')
  assert f'usage: specdec {command}' in result.out
  if command == 'generate':
    for flag in (
      *('model', 'draft_model', 'drafter', 'gamma', 'verification', 'lenience'),
      *('temperature', 'top_k', 'top_p', 'seed', 'max_new_tokens', 'dtype'),
      *('batch_size', 'num_devices', 'chat', 'prompt', 'prompts', 'json'),
      *('trace', 'config', 'vocabulary', 'revision', 'draft_config', 'min_p'),
      *('stop', 'num_return_sequences', 'system'),
    ):
      assert f'--{flag}' in result.out
    assert 'or auto, the default' in ' '.join(result.out.split())


def test_help_shows_defaults_as_they_are_typed(run):
  shown = ' '.join(run('generate', '--help').out.split())
  assert '(default: float32)' in shown
  assert '(default: )' not in shown


def parsed(*given):
  parser = options.Parser()
  options.add_models(parser)
  options.add_sampling(parser)
  options.add_prompts(parser)
  args = parser.parse_args([*PROMPT, *given])
  return args, from_flags.choices(args)


def test_max_ngram_alone_lowers_min_ngram():
  for given, expected in (((), 2), (('--max_ngram', '1'), 1)):
    _, choices = parsed('--drafter', 'prompt_lookup', *given)
    # Where gamma is not chosen, it is the drafter's own, as in Python.
    assert choices.drafter.length == Fixed(8)
    assert choices.drafter.min_ngram is None
    assert checked_min_ngram(choices.drafter.max_ngram, None) == expected


def test_the_gamma_of_a_draft_model_is_that_of_python():
  _, choices = parsed('--draft_model', 'x', '--verification', 'greedy')
  expected = DraftModel(model=Model(checkpoint='x')).length
  assert choices.drafter.length.gamma == lengths.usual(expected).gamma


def test_lenient_greedy_reads_the_probabilities_that_top_p_leaves():
  given = ('--verification', 'greedy', '--lenience', '0.5', '--top_p', '0.9')
  assert parsed(*given)[1].sampling.top_p == 0.9


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    ((), ('float32', 'float32')),
    (('--dtype', 'bfloat16'), ('bfloat16', 'bfloat16')),
    (('--draft_dtype', 'bfloat16'), ('float32', 'bfloat16')),
  ],
)
def test_the_draft_model_may_have_a_dtype_of_its_own(model, given, expected):
  _, choices = parsed('--model', model, '--draft_model', model, *given)
  params = choices.build().params
  for side, dtype in zip(
    (params.target, params.drafter), expected, strict=True
  ):
    found = {
      leaf.dtype.name
      for path, leaf in jax.tree.leaves_with_path(side)
      if not path[-1].key.startswith('float32_')  # Copies, for a CPU.
    }
    assert found == {dtype}
