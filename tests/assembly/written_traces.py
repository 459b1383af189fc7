"""A trace written by hand: three iterations, every verdict."""

from specdec_jax.assembly import recording
from specdec_jax.assembly import trace_files as storage


def drafted(text, verdict, *, token=9, p=0.5, q=0.25, u=0.125):
  return {
    'token': token,
    'text': text,
    'p': p,
    'q': q,
    'u': u,
    'accept_prob': 1.0,
    'verdict': verdict,
  }


def following(text, verdict):
  return {'token': 8, 'text': text, 'p': 0.75, 'verdict': verdict}


def iteration(k, tokens, next_token, row=0):
  num_accepted = sum(t['verdict'] == 'accepted' for t in tokens)
  return {
    'type': 'iteration',
    'row': row,
    'iteration': k,
    'start': 4,
    'drafted': tokens,
    'next': next_token,
    'committed': num_accepted + (next_token is not None),
  }


HEADER = recording.header(
  target='Big', drafter='Small', verification='speculative_sampling', gamma=3
)

ITERATIONS = [
  iteration(
    0,
    [
      drafted('The', 'accepted'),
      drafted(' dog', 'rejected'),
      drafted(' ran', 'discarded'),
    ],
    following(' cat', 'correction'),
  ),
  iteration(
    1,
    [
      drafted(' sat', 'accepted'),
      drafted('.\n', 'accepted'),
      drafted('\t', 'accepted'),
    ],
    following('It', 'bonus'),
  ),
  iteration(2, [], following(' [b]purred[/b]', 'plain')),
  iteration(
    3,
    [drafted('</s>', 'accepted', token=2), drafted('', 'truncated')],
    None,
  ),
]


def written_trace(iterations=None, *, is_complete=True, text='Who?\nTell.'):
  iterations = ITERATIONS if iterations is None else iterations
  rows = {}
  for record in iterations:
    rows.setdefault(record['row'], []).append(record)
  summary = recording.summarize(iterations, 3)
  return storage.Trace(
    header=HEADER,
    prompts={
      row: {'type': 'prompt', 'row': row, 'text': text, 'num_tokens': 4}
      for row in rows
    },
    iterations=rows,
    summary=recording.summary_record(summary) if is_complete else None,
  )
