"""`python -m tests.recorded`: records what the package does, or compares it
with an earlier record."""

import os
import tempfile

# One device, no compiled programs of others, and no gammas that were measured.
_FOLDER = tempfile.TemporaryDirectory(prefix='specdec-recorded-')
os.environ |= {
  'JAX_PLATFORMS': 'cpu',
  'XLA_FLAGS': '--xla_cpu_parallel_codegen_split_count=1',
  'XDG_CACHE_HOME': _FOLDER.name,
  'JAX_COMPILATION_CACHE_DIR': f'{_FOLDER.name}/compiled',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  # The same bits each time, in a third of the time to compile.
  'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  'SPECDEC_PROGRESS': '0',
  'COLUMNS': '80',
}

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402

import tests.recorded  # noqa: E402
from tests.recorded import differences, doors, names, programs  # noqa: E402
from tests.recorded.cases import CASES  # noqa: E402


def outputs(folder: Path) -> dict[str, Any]:
  """Decodes all cases."""
  records = {}
  for i, (name, case) in enumerate(CASES.items(), start=1):
    print(f'{i} of {len(CASES)}: {name}', file=sys.stderr, flush=True)
    records[name] = doors.decode(folder, case)
    # A process can map only so many programs.
    jax.clear_caches()
    gc.collect()
  return records


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
  'outputs': outputs,
  'programs': programs.record,
  'names': names.record,
}


def environment() -> dict[str, str]:
  """Returns what bits and lowered programs depend on, beside the code."""
  cpuinfo = Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  models = [line for line in lines if line.startswith(('model', 'flags'))]
  return {
    'jax': jax.__version__,
    'python': platform.python_version(),
    'processor': ' '.join(sorted({*models})) or platform.machine(),
  }


def commit() -> str:
  """Returns the commit that is checked out, and whether files differ from it;
  an empty string without git."""
  git = ['git', '-C', str(Path(__file__).parent)]
  describe = [*git, 'describe', '--always', '--dirty', '--abbrev=12']
  process = subprocess.run(
    describe, capture_output=True, text=True, check=False
  )
  return process.stdout.strip()


def record(sections: Sequence[str]) -> dict[str, Any]:
  """Records some sections."""
  recorded: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    doors.write(folder)
    for section in sections:
      started = time.perf_counter()
      text = json.dumps(SECTIONS[section](folder))
      # Folders of this run are no part of the record.
      recorded[section] = json.loads(text.replace(name, '{folder}'))
      seconds = time.perf_counter() - started
      print(f'{section}: {seconds:.0f} s', file=sys.stderr, flush=True)
  return {
    'commit': commit(),
    'environment': environment(),
    'sections': recorded,
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 1 if a record differs, 2 if it cannot be compared
  with."""
  parser = argparse.ArgumentParser(
    prog='python -m tests.recorded',
    description=tests.recorded.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add('--out', type=Path, metavar='FILE', help='write the record')
  add('--compare', type=Path, metavar='FILE', help='print what differs from it')
  add('--sections', nargs='+', choices=SECTIONS, default=[*SECTIONS])
  args = parser.parse_args(argv)
  if args.out is None and args.compare is None:
    parser.error('give --out or --compare')
  before = None
  if args.compare is not None:
    before = json.loads(args.compare.read_text(encoding='utf-8'))
    if before['environment'] != environment():
      for difference in differences.of_values(
        before['environment'], environment(), '/environment'
      ):
        print(difference, file=sys.stderr)
      print('bits may differ: record it again here', file=sys.stderr)
      return 2
  after = record(args.sections)
  if args.out is not None:
    args.out.write_text(json.dumps(after, indent=1) + '\n', encoding='utf-8')
  if before is None:
    return 0
  found = list(differences.of_records(before, after))
  for difference in found:
    print(difference)
  print(f'{len(found)} differences from {before["commit"]}', file=sys.stderr)
  return int(bool(found))


if __name__ == '__main__':
  sys.exit(main())
