"""The door of gin files, for the record of what the package does."""

import json
import tempfile
from pathlib import Path

from tests.recorded import names
from tests.recorded.cases import MAX_INPUT_TOKENS, NUM_NEW, TEXTS, Case
from tests.recorded.doors import Record, exact, options_of, run

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
  options = options_of(folder, case)
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


def written_by_infer(folder: Path, out: Path) -> dict[str, list[str]]:
  """Returns the keys of what `infer` writes, and the names of its gin file."""
  infer(folder, names.DRAFTED, out)
  [results] = out.glob('*.jsonl-00000-of-00001')
  marks = [path for path in out.rglob('*COMPLETED*') if path.is_file()]
  [config] = out.rglob('config.gin')
  run('eval', results, '--json', out / 'eval.json')
  return {
    'infer': names.all_keys(names.read_jsonl(results)),
    'marks of infer': names.all_keys(
      [json.loads(path.read_text()) for path in marks]
    ),
    'config.gin': names.gin_names(config.read_text()),
    'eval': names.all_keys([json.loads((out / 'eval.json').read_text())]),
  }
