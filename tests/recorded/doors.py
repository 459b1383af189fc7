"""The doors of the package: each decodes the texts of a case, and returns a
record of each text that JSON can hold."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

import specdec_jax
from specdec_jax.__main__ import main
from specdec_jax.integrations import t5x
from tests.recorded import cases, checkpoints
from tests.recorded.cases import MAX_INPUT_TOKENS, NUM_NEW, TEXTS, Case

Record = dict[str, Any]

# Names of drafters and of rules in gin files.
GIN_DRAFTERS = {
  'prompt_lookup': 'PromptLookup',
  'suffix': 'Suffix',
  'ngram': 'NGram',
  'uniform': 'Uniform',
  'model': 'DraftModel',
  'quantized': 'Quantized',
  'eagle': 'Eagle',
  'spec_drafter': 'SpecDrafter',
  'block_heads': 'BlockHeads',
  'grammar': 'GrammarDrafter',
}
GIN_RULES = {
  'speculative_sampling': 'SpeculativeSampling',
  'greedy': 'Greedy',
  'block': 'Block',
  'top_beta': 'TopBeta',
  'traversal': 'Traversal',
  'target_sample_walk': 'TargetSampleWalk',
}
# Options of the models, by their names in gin files.
GIN_MODELS = {
  'dtype': 'DTYPE',
  'weights': 'WEIGHTS',
  'cache_dtype': 'CACHE_DTYPE',
  'exact_bits': 'Decoding.exact_bits',
}


def write(folder: Path) -> None:
  """Writes the checkpoints, and the texts as each door reads them."""
  checkpoints.write(folder)
  (folder / 'texts.txt').write_text('\n'.join(TEXTS) + '\n')
  lines = [json.dumps({'inputs': text, 'targets': text}) for text in TEXTS]
  (folder / 'task.jsonl').write_text('\n'.join(lines) + '\n')


def run(*argv: object) -> str:
  """Runs `specdec` in this process; returns what it printed. RuntimeError if
  it fails."""
  output, errors = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
    try:
      status = main([str(argument) for argument in argv])
    except SystemExit as stopped:  # By --help.
      status = stopped.code
  if status:
    raise RuntimeError(f'{argv}: status {status}: {errors.getvalue()}')
  return output.getvalue()


def exact(value: Any) -> Any:
  """Returns a value for JSON from which each bit of a float can be read."""
  if isinstance(value, dict):
    return {str(key): exact(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [exact(item) for item in value]
  if isinstance(value, float | np.floating):
    is_finite = math.isfinite(value)
    return float(value).hex() if is_finite else repr(float(value))
  if isinstance(value, np.integer):
    return int(value)
  return value


def _options_of(folder: Path, case: Case) -> Record:
  """Returns the options of drafter and rule, with the folder in them."""
  return {
    name: value.format(folder=folder) if isinstance(value, str) else value
    for name, value in {**case.drafter_options, **case.rule_options}.items()
  }


def load(folder: Path, case: Case) -> Any:
  """Loads the decoder of a case."""
  draft_model = case.draft_model
  return specdec_jax.load(
    folder / case.target,
    drafter=case.drafter,
    draft_model=None if draft_model is None else folder / draft_model,
    verification=case.rule,
    temperature=case.temperature,
    **_options_of(folder, case),
    **case.logits,
    **case.load,
  )


def _completion(completion: Any) -> Record:
  return exact(dataclasses.asdict(completion))


def python(folder: Path, case: Case) -> list[Record]:
  """`specdec_jax.generate`."""
  completions = specdec_jax.generate(
    load(folder, case), TEXTS, max_new_tokens=NUM_NEW, batch_size=len(TEXTS)
  )
  return [_completion(completion) for completion in completions]


def stream(folder: Path, case: Case) -> list[Record]:
  """`specdec_jax.stream`, of each text."""
  decoder, records = load(folder, case), []
  for text in TEXTS:
    pieces = specdec_jax.stream(decoder, text, max_new_tokens=NUM_NEW)
    record = {'pieces': list(pieces)}
    records.append(record | _completion(pieces.completion))
  return records


def model_flags(folder: Path, case: Case) -> list[object]:
  """Returns the flags that say what is decoded with."""
  flags: dict[str, Any] = {
    'model': folder / case.target,
    'drafter': case.drafter,
    'verification': case.rule,
    'temperature': case.temperature,
    **case.load,
    **_options_of(folder, case),
    **case.logits,
  }
  if case.draft_model is not None:
    flags['draft_model'] = folder / case.draft_model
  argv: list[object] = []
  for name, value in flags.items():
    argv += [f'--{name}'] if value is True else [f'--{name}', value]
  return argv


def text_flags(folder: Path) -> list[object]:
  """Returns the flags that say which texts are decoded, and how far."""
  return [
    *('--prompts', folder / 'texts.txt'),
    *('--max_new_tokens', NUM_NEW),
    *('--batch_size', len(TEXTS)),
  ]


def flags(folder: Path, case: Case) -> list[Record]:
  """`specdec generate`."""
  output = run(
    'generate',
    *model_flags(folder, case),
    *text_flags(folder),
    *case.flags,
    *('--json', '-'),
  )
  return [exact(json.loads(line)) for line in output.splitlines()]


def _bindings(folder: Path, case: Case, out: Path) -> Record:
  lengths = {'inputs': MAX_INPUT_TOKENS, 'targets': NUM_NEW}
  bindings: Record = {
    'MIXTURE_OR_TASK_NAME': repr(str(folder / 'task.jsonl')),
    'TASK_FEATURE_LENGTHS': lengths,
    'CHECKPOINT_PATH': repr(str(folder / case.target)),
    'INFER_OUTPUT_DIR': repr(str(out)),
    'DTYPE': "'float32'",
    'Decoding.batch_size': len(TEXTS),
  }
  if case.temperature:
    bindings['Decoding.temperature'] = case.temperature
  if case.draft_model is not None:
    draft_model = str(folder / case.draft_model)
    bindings['DRAFTER_CHECKPOINT_PATH'] = repr(draft_model)
  for name, value in case.load.items():
    bindings[GIN_MODELS[name]] = repr(value)
  for name, value in case.logits.items():
    bindings[f'Decoding.{name}'] = repr(value)
  options = _options_of(folder, case)
  for name, value in options.items():
    if name == 'ngram_text':
      bindings['DRAFTER_TEXT'] = repr(value)
    elif name in case.drafter_options:
      bindings[f'drafters.{GIN_DRAFTERS[case.drafter]}.{name}'] = repr(value)
    else:
      bindings[f'rules.{GIN_RULES[case.rule]}.{name}'] = repr(value)
  return bindings | case.bindings


def infer(folder: Path, case: Case, out: Path) -> None:
  """Runs `specdec infer`, with the gin files of drafter and rule."""
  files = ['runs/infer.gin', f'drafters/{case.drafter}.gin']
  if case.bindings.get('infer.mode') != "'score'":
    files.append(f'verification/{case.rule}.gin')
  bindings = _bindings(folder, case, out)
  run(
    'infer',
    '--model=as_stored',
    *(f'--gin_file={name}' for name in files),
    *(f'--gin.{name}={value}' for name, value in bindings.items()),
  )


def read_infer(out: Path) -> list[Record]:
  """Reads the lines that `infer` wrote."""
  [path] = out.glob('task-*.jsonl-00000-of-00001')
  return [exact(json.loads(line)) for line in path.open(encoding='utf-8')]


def gin_files(folder: Path, case: Case) -> list[Record]:
  """`specdec infer`."""
  with tempfile.TemporaryDirectory() as out:
    infer(folder, case, Path(out))
    return read_infer(Path(out))


@dataclasses.dataclass(frozen=True)
class T5XSizes:
  """The fields of `t5x.examples.t5.network.T5Config`."""

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_encoder_layers: int
  num_decoder_layers: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...]
  dtype: str = 'float32'
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False


@dataclasses.dataclass(frozen=True)
class T5XNetwork:
  """What stands for `t5x.examples.t5.network.Transformer`."""

  config: T5XSizes
  scan_layers: bool = False


class T5XVocabulary:
  """What stands for a vocabulary of SeqIO."""

  eos_id = checkpoints.EOS
  vocab_size = checkpoints.VOCAB_SIZE


class T5XModel:
  """What stands for `t5x.models.EncoderDecoderModel` where a `decode_fn` sees
  it."""

  def __init__(self, sizes: T5XSizes):
    self.module = T5XNetwork(sizes)
    self.output_vocabulary = T5XVocabulary()

  def _compute_logits_from_slice(
    self, state, params, encoded_inputs, raw_inputs, max_decode_length
  ):
    raise AssertionError('a step by one token is never taken')

  def tokens_to_logits(
    self, params: Any, inputs: jax.Array
  ) -> Callable[..., Any]:
    """Returns the function that T5X passes to a `decode_fn`."""
    return functools.partial(
      self._compute_logits_from_slice,
      params=params,
      encoded_inputs=None,
      raw_inputs=inputs,
      max_decode_length=NUM_NEW,
    )


def _encoded(folder: Path, texts: Sequence[str]) -> np.ndarray:
  """Returns the tokens of texts, int32 `[B, MAX_INPUT_TOKENS]`, 0 behind."""
  tokenizer = checkpoints.read_tokenizer(folder / 'target')
  tokens = np.zeros((len(texts), MAX_INPUT_TOKENS), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    ids = tokenizer.encode(text).ids
    row[: len(ids)] = ids
  return tokens


def t5x_plugin(folder: Path, case: Case) -> list[Record]:
  """T5X's `decode_fn` under gin, on stand-ins for T5X's objects: tokens, and
  the scores of rows."""
  # Only T5X's own vocabulary knows which ids are padding.
  num_tokens = checkpoints.read_tokenizer(folder / 'target').get_vocab_size()
  padding = range(num_tokens, checkpoints.VOCAB_SIZE)
  suppressed = [*case.logits.get('suppress_tokens', ()), *padding]
  options = {
    'drafter': case.drafter,
    'temperature': case.temperature,
    **_options_of(folder, case),
    **case.logits,
    'suppress_tokens': suppressed,
  }
  gin.clear_config(clear_constants=True)
  gin.parse_config(
    [
      'from __gin__ import dynamic_registration',
      'from specdec_jax.integrations import t5x',
      *(f't5x.speculative_decode.{n} = {x!r}' for n, x in options.items()),
    ]
  )
  decode_fn = gin.get_configurable(t5x.speculative_decode)
  fields = {field.name for field in dataclasses.fields(T5XSizes)}
  sizes = checkpoints.T5_SIZES
  shared = {name: x for name, x in sizes.items() if name in fields}
  activations = tuple(sizes['mlp_activations'])
  shared |= {'emb_dim': sizes['embed_dim'], 'mlp_activations': activations}
  model = T5XModel(T5XSizes(**shared))

  @jax.jit
  def decode(params: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    return decode_fn(
      jnp.zeros((len(TEXTS), NUM_NEW), jnp.int32),
      cache={},
      tokens_to_logits=model.tokens_to_logits(params, inputs),
      eos_id=checkpoints.EOS,
    )

  inputs = jnp.asarray(_encoded(folder, TEXTS))
  tokens, scores = decode(checkpoints.t5_params(), inputs)
  gin.clear_config(clear_constants=True)
  return [
    {'tokens': row.tolist(), 'scores': exact(score.tolist())}
    for row, score in zip(np.asarray(tokens), np.asarray(scores), strict=True)
  ]


_DOORS: dict[str, Callable[[Path, Case], list[Record]]] = {
  cases.PYTHON: python,
  cases.STREAM: stream,
  cases.FLAGS: flags,
  cases.GIN: gin_files,
  cases.T5X: t5x_plugin,
}


def decode(folder: Path, case: Case) -> dict[str, list[Record]]:
  """Decodes the texts through each door of a case."""
  return {door: _DOORS[door](folder, case) for door in case.doors}
