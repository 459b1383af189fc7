"""Names of earlier releases in gin files, bindings and marks, made today's."""

import re
from collections.abc import Mapping

# Modules that gin files named, and those that have their contents.
_MODULES = {
  'specdec_jax.cli.infer': ('specdec_jax.infer.infer',),
  'specdec_jax.cli.infer_decoding': ('specdec_jax.infer.decoding',),
  'specdec_jax.cli.infer_models': (
    'specdec_jax.assembly.drafting',
    'specdec_jax.assembly.models',
    'specdec_jax.sharding.mesh',
  ),
  'specdec_jax.cli.train': ('specdec_jax.training.train',),
  'specdec_jax.cli.train_distilled': ('specdec_jax.training.recipes',),
  'specdec_jax.cli.train_drafters': ('specdec_jax.training.recipes',),
  'specdec_jax.data.tasks': ('specdec_jax.text.tasks',),
  'specdec_jax.training.datasets': ('specdec_jax.data.datasets',),
  'specdec_jax.training.length_buckets': ('specdec_jax.data.length_buckets',),
}
# What gin files bound, and what it is called.
_SELECTORS = {
  'infer_decoding.Decoding': 'decoding.Decoding',
  'infer_models.Model': 'models.Model',
  'infer_models.device_mesh': 'mesh.device_mesh',
  'infer_models.no_drafter': 'drafting.NoDrafter',
  'infer_models.prompt_lookup': 'drafting.PromptLookup',
  'infer_models.uniform': 'drafting.Uniform',
  'infer_models.ngram': 'drafting.NGram',
  'infer_models.draft_model': 'drafting.DraftModel',
  'infer_models.spec_drafter': 'drafting.SpecDrafter',
  'train_distilled.distillation_loss': 'recipes.distillation_loss',
  'train_distilled.drafter_texts': 'recipes.drafter_texts',
  'train_drafters.block_heads_config': 'recipes.block_heads_config',
  'train_drafters.block_heads_loss': 'recipes.block_heads_loss',
  'train_drafters.block_heads_params': 'recipes.block_heads_params',
  'train_drafters.spec_drafter_params': 'recipes.spec_drafter_params',
}
# Rules were functions, and are choices; text that binds `Decoding.verify_fn`
# itself goes on to bind functions.
_RULES = {
  'verification.speculative_sampling': 'rules.SpeculativeSampling',
  'verification.greedy': 'rules.Greedy',
  'verification.block_verification': 'rules.Block',
  'verification.top_beta': 'rules.TopBeta',
}
_ALL = _SELECTORS | _RULES
_VERIFY_FN = 'decoding.Decoding.verify_fn'
_IMPORT = re.compile(
  r'^from (specdec_jax[\w.]*) import (\w+)(?: as (\w+))?[ \t]*$', re.MULTILINE
)
_QUOTED = re.compile(r"""('[^']*'|"[^"]*"|#.*)""")
# Where a selector can begin.
_BEFORE = r'(?:^|(?<=[@/\s(\[,]))'


def renewed(text: str) -> str:
  """The text of a gin file with today's names."""
  modules, selectors = dict(_MODULES), dict(_SELECTORS)
  if 'Decoding.verify_fn' not in text:
    modules['specdec_jax.verification'] = ('specdec_jax.assembly.rules',)
    selectors |= _RULES
  # Parts of a module that has moved have names of their own, whatever it was
  # called in this file.
  for _, name, alias in _IMPORT.findall(text):
    selectors |= {
      old.replace(name, alias, 1): new
      for old, new in selectors.items()
      if alias and old.startswith(f'{name}.')
    }
  lines = (_import(line, modules) for line in text.split('\n'))
  return '\n'.join(_selectors(line, selectors) for line in lines)


def renewed_binding(text: str, bound: Mapping[str, str]) -> str:
  """A binding of the command line likewise, where names may be short; if what
  the files bind is a rule as a function, so does it."""
  rules = [bound[name] for name in bound if name.endswith(_VERIFY_FN)]
  known = _SELECTORS if any(rule != 'None' for rule in rules) else _ALL
  short = {old.rpartition('.')[2]: new for old, new in known.items()}
  name, equals, value = text.partition('=')
  return (
    _selectors(_selectors(name, known), short)
    + equals
    + _selectors(value, _SELECTORS)
  )


def renewed_settings(settings: Mapping[str, str]) -> dict[str, str]:
  """The bindings that a run was made with, as today's files would bind them."""
  text = '\n'.join(f'{name} = {value}' for name, value in settings.items())
  pairs = [line.split(' = ', 1) for line in renewed(text).split('\n')]
  found = dict(pair for pair in pairs if len(pair) == 2)
  rule = found.pop(_VERIFY_FN, 'None').removeprefix('@')
  if rule in _RULES:
    found.pop('decoding.Decoding.rule_temperature', None)
    found['decoding.Decoding.make_rule'] = f'@{_RULES[rule]}'
    found = {_selectors(name, _RULES): value for name, value in found.items()}
  elif rule != 'None':
    found[_VERIFY_FN] = f'@{rule}'
  return found


def _import(line: str, modules: Mapping[str, tuple[str, ...]]) -> str:
  """An import of a module that has moved; of all its parts, on one line."""
  found = _IMPORT.match(line.rstrip())
  new = found and modules.get(f'{found[1]}.{found[2]}')
  if not found or not new:
    return line
  if found[3] and not any(old.startswith(f'{found[2]}.') for old in _ALL):
    package, _, name = new[0].rpartition('.')
    return f'from {package} import {name} as {found[3]}'
  return '\n'.join(
    'from {} import {}'.format(*module.rsplit('.', 1)) for module in new
  )


def _selectors(line: str, known: Mapping[str, str]) -> str:
  """One line; what stands in quotes or in a comment stays as it is."""
  names = '|'.join(map(re.escape, known))
  parts = _QUOTED.split(line)
  parts[::2] = [
    re.sub(rf'{_BEFORE}({names})\b', lambda found: known[found[1]], part)
    for part in parts[::2]
  ]
  return ''.join(parts)
