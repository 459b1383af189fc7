"""The StableHLO of six decoding loops, as far as it does not depend on names
and places in files.

Whatever JAX lowers while a door decodes is written by JAX itself, see
`jax_dump_ir_to`; kept are the programs that multiply matrices.
"""

import hashlib
import re
import tempfile
from pathlib import Path

import jax

from tests.recorded import doors
from tests.recorded.cases import GIN, PYTHON, Case

LOOPS = {
  'plain': Case(target='llama', doors=(PYTHON,)),
  'draft model': Case(
    target='llama',
    drafter='model',
    drafter_options={'gamma': 4},
    temperature=1.0,
    doors=(PYTHON,),
  ),
  'EAGLE tree': Case(
    target='llama',
    drafter='eagle',
    drafter_options={'gamma': 3, 'tree': 8},
    temperature=1.0,
    doors=(PYTHON,),
  ),
  'prompt lookup': Case(
    target='llama',
    drafter='prompt_lookup',
    drafter_options={'gamma': 4},
    doors=(PYTHON,),
  ),
  'Spec-Drafter': Case(
    drafter='spec_drafter', drafter_options={'gamma': 4}, doors=(PYTHON,)
  ),
  'refilled rows with exact_bits': Case(
    target='llama',
    drafter='model',
    drafter_options={'gamma': 4},
    load={'dtype': 'bfloat16', 'exact_bits': True},
    bindings={'Decoding.refill_size': 1},
    doors=(GIN,),
  ),
}
# A name of an argument or a result in Python, which says nothing of the loop.
_NAMES = re.compile(r',? ?jax\.(?:result_info|arg_info) = "[^"]*"')
# 'loc(unknown)', 'loc("x")', 'loc(#loc3)', 'loc("x"(#loc3))'; definitions are
# lines of their own.
_LOCATIONS = re.compile(
  r'^#loc.*\n|\s*loc\((?:"(?:[^"\\]|\\.)*"|[^()"]|\([^()]*\))*\)', re.M
)
_SYMBOLS = re.compile(r'@[\w.$-]+|@"[^"]*"')


def normalized(text: str) -> str:
  """Removes locations and Python's names from a module in StableHLO, and names
  its functions by their order."""
  text = _NAMES.sub('', _LOCATIONS.sub('', text))
  symbols: dict[str, str] = {}

  def rename(match: re.Match[str]) -> str:
    return symbols.setdefault(match[0], f'@f{len(symbols)}')

  lines = [
    # The target of a custom call is the name of a library's function.
    line if 'custom_call' in line else _SYMBOLS.sub(rename, line)
    for line in text.splitlines()
  ]
  return '\n'.join(lines) + '\n'


def lowered(folder: Path, case: Case) -> list[str]:
  """Decodes a case; returns the normalized modules that multiply matrices."""
  jax.clear_caches()
  with tempfile.TemporaryDirectory() as dumped:
    jax.config.update('jax_dump_ir_to', dumped)
    jax.config.update('jax_dump_ir_modes', 'stablehlo')
    try:
      doors.decode(folder, case)
    finally:
      jax.config.update('jax_dump_ir_to', '')
    texts = [path.read_text() for path in Path(dumped).glob('*.mlir')]
  modules = [normalized(text) for text in texts if 'dot_general' in text]
  # Programs are compiled in any order, and the same one perhaps twice.
  return sorted({*modules}, key=lambda text: (-len(text), text))


def record(folder: Path) -> dict[str, list[dict[str, str]]]:
  """Returns the modules of each loop, with their digests."""
  return {
    name: [
      {'sha256': hashlib.sha256(text.encode()).hexdigest(), 'text': text}
      for text in lowered(folder, case)
    ]
    for name, case in LOOPS.items()
  }
