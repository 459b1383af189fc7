"""SpecDec's loop as the paper describes it, in plain Python and numpy: one
sentence, no cache, no batch (Xia et al., arXiv 2203.16487)."""

from collections.abc import Callable

import numpy as np


def decode(
  next_log_probs: Callable[[list[int]], np.ndarray],
  fill_block: Callable[[list[int]], list[int]],
  *,
  start: int,
  eos: int,
  max_len: int,
  beta: int,
  tau: float,
) -> tuple[list[int], int]:
  """Drafts a block, keeps what the target would put up with, corrects, repeats.

  Args:
    next_log_probs: from a text to the target's log-probabilities `[T, V]`, row
      i being those of what follows token i.
    fill_block: from the text so far to the drafter's next k tokens.
    start: the decoder's first token.
    eos: ends the text.
    max_len: tokens at most, the first included.
    beta: a drafted token has to be among the target's so many likeliest,
    tau: and within so many nats of the likeliest.

  Returns:
    The text and the number of iterations.
  """
  text, num_iterations = [start], 0
  while len(text) < max_len and text[-1] != eos:
    num_iterations += 1
    block = fill_block(text)
    log_probs = next_log_probs(text + block)
    verdict = []
    for i, token in enumerate(block):
      row = log_probs[len(text) - 1 + i]
      likeliest = sorted(range(len(row)), key=lambda t: (-row[t], t))[:beta]
      if token not in likeliest or row.max() - row[token] > tau:
        break
      verdict.append(token)
    # The correction, or what follows a block that passed whole.
    verdict.append(int(log_probs[len(text) - 1 + len(verdict)].argmax()))
    for token in verdict:
      text.append(token)
      if token == eos or len(text) == max_len:
        break
  return text, num_iterations
