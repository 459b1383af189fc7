"""Changes small files at random, and looks what the readers make of them.

Every reader of a file that users bring (GGUF, safetensors, T5X, Orbax,
config.json, tokenizer.json, SentencePiece, token files, texts for EAGLE-3,
traces) is given files with changed bytes and with changed fields. It may read
them or raise ValueError. Anything else is a finding, with exit status 1:
another error, a panic or a crash beneath Python, a file opened outside the
folder, more memory than 4 times the file and 32 MiB, more than 5 s of processor
time.
"""

import argparse
import os
import sys
import time
from pathlib import Path


def main() -> int:
  from tests.fuzz import campaign
  from tests.fuzz.readers import READERS

  parser = argparse.ArgumentParser(prog='tests.fuzz', description=__doc__)
  parser.add_argument('--inputs', type=int, default=100_000, metavar='N')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--seconds', type=float, default=float('inf'))
  parser.add_argument('--reader', action='append', choices=list(READERS))
  parser.add_argument(
    '--start',
    type=int,
    default=0,
    metavar='K',
    help='the first input of each reader, to replay one',
  )
  parser.add_argument('--findings', type=Path, default=Path('out/fuzz'))
  args = parser.parse_args()
  begun = time.time()

  def show(counts: campaign.Counts) -> None:
    print(f'after {time.time() - begun:.0f} s:', flush=True)
    print(campaign.format_table(counts), flush=True)

  counts = campaign.run(
    args.reader or list(READERS),
    num_inputs=args.inputs,
    seed=args.seed,
    start=args.start,
    seconds=args.seconds,
    findings=args.findings,
    progress=show,
  )
  show(counts)
  if number := campaign.num_undocumented(counts):
    print(f'{number:,} findings; the first of each kind lie in {args.findings}')
    print(campaign.format_findings(args.findings))
  return 1 if number else 0


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=1'
  sys.exit(main())
