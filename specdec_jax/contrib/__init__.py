"""Methods that are exact and tested but have not paid off yet.

They keep the target's output as the rest of the package does, have the same
tests and are chosen through the same options, but were not faster than simpler
methods on any model they were measured with. A method that becomes faster moves
out of `contrib`; until then its interface may change without notice.

- `speculative_beams`, `beam_trie`, `beams`: beam search that scores several
  steps of all beams in one target call, and its drafters. With no draft it is
  the search that `specdec infer` runs, since beams then share one cache.
- `blockwise_heads`: the heads of Stern et al. (2018), which guess the next
  block from the target's last hidden state.
"""
